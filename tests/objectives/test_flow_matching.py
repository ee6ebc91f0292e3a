"""Likelihood-free actor losses."""

from __future__ import annotations

import math

import pytest
import torch

from tests.conftest import make_policy, make_record
from tests.objectives.test_flow_ppo import gradients, perturb
from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.model import draw_flow_noise
from wamrl_torchrl.objectives import FlowNFTLoss, WeightedFlowLoss
from wamrl_torchrl.objectives.flow_matching import NFT_VELOCITY


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flow_errors(policy, record, seed: int = 3) -> torch.Tensor:
    """The model's own cloning loss [B] of the executed actions, on the noise that ``seeded(seed)`` draws."""
    model, chunk = policy.model, record[schema.CHAIN][:, -1]
    flow = draw_flow_noise(chunk, model.config.action_shift, seeded(seed))
    pad = ~record["next", schema.EXECUTED_MASK]
    return model.action_loss(model.encode_image(record), model.context(record), chunk, flow, action_is_pad=pad)


class TestWeightedFlow:
    def test_is_the_cloning_loss_weighted_by_positive_advantages(self):
        policy = make_policy()
        record = make_record(policy, 8)
        out = WeightedFlowLoss(policy, generator=seeded())(record)
        weight = record[schema.ADVANTAGE].squeeze(-1).clamp(min=0)
        assert 0 < int((weight > 0).sum()) < 8
        errors = flow_errors(policy, record)
        torch.testing.assert_close(out["loss_objective"], (weight * errors).sum() / weight.sum())
        torch.testing.assert_close(out["flow_error"], errors.mean().detach())
        torch.testing.assert_close(out["weight_mean"], weight.mean())

    def test_exponential_weights(self):
        loss = WeightedFlowLoss(make_policy(), weighting="exponential", temperature=0.5, max_weight=3.0)
        expected = [math.exp(-2), 1.0, 3.0]
        assert loss.weights(torch.tensor([-1.0, 0.0, 1.0])).tolist() == pytest.approx(expected)

    def test_without_a_better_chunk_nothing_moves(self):
        policy = make_policy()
        record = make_record(policy, 4)
        record[schema.ADVANTAGE] = -record[schema.ADVANTAGE].abs()
        out = WeightedFlowLoss(policy)(record)
        out["loss_objective"].backward()
        assert float(out["loss_objective"].detach()) == 0
        assert not gradients(policy).any()

    def test_only_executed_actions_count(self):
        policy = make_policy()
        record = make_record(policy, 6)
        record[schema.ADVANTAGE] = record[schema.ADVANTAGE].abs()
        record["next", schema.EXECUTED_MASK][1] = False
        whole = WeightedFlowLoss(policy, generator=seeded())(record)["loss_objective"]
        record[schema.ADVANTAGE][1] = 100.0
        assert torch.equal(WeightedFlowLoss(policy, generator=seeded())(record)["loss_objective"], whole)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"weighting": "softmax"}, "weighting must be"),
            ({"temperature": 0.0}, "temperature and max_weight must be positive"),
            ({"max_weight": -1.0}, "temperature and max_weight must be positive"),
        ],
    )
    def test_refuses(self, options, message):
        with pytest.raises(ValueError, match=message):
            WeightedFlowLoss(make_policy(), **options)

    def test_advantages_of_another_shape_are_refused(self):
        policy = make_policy()
        record = make_record(policy, 3)
        with pytest.raises(ValueError, match=r"'advantage' must be of shape \(3, 1\), found \(3,\)"):
            WeightedFlowLoss(policy)(record.set(schema.ADVANTAGE, torch.ones(3)))


class TestNFT:
    def prepared(self, policy, batch: int = 6, **options):
        loss, record = FlowNFTLoss(policy, generator=seeded(), **options), make_record(policy, batch)
        loss.prepare(record, batch_size=4)
        return loss, record

    def test_of_good_chunks_alone_is_cloning(self):
        """r = 1 and beta = 1: the positive policy is the trained one, wherever it is."""
        policy = make_policy()
        loss, record = self.prepared(policy)
        record[schema.ADVANTAGE] = torch.full((6, 1), 5.0)
        perturb(policy)
        out = loss(record)
        assert float(out["optimality"]) == 1
        torch.testing.assert_close(out["loss_objective"], flow_errors(policy, record).mean())

    @pytest.mark.parametrize("beta", [0.3, 1.0])
    def test_first_step_is_beta_times_signed_cloning(self, beta):
        """At the old weights the gradient is that of ``beta * sum (2 r - 1) * error``, so bad chunks push away."""
        policy = make_policy()
        policy.model.mot.video.requires_grad_(False)
        loss, record = self.prepared(policy, beta=beta, advantage_scale=2.0)
        loss(record)["loss_objective"].backward()
        ours = gradients(policy)
        sign = (record[schema.ADVANTAGE].squeeze(-1) / 2).clamp(-1, 1)
        (beta * sign * flow_errors(policy, record)).mean().backward()
        torch.testing.assert_close(ours, gradients(policy), rtol=1e-3, atol=1e-6)

    def test_a_bad_chunk_is_left_behind(self):
        policy = make_policy()
        loss, record = self.prepared(policy)
        record[schema.ADVANTAGE] = torch.full((6, 1), -1.0)
        before = flow_errors(policy, record).mean()
        loss(record)["loss_objective"].backward()
        with torch.no_grad():
            for parameter in policy.model.mot.action.parameters():
                parameter -= 0.01 * parameter.grad
        assert flow_errors(policy, record).mean() > before

    def test_old_velocities_depend_on_no_batching(self):
        policy = make_policy()
        records = [make_record(policy, 6) for _ in range(2)]
        for record, size in zip(records, (6, 2), strict=True):
            FlowNFTLoss(policy, generator=seeded()).prepare(record, batch_size=size)
        torch.testing.assert_close(records[0][NFT_VELOCITY], records[1][NFT_VELOCITY], rtol=1e-4, atol=1e-5)

    def test_unprepared_records_are_refused(self):
        policy = make_policy()
        with pytest.raises(KeyError, match=r"call FlowNFTLoss\.prepare"):
            FlowNFTLoss(policy)(make_record(policy, 2))

    @pytest.mark.parametrize("options", [{"beta": 0.0}, {"advantage_scale": -1.0}])
    def test_refuses(self, options):
        with pytest.raises(ValueError, match="beta and advantage_scale must be positive"):
            FlowNFTLoss(make_policy(), **options)
