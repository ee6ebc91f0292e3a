"""Acting by inverse dynamics (idm mode), and training it teacher-forced."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.conftest import make_model, make_record, make_states, make_stats
from wamrl_torchrl import schema
from wamrl_torchrl.learner import parity
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.modules.fastwam.model import FlowNoise, draw_flow_noise, force_future
from wamrl_torchrl.modules.noise import mix_seeds, seeded_normal
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig, IDMConfig
from wamrl_torchrl.objectives import ActionSFTLoss, FlowPPOLoss


def make_idm_policy(*, dtype=torch.float32, sde=None, **idm) -> FlowPolicy:
    model = make_model()
    model.config = replace(model.config, action_modes=("first_frame", "idm"))
    options = {"num_steps": 4, "noise_level": 0.5, **(sde or {})}
    policy = FlowPolicy(
        model, make_stats(), sde=FlowSDEConfig(**options), executed_rows=8, idm=IDMConfig(**{"num_steps": 3, **idm})
    )
    return policy.to(dtype)


class TestPolicy:
    def test_emits_what_the_spec_says(self):
        policy = make_idm_policy()
        out = policy(make_states(4)).select(*policy.out_keys)
        assert set(out.keys()) == set(policy.spec.keys())
        assert all(policy.spec[key].is_in(out[0][key]) for key in out.keys())  # noqa: SIM118
        schema.validate_macro_step(out, required=())
        assert out[schema.VIDEO_LATENTS].shape == (4, 48, 2, 4, 8)

    def test_the_future_is_the_imagined_one_of_the_decision(self):
        policy = make_idm_policy()
        states = make_states(3)
        out = policy(states.clone())
        noise = seeded_normal(mix_seeds(out["noise_seed"].squeeze(-1), 3), (48, 2, 4, 8))
        future = policy.model.imagine(states, noise, num_steps=3)[:, :, 1:]
        assert torch.equal(out[schema.VIDEO_LATENTS], future.bfloat16())
        assert not torch.equal(noise, seeded_normal(mix_seeds(out["noise_seed"].squeeze(-1), 1), (48, 2, 4, 8)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("store", [True, False])
    @pytest.mark.parametrize("steps", ["one_random", 2, "all"])
    def test_record_gives_back_its_log_prob_bit_for_bit(self, store, steps, dtype):
        policy = make_idm_policy(store_latents=store, sde={"stochastic_steps": steps}, dtype=dtype)
        record = policy(make_states(5))
        assert record[schema.CHAIN].dtype == record[schema.LOG_PROB_ROWS].dtype == torch.float32
        kept = record.select(*policy.replay_keys)
        assert (schema.VIDEO_LATENTS in kept.keys()) == store  # noqa: SIM118
        assert torch.equal(policy.log_prob_rows(kept), record[schema.LOG_PROB_ROWS])

    def test_actions_depend_on_the_whole_video(self):
        policy = make_idm_policy()
        record = policy(make_states(3))
        changed = record.clone()
        changed[schema.VIDEO_LATENTS][:, :, 1] += 1  # the last frame alone
        assert not torch.equal(policy.log_prob_rows(changed), record[schema.LOG_PROB_ROWS])
        policy.set_idm(None)
        assert torch.equal(policy.log_prob_rows(changed), policy.log_prob_rows(record))
        assert not torch.equal(policy.log_prob_rows(record), record[schema.LOG_PROB_ROWS])

    def test_the_video_has_a_shift_and_steps_of_its_own(self):
        latents = [
            make_idm_policy(**options)(make_states(2))[schema.VIDEO_LATENTS]
            for options in ({}, {"shift": 5.0}, {"shift": 1.0}, {"num_steps": 5})
        ]
        assert torch.equal(latents[0], latents[1])  # 5.0 is the model's own
        assert not torch.equal(latents[0], latents[2])
        assert not torch.equal(latents[0], latents[3])

    def test_shifts_do_not_reach_each_other(self):
        """Another shift of the video leaves the noise and grid of the actions alone, and the other way round."""
        policy = make_idm_policy()
        before = policy(make_states(2))
        policy.model.config = replace(policy.model.config, action_shift=5.0)
        after = policy(make_states(2))
        assert torch.equal(before[schema.VIDEO_LATENTS], after[schema.VIDEO_LATENTS])
        assert torch.equal(before[schema.CHAIN][:, 0], after[schema.CHAIN][:, 0])
        assert not torch.equal(before[schema.CHAIN][:, -1], after[schema.CHAIN][:, -1])

    def test_deterministic_videos_belong_to_the_initial_condition(self):
        policy, states = make_idm_policy(), make_states(2)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            first = policy(states.clone())
            states["episode_id"] += 50
            second = policy(states.clone())
        assert torch.equal(first[schema.VIDEO_LATENTS], second[schema.VIDEO_LATENTS])
        assert torch.equal(first["action"], second["action"])

    def test_a_record_without_the_video_is_refused(self):
        policy = make_idm_policy()
        record = policy(make_states(2))
        with pytest.raises(KeyError, match="idm mode, whose records need 'video_latents'"):
            policy.log_prob_rows(record.exclude(schema.VIDEO_LATENTS))

    def test_a_mode_the_model_does_not_know_is_refused(self):
        with pytest.raises(ValueError, match="'idm' needs weights trained for it"):
            FlowPolicy(make_model(), make_stats(), idm=IDMConfig())
        model = make_model()
        model.config = replace(model.config, action_modes=("idm",))
        with pytest.raises(ValueError, match="'first_frame' needs weights trained for it"):
            FlowPolicy(model, make_stats())
        with pytest.raises(ValueError, match="action_modes"):
            replace(model.config, action_modes=("joint",))

    @pytest.mark.parametrize(("options", "name"), [({"num_steps": 0}, "num_steps"), ({"shift": 0.0}, "shift")])
    def test_bad_options(self, options, name):
        with pytest.raises(ValueError, match=name):
            IDMConfig(**options)

    def test_trains_with_the_actor_loss(self):
        policy = make_idm_policy()
        record = make_record(policy, 4)
        loss = FlowPPOLoss(policy)
        assert schema.VIDEO_LATENTS in loss.in_keys
        loss(record.select(*loss.in_keys))["loss_objective"].backward()
        assert all(p.grad is not None for p in policy.model.mot.action.parameters())
        assert all(p.grad is None for p in policy.model.mot.video.parameters())
        record["policy_version"] = policy.version.expand(4, 1)
        assert parity(policy, record).gap == 0

    def test_comes_back_from_disk(self, tmp_path):
        policy = make_idm_policy(shift=2.0, dtype=torch.bfloat16)
        again = load_policy(save_policy(policy, tmp_path))
        assert again.idm == policy.idm
        assert again.model.config == policy.model.config
        assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
        before, after = policy(make_states(2)), again(make_states(2))
        assert all(torch.equal(before[key], after[key]) for key in policy.out_keys)


def example(batch: int = 4):
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    states = make_states(batch)
    latents = torch.randn(batch, 48, 3, 4, 8, generator=generator)
    actions = torch.rand(batch, 32, 7, generator=generator) * 2 - 1
    flow = FlowNoise(torch.rand(batch, generator=generator), torch.randn(batch, 32, 7, generator=generator))
    pad = torch.arange(32) >= torch.tensor([32, 20, 9, 32])[:batch, None]
    return model, latents, model.context(states), actions, flow, pad


class TestTeacherForcing:
    def test_each_row_has_the_loss_of_its_own_mode(self):
        """A mixed batch is the rows of an all-idm and of a first-frame batch, in place."""
        model, latents, context, actions, flow, pad = example()
        first, future = latents[:, :, :1], latents[:, :, 1:]

        def losses(rows):
            forced = force_future(torch.tensor(rows), future[rows], 5.0) if rows else None
            return model.action_loss(first, context, actions, flow, action_is_pad=pad, forced=forced)

        none, every = losses([]), losses([0, 1, 2, 3])
        assert not torch.isclose(none, every, rtol=1e-3).any()
        mixed = losses([3, 1])
        expected = torch.stack((none[0], every[1], none[2], every[3]))
        torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-6)

    def test_gradients_of_a_mixed_batch_are_those_of_its_parts(self):
        model, latents, context, actions, flow, pad = example()
        forced = force_future(torch.tensor([0, 2]), latents[[0, 2], :, 1:], 5.0)
        model.action_loss(latents[:, :, :1], context, actions, flow, action_is_pad=pad, forced=forced).sum().backward()
        mixed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        context = model.context(make_states(4))
        for rows, sees in (([0, 2], True), ([1, 3], False)):
            part = FlowNoise(flow.sigma[rows], flow.noise[rows])
            forced = force_future(torch.tensor([0, 1]), latents[rows, :, 1:], 5.0) if sees else None
            loss = model.action_loss(
                latents[rows, :, :1], context[rows], actions[rows], part, action_is_pad=pad[rows], forced=forced
            )
            loss.sum().backward(retain_graph=True)
        alone = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert alone.keys() == mixed.keys()
        for name, gradient in mixed.items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-3, atol=1e-5, msg=name)

    def test_noise_on_the_forced_video(self):
        future = torch.randn(400, 48, 2, 2, 2)
        rows = torch.arange(400)
        clean = force_future(rows, future, 5.0)
        assert torch.equal(clean.future, future)
        assert not clean.sigma.any()
        generator = torch.Generator().manual_seed(0)
        noised = force_future(rows, future, 5.0, noise_prob=0.25, generator=generator)
        changed = (noised.future != future).flatten(1).any(-1)
        assert torch.equal(changed, noised.sigma > 0)
        assert 70 <= int(changed.sum()) <= 130  # 100 +- 3.5 standard deviations
        # At shift 5 the median of sigma is 5/6.
        assert float(noised.sigma[changed].median()) == pytest.approx(5 / 6, abs=0.06)
        sigma = noised.sigma[:, None, None, None, None]
        implied = (noised.future - (1 - sigma) * future)[changed] / sigma[changed]
        assert float(implied.std()) == pytest.approx(1, abs=0.02)

    def test_the_time_of_a_noised_video_is_told(self):
        model, latents, context, actions, flow, _ = example()
        forced = force_future(torch.arange(4), latents[:, :, 1:], 5.0, noise_prob=1.0)
        told = model.action_loss(latents[:, :, :1], context, actions, flow, forced=forced)
        lied = model.action_loss(
            latents[:, :, :1], context, actions, flow, forced=forced._replace(sigma=torch.zeros(4))
        )
        assert not torch.isclose(told, lied, rtol=1e-4).any()


class TestActionSFT:
    def batch(self):
        states = make_states(6)
        generator = torch.Generator().manual_seed(0)
        later = torch.randint(0, 256, (6, 8, 3, 64, 128), generator=generator, dtype=torch.uint8)
        states["video"] = torch.cat((states["observation", "image"][:, None], later), 1)
        states["actions"] = torch.rand(6, 32, 7, generator=generator) * 2 - 1
        states["action_is_pad"] = torch.zeros(6, 32, dtype=torch.bool)
        return states

    @pytest.mark.parametrize("probability", [0.0, 1.0])
    def test_is_the_models_loss(self, probability):
        model, batch = make_model(), self.batch()
        loss = ActionSFTLoss(
            model, make_stats(), action_idm_prob=probability, generator=torch.Generator().manual_seed(5)
        )
        assert ("video" in loss.in_keys) == (probability > 0)
        found = loss(batch.select(*loss.in_keys))["loss_action"]
        generator = torch.Generator().manual_seed(5)
        actions = make_stats().from_env_actions(batch["actions"])
        flow = draw_flow_noise(actions, 1.0, generator)
        latents = model.codec.encode(batch["video"].transpose(1, 2))
        forced = force_future(torch.arange(6), latents[:, :, 1:], 5.0) if probability else None
        expected = model.action_loss(latents[:, :, :1], model.context(batch), actions, flow, forced=forced).mean()
        torch.testing.assert_close(found, expected)

    def test_draws_rows_and_noise_with_the_given_chances(self, monkeypatch):
        model, batch, seen = make_model(), self.batch(), []
        own = model.action_loss
        monkeypatch.setattr(
            model, "action_loss", lambda *args, **options: seen.append(options) or own(*args, **options)
        )
        generator = torch.Generator().manual_seed(1)
        options = {"action_idm_prob": 0.5, "video_cond_noise_prob": 0.25}
        loss = ActionSFTLoss(model, make_stats(), generator=generator, **options)
        with torch.no_grad():
            for _ in range(60):
                loss(batch)
        forced = [given["forced"] for given in seen if given["forced"] is not None]
        rows = torch.cat([one.rows for one in forced])
        assert 180 - 40 <= len(rows) <= 180 + 40  # 360 draws, four standard deviations
        assert set(rows.tolist()) == set(range(6))
        noised = torch.cat([one.sigma for one in forced]) > 0
        assert 0.12 <= float(noised.float().mean()) <= 0.38
        for one in forced[:5]:
            clean = model.codec.encode(batch["video"][one.rows].transpose(1, 2))[:, :, 1:]
            same = (one.future == clean).flatten(1).all(-1)
            assert torch.equal(same, one.sigma == 0)

    def test_bad_options(self):
        for name in ("action_idm_prob", "video_cond_noise_prob"):
            with pytest.raises(ValueError, match=name):
                ActionSFTLoss(make_model(), make_stats(), **{name: 1.5})
