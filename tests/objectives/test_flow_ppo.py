from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torchrl.objectives import ClipPPOLoss

from tests.conftest import make_policy, make_record
from wamrl_torchrl import schema
from wamrl_torchrl.modules.reference import ReferenceActor
from wamrl_torchrl.objectives import FlowPPOLoss


def perturb(policy, scale: float = 0.02, seed: int = 0) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.mot.action.parameters():
            parameter.add_(scale * torch.randn_like(parameter) * parameter.abs().mean())


def gradients(policy) -> torch.Tensor:
    out = torch.cat([p.grad.flatten() for p in policy.model.mot.action.parameters()])
    policy.zero_grad()
    return out


class TestAgainstTorchRL:
    @pytest.mark.parametrize("clip", [0.2, (0.2, 0.28), (0.01, 0.02)])
    def test_equals_clip_ppo_on_shared_cases(self, clip):
        policy = make_policy()
        policy.model.mot.video.requires_grad_(False)
        record = make_record(policy, 12)
        perturb(policy)
        ours = FlowPPOLoss(policy, clip_epsilon=clip, dual_clip=None, rows="prefix", normalize_steps=False)
        out = ours(record)
        out["loss_objective"].backward()
        our_gradient = gradients(policy)

        reference = record.clone().set("x_next", policy.x_next(record))
        reference["action_log_prob"] = reference["action_log_prob"].squeeze(-1)
        theirs = ClipPPOLoss(policy, None, clip_epsilon=clip, entropy_bonus=False, functional=False)
        theirs.set_keys(action="x_next", sample_log_prob="action_log_prob", advantage="advantage")
        expected = theirs(reference)
        expected["loss_objective"].backward()
        torch.testing.assert_close(out["loss_objective"], expected["loss_objective"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(our_gradient, gradients(policy), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(out["clip_fraction"], expected["clip_fraction"].float())
        torch.testing.assert_close(out["max_ratio"], expected["max_ratio"], rtol=1e-5, atol=1e-6)


class TestRatio:
    @pytest.mark.parametrize("rows", ["executed", "prefix", "all"])
    @pytest.mark.parametrize("steps", ["one_random", 3])
    def test_is_one_at_the_old_weights(self, rows, steps):
        policy = make_policy(stochastic_steps=steps)
        record = make_record(policy, 6)
        out = FlowPPOLoss(policy, rows=rows)(record)
        assert float(out["max_ratio"]) == 1.0
        assert float(out["kl_approx"]) == 0.0
        assert float(out["clip_fraction"]) == 0.0
        assert float(out["ESS"]) == pytest.approx(1.0)
        torch.testing.assert_close(out["loss_objective"], -record["advantage"].mean())

    def test_rows_that_were_not_executed_do_not_count(self):
        policy = make_policy()
        record = make_record(policy, 6)
        perturb(policy)
        before = FlowPPOLoss(policy)(record)
        other = record.clone()
        mask = record["next", schema.EXECUTED_MASK][:, None]
        other["log_prob_rows"] = torch.where(mask, record["log_prob_rows"], 123.0)
        assert torch.equal(FlowPPOLoss(policy)(other)["loss_objective"], before["loss_objective"])
        changed = record.clone()
        changed["log_prob_rows"] = record["log_prob_rows"] + mask
        assert not torch.equal(FlowPPOLoss(policy)(changed)["loss_objective"], before["loss_objective"])

    def test_a_record_without_executed_actions_has_no_weight(self):
        policy = make_policy()
        record = make_record(policy, 4)
        record["next", schema.EXECUTED_MASK][1] = False
        kept = torch.tensor([0, 2, 3])
        perturb(policy)
        loss = FlowPPOLoss(policy)
        torch.testing.assert_close(
            loss(record)["loss_objective"], loss(record[kept])["loss_objective"], rtol=1e-4, atol=1e-6
        )

    def test_step_normalisation_scales_the_log_ratio(self):
        policy = make_policy()
        record = make_record(policy, 30)
        perturb(policy)
        mask = record["next", schema.EXECUTED_MASK]
        rows = policy.log_prob_rows(record)
        plain = FlowPPOLoss(policy, normalize_steps=False).log_ratio(record, rows, mask)
        loss = FlowPPOLoss(policy)
        torch.testing.assert_close(loss.log_ratio(record, rows, mask), plain * loss.step_scale[record["k_star"]])
        assert float(loss.step_scale.max() / loss.step_scale.min()) > 1.5
        assert 1.0 in loss.step_scale

    def test_mean_reduction_is_the_sum_over_dims(self):
        policy = make_policy()
        record = make_record(policy, 5)
        perturb(policy)
        mask = record["next", schema.EXECUTED_MASK]
        rows = policy.log_prob_rows(record)
        total = FlowPPOLoss(policy, normalize_steps=False).log_ratio(record, rows, mask)
        mean = FlowPPOLoss(policy, normalize_steps=False, row_reduction="mean").log_ratio(record, rows, mask)
        torch.testing.assert_close(mean * mask.sum(-1, keepdim=True) * 7, total)


class TestObjective:
    @pytest.mark.parametrize(("advantage", "bound"), [(-1.0, 3.0), (1.0, 1.28)])
    def test_dual_clip_and_upper_clip_bound_the_loss(self, advantage, bound):
        policy = make_policy()
        record = make_record(policy, 4)
        record["advantage"] = torch.full((4, 1), advantage)
        record["log_prob_rows"] -= 5.0  # the new policy seems far more likely
        loss = FlowPPOLoss(policy)(record)["loss_objective"]
        assert float(loss.detach()) == pytest.approx(-advantage * bound, rel=1e-4)
        loss.backward()
        assert float(gradients(policy).abs().max()) == 0.0

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_a_step_moves_the_log_prob_with_the_advantage(self, sign):
        policy = make_policy()
        record = make_record(policy, 8)
        record["advantage"] = torch.full((8, 1), sign)
        mask = record["next", schema.EXECUTED_MASK][:, None]
        before = (policy.log_prob_rows(record) * mask).sum()
        optimizer = torch.optim.SGD(policy.model.mot.action.parameters(), lr=1e-5)
        FlowPPOLoss(policy)(record)["loss_objective"].backward()
        optimizer.step()
        after = (policy.log_prob_rows(record) * mask).sum()
        assert float(((after - before) * sign).detach()) > 0

    def test_zero_advantage_has_zero_gradient(self):
        policy = make_policy()
        record = make_record(policy, 4)
        record["advantage"] = torch.zeros(4, 1)
        perturb(policy)
        FlowPPOLoss(policy)(record)["loss_objective"].backward()
        assert float(gradients(policy).abs().max()) == 0.0

    def test_repeated_steps_raise_a_wanted_chunk(self):
        policy = make_policy()
        record = make_record(policy, 4)
        record["advantage"] = torch.ones(4, 1)
        loss = FlowPPOLoss(policy, clip_epsilon=(0.2, 5.0))
        optimizer = torch.optim.Adam(policy.model.mot.action.parameters(), lr=1e-3)
        for _ in range(20):
            out = loss(record)
            optimizer.zero_grad()
            out["loss_objective"].backward()
            optimizer.step()
        assert float(loss(record)["mean_ratio"]) > 2


class TestInterface:
    def test_reductions(self):
        policy = make_policy(stochastic_steps=2)
        record = make_record(policy, 5)
        perturb(policy)
        parts = {r: FlowPPOLoss(policy, reduction=r)(record)["loss_objective"] for r in ("none", "sum", "mean")}
        assert parts["none"].shape == (5, 2)
        torch.testing.assert_close(parts["none"].sum(), parts["sum"])
        torch.testing.assert_close(parts["none"].mean(), parts["mean"])

    def test_nested_keys(self):
        policy = make_policy()
        record = make_record(policy, 4)
        expected = FlowPPOLoss(policy)(record)["loss_objective"]
        record.rename_key_("advantage", ("deep", "advantage"))
        loss = FlowPPOLoss(policy)
        loss.set_keys(advantage=("deep", "advantage"))
        assert ("deep", "advantage") in loss.in_keys
        assert torch.equal(loss(record)["loss_objective"], expected)

    def test_dispatch_without_tensordict(self):
        policy = make_policy()
        record = make_record(policy, 3)
        loss = FlowPPOLoss(policy)
        values = {"_".join(k) if isinstance(k, tuple) else k: record[k] for k in loss.in_keys}
        out = loss(**values)
        assert torch.equal(out[0], loss(record)["loss_objective"])

    def test_out_keys(self):
        policy = make_policy()
        loss = FlowPPOLoss(policy)
        out = loss(make_record(policy, 3))
        assert set(out.keys()) == set(loss.out_keys)
        assert [key for key in out.keys() if out[key].requires_grad] == ["loss_objective"]  # noqa: SIM118

    def test_state_dict_round_trip(self):
        first, second = make_policy(seed=0), make_policy(seed=1)
        record = make_record(first, 3)
        FlowPPOLoss(second).load_state_dict(FlowPPOLoss(first).state_dict())
        assert torch.equal(second.log_prob_rows(record), first.log_prob_rows(record))

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"clip_epsilon": (0.0, 0.2)}, "clip_epsilon"),
            ({"dual_clip": 1.0}, "dual_clip"),
            ({"rows": "some"}, "rows"),
            ({"row_reduction": "max"}, "row_reduction"),
            ({"reduction": "median"}, "reduction"),
        ],
    )
    def test_bad_options(self, options, name):
        with pytest.raises(ValueError, match=name):
            FlowPPOLoss(make_policy(), **options)

    @pytest.mark.parametrize("key", ["advantage", "log_prob_rows"])
    def test_wrong_shapes_are_refused_by_name(self, key):
        policy = make_policy()
        record = make_record(policy, 4)
        record[key] = record[key].squeeze(1)
        with pytest.raises(ValueError, match=key):
            FlowPPOLoss(policy)(record)

    def test_in_keys_are_not_set_by_hand(self):
        with pytest.raises(RuntimeError, match="set_keys"):
            FlowPPOLoss(make_policy()).in_keys = ["advantage"]


class TestTokens:
    def test_with_one_action_it_is_the_ratio_of_the_chunk(self):
        policy = make_policy()
        record = make_record(policy, 6)
        record["next", schema.EXECUTED_MASK][:, 1:] = False
        perturb(policy)
        token, chunk = (FlowPPOLoss(policy, row_reduction=name)(record) for name in ("token", "sum"))
        for key in ("loss_objective", "clip_fraction", "kl_approx", "max_ratio", "clip_fraction_step"):
            torch.testing.assert_close(token[key], chunk[key], equal_nan=True)

    def test_each_action_is_clipped_by_itself(self):
        policy = make_policy()
        record = make_record(policy, 5)
        perturb(policy)
        loss = FlowPPOLoss(policy, row_reduction="token", normalize_steps=False, dual_clip=None, clip_epsilon=0.05)
        ratio = (policy.log_prob_rows(record) - record["log_prob_rows"]).exp()  # [B,1,T]
        advantage, mask = record["advantage"][:, None], record["next", schema.EXECUTED_MASK][:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
        torch.testing.assert_close(loss(record)["loss_objective"], -gain[mask].mean())


class TestSteps:
    def test_diagnostics_by_step(self):
        policy = make_policy(stochastic_steps="all")
        record = make_record(policy, 6)
        perturb(policy)
        out = FlowPPOLoss(policy, normalize_steps=False, clip_epsilon=0.01)(record)
        mask = record["next", schema.EXECUTED_MASK][:, None]
        size = ((policy.log_prob_rows(record) - record["log_prob_rows"]) * mask).sum(-1).abs()
        order = record[schema.K_STAR].argsort(-1)
        torch.testing.assert_close(out["abs_log_ratio_step"], size.gather(1, order).mean(0).detach())
        torch.testing.assert_close(out["clip_fraction_step"].mean(), out["clip_fraction"])

    def test_of_a_step_that_was_not_drawn_there_is_none(self):
        policy = make_policy()
        record = make_record(policy, 1)
        seen = ~FlowPPOLoss(policy)(record)["clip_fraction_step"].isnan()
        assert seen.nonzero().flatten().tolist() == record[schema.K_STAR].flatten().tolist()

    def test_weights_choose_the_steps_that_teach(self):
        policy = make_policy()
        record = make_record(policy, 12)
        perturb(policy)
        chosen = record[schema.K_STAR].squeeze(-1) == 2
        assert 0 < int(chosen.sum()) < 12
        weighted = FlowPPOLoss(policy, step_loss_weights=[0, 0, 3.0, 0])(record)["loss_objective"]
        alone = FlowPPOLoss(policy, reduction="sum")(record[chosen])["loss_objective"]
        torch.testing.assert_close(weighted, 4 * alone / 12)

    @pytest.mark.parametrize("weights", [[1.0], [0.0] * 4, [1.0, 1.0, -1.0, 1.0]])
    def test_refuses_weights(self, weights):
        with pytest.raises(ValueError, match="step_loss_weights must be K=4 numbers"):
            FlowPPOLoss(make_policy(), step_loss_weights=weights)


class TestAnchor:
    def loss(self, policy, anchor: str, weight: float = 1.0) -> FlowPPOLoss:
        reference = ReferenceActor(list(policy.model.mot.action.parameters()))
        return FlowPPOLoss(policy, anchor=anchor, anchor_weight=weight, reference=reference)

    @pytest.mark.parametrize("anchor", ["velocity", "analytic"])
    def test_is_zero_at_the_reference(self, anchor):
        policy = make_policy()
        loss, record = self.loss(policy, anchor), make_record(policy, 4)
        loss.prepare(record, batch_size=4)
        assert float(loss(record)["loss_anchor"]) == 0

    def test_analytic_is_the_divergence_of_the_steps(self):
        """Per action dimension, averaged over the executed actions, against torch.distributions."""
        policy = make_policy(stochastic_steps=2)
        loss, record = self.loss(policy, "analytic", weight=0.3), make_record(policy, 5)
        before = policy.transitions(record)
        perturb(policy)
        loss.prepare(record, batch_size=2)
        now = policy.transitions(record)
        std = now.std[..., None, None]
        divergence = kl_divergence(Normal(now.mean, std), Normal(before.mean, std)).mean(-1)
        mask = record["next", schema.EXECUTED_MASK][:, None]
        expected = 0.3 * ((divergence * mask).sum(-1) / mask.sum(-1)).mean()
        torch.testing.assert_close(loss(record)["loss_anchor"], expected, rtol=1e-3, atol=1e-7)

    def test_preparing_leaves_the_weights_as_they_are(self):
        policy = make_policy()
        loss, record = self.loss(policy, "velocity"), make_record(policy, 4)
        perturb(policy)
        before = [parameter.clone() for parameter in policy.parameters()]
        loss.prepare(record, batch_size=4)
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
        assert float(loss(record)["loss_anchor"]) > 0

    def test_the_reference_is_put_back_after_an_error(self):
        policy = make_policy()
        reference = ReferenceActor(list(policy.model.mot.action.parameters()))
        perturb(policy)
        before = [parameter.clone() for parameter in policy.parameters()]
        with pytest.raises(KeyError), reference.applied():
            raise KeyError
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))

    def test_refuses(self):
        policy = make_policy()
        with pytest.raises(ValueError, match="an anchor and the reference it holds to go together"):
            FlowPPOLoss(policy, anchor="velocity")
        with pytest.raises(KeyError, match=r"call FlowPPOLoss\.prepare"):
            self.loss(policy, "velocity")(make_record(policy, 2))
