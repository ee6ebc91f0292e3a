from __future__ import annotations

import pytest
import torch

from tests.conftest import make_policy, make_record, randomize_adapters
from wamrl_torchrl import schema
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import video_parameters
from wamrl_torchrl.objectives.transforms import ReconstructionReward


@pytest.fixture
def policy():
    return make_policy()


def make_reward(policy, **options) -> ReconstructionReward:
    return ReconstructionReward(policy.model, num_steps=2, **options)


class TestScore:
    def test_is_minus_the_error_of_the_frames_that_were_reached(self, policy):
        record = make_record(policy, 6)
        record["next", schema.FUTURE_MASK] = torch.tensor([[1, 1], [1, 0], [0, 0]] * 2, dtype=torch.bool)
        reward = make_reward(policy)
        raw, mask, _ = reward.score(record)
        imagined = (policy.model.decode_frames(reward.imagine(record), (4, 8)).clamp(-1, 1) + 1) / 2
        real = record["next", schema.FUTURE_FRAMES].float() / 255
        error = (imagined - real).square().mean((2, 3, 4))
        expected = torch.stack([-error.mean(-1), -error[:, 0], torch.zeros(6)])[torch.arange(6) % 3, torch.arange(6)]
        torch.testing.assert_close(raw.squeeze(-1), expected)
        assert mask.squeeze(-1).tolist() == [True, True, False] * 2

    def test_is_zero_for_a_future_that_came_as_imagined(self, policy):
        record = make_record(policy, 3)
        reward = make_reward(policy)
        frames = (policy.model.decode_frames(reward.imagine(record), (4, 8)).clamp(-1, 1) + 1) / 2
        record["next", schema.FUTURE_FRAMES] = (frames * 255).round().to(torch.uint8)
        record["next", schema.FUTURE_MASK] = torch.ones(3, 2, dtype=torch.bool)
        raw, *_ = reward.score(record)
        assert -1e-5 < float(raw.min()) <= float(raw.max()) <= 0

    def test_micro_batches_change_nothing(self, policy):
        record = make_record(policy, 7)
        raws = [make_reward(policy, batch_size=size).score(record)[0] for size in (7, 2)]
        torch.testing.assert_close(*raws, rtol=1e-4, atol=1e-6)

    def test_members_of_a_group_share_the_imagination_noise(self, policy):
        record = make_record(policy, 2)
        record["observation", "image"][1] = record["observation", "image"][0]
        record["observation", "proprio"][1] = record["observation", "proprio"][0]
        record["task_id"][1] = record["task_id"][0]
        reward = make_reward(policy)
        latents = reward.imagine(record)
        torch.testing.assert_close(latents[0], latents[1], rtol=0, atol=1e-5)
        record["chunk_index"][1] += 1
        assert not torch.allclose(*reward.imagine(record), atol=1e-2)

    def test_frozen_and_live_imagination(self):
        policy = make_policy()
        add_video_lora(policy.model, VideoLoRA(rank=4))
        record = make_record(policy, 3)
        fresh = make_reward(policy).score(record)[0]
        with torch.no_grad():
            for parameter in video_parameters(policy.model):
                parameter.normal_(std=0.3)
        assert torch.equal(make_reward(policy).score(record)[0], fresh)
        assert not torch.equal(make_reward(policy, imagination="live").score(record)[0], fresh)

    def test_a_copy_of_the_picture_is_scored_on_the_frames_that_were_reached(self, policy):
        record = make_record(policy, 3)
        image = record["observation", "image"].fill_(0)
        record["next", schema.FUTURE_FRAMES] = torch.stack((image + 51, image + 102), 1)
        record["next", schema.FUTURE_MASK] = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
        copied = make_reward(policy).score(record).copied.squeeze(-1)
        torch.testing.assert_close(copied, -torch.tensor([(0.04 + 0.16) / 2, 0.04, 0.0]))

    def test_average_starts_at_the_adapters_and_follows_them(self):
        policy = make_policy()
        add_video_lora(policy.model, VideoLoRA(rank=4))
        record = make_record(policy, 3)
        live, average = (make_reward(policy, imagination=kind, ema_decay=0.5) for kind in ("live", "ema"))
        start = live.score(record).raw
        assert torch.equal(average.score(record).raw, start)
        parameters = video_parameters(policy.model)
        before = [parameter.detach().clone() for parameter in parameters]
        randomize_adapters(policy.model)
        moved = [parameter.detach().clone() for parameter in parameters]
        assert torch.equal(average.score(record).raw, start)
        average.follow()
        got = average.score(record).raw
        assert all(map(torch.equal, parameters, moved))  # scoring leaves the adapters as they are
        state = average.get_extra_state()
        with torch.no_grad():
            for parameter, old, new in zip(parameters, before, moved, strict=True):
                parameter.copy_(old.lerp(new, 0.5))
        torch.testing.assert_close(got, live.score(record).raw)
        restored, begun = (make_reward(policy, imagination="ema") for _ in range(2))
        restored.set_extra_state(state)
        randomize_adapters(policy.model, std=0.1)
        begun.set_extra_state({})  # of a run that had no average: it starts from the adapters as they are now
        assert torch.equal(begun.score(record).raw, live.score(record).raw)
        randomize_adapters(policy.model)
        assert torch.equal(restored.score(record).raw, got)

    def test_motion_weight_looks_where_something_moved(self, policy):
        record = make_record(policy, 2)
        image = record["observation", "image"]
        frames = image[:, None].expand(-1, 2, -1, -1, -1).clone()
        frames[..., 32:, :] = 255 - frames[..., 32:, :]  # the lower half changes
        record["next", schema.FUTURE_FRAMES] = frames
        record["next", schema.FUTURE_MASK] = torch.ones(2, 2, dtype=torch.bool)
        plain, moving = (make_reward(policy, motion_weight=weight) for weight in (0.0, 1.0))
        imagined = (policy.model.decode_frames(plain.imagine(record), (4, 8)).clamp(-1, 1) + 1) / 2
        real = frames.float() / 255
        motion = (real - image[:, None].float() / 255).abs().mean(2)
        expected = (imagined - real).square().mean(2) * motion / motion.mean((-2, -1), keepdim=True)
        assert float(motion[..., :32, :].max()) == 0
        torch.testing.assert_close(moving.score(record).raw, -expected.flatten(1).mean(-1, keepdim=True))
        half = make_reward(policy, motion_weight=0.5).score(record).raw
        torch.testing.assert_close(half, (plain.score(record).raw + moving.score(record).raw) / 2)

    def test_motion_weight_of_a_still_scene_is_finite(self, policy):
        record = make_record(policy, 2)
        record["next", schema.FUTURE_FRAMES] = record["observation", "image"][:, None].expand(-1, 2, -1, -1, -1)
        score = make_reward(policy, motion_weight=1.0).score(record)
        assert score.raw.tolist() == score.copied.tolist() == [[0.0], [0.0]]

    def test_latents_are_those_of_single_pictures(self, policy):
        record = make_record(policy, 2)
        record["next", schema.FUTURE_MASK] = torch.ones(2, 2, dtype=torch.bool)
        reward, codec = make_reward(policy, space="latents"), policy.model.codec
        imagined = policy.model.decode_frames(reward.imagine(record), (4, 8)).clamp(-1, 1)
        errors = [
            (codec.encode(imagined[:, i, :, None]) - codec.encode(record["next", schema.FUTURE_FRAMES][:, i, :, None]))
            .square()
            .flatten(1)
            .mean(-1)
            for i in range(2)
        ]
        torch.testing.assert_close(reward.score(record).raw.squeeze(-1), -(errors[0] + errors[1]) / 2)

    def test_needs_the_environments_offsets(self, policy):
        with pytest.raises(ValueError, match="frame_offsets"):
            make_reward(policy, frame_offsets=(4, 8, 12)).score(make_record(policy, 2))

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"imagination": "dreamt"}, "'dreamt'"),
            ({"space": "sounds"}, "'sounds'"),
            ({"batch_size": 0}, "batch_size"),
            ({"ema_decay": 1.5}, "ema_decay"),
            ({"motion_weight": -0.1}, "motion_weight"),
            ({"motion_weight": 0.5, "space": "latents"}, "weights pixels"),
        ],
    )
    def test_bad_options(self, policy, options, name):
        with pytest.raises(ValueError, match=name):
            make_reward(policy, **options)


class TestNormaliser:
    def test_matches_the_moments_of_all_rewards(self, policy):
        reward = make_reward(policy)
        values = [reward.inv(make_record(policy, 6, seed))["next", "reward_rec_raw"] for seed in range(3)]
        masks = [make_record(policy, 6, seed)["next", schema.FUTURE_MASK].any(-1) for seed in range(3)]
        everything = torch.cat([v.squeeze(-1)[m] for v, m in zip(values, masks, strict=True)]).double()
        assert int(reward.count) == len(everything)
        torch.testing.assert_close(reward.mean, everything.mean())
        assert reward.std == pytest.approx(float(everything.std()), rel=1e-6)

    def test_statistics_are_frozen_while_a_batch_is_scored(self, policy):
        reward = make_reward(policy)
        reward.inv(make_record(policy, 6, 0))
        mean, std = float(reward.mean), reward.std
        out = reward.inv(make_record(policy, 6, 1))
        mask = out[schema.REWARD_REC_MASK]
        expected = ((out["next", "reward_rec_raw"] - mean) / (std + 1e-6)).clamp(-5, 5)
        torch.testing.assert_close(out[schema.REWARD_REC][mask], expected[mask])
        assert (out[schema.REWARD_REC][~mask] == 0).all()

    def test_state_dict_round_trip(self, policy):
        first, second = make_reward(policy), make_reward(policy)
        first.inv(make_record(policy, 6, 0))
        assert set(first.state_dict()) == {"count", "mean", "square_sum", "_extra_state"}  # and no model
        second.load_state_dict(first.state_dict())
        record = make_record(policy, 6, 1)
        key = schema.REWARD_REC
        assert torch.equal(first.inv(record.clone())[key], second.inv(record.clone())[key])

    def test_sampling_from_a_buffer_leaves_the_reward_alone(self, policy):
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        reward = make_reward(policy)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=reward, batch_size=10)
        buffer.extend(make_record(policy, 6))
        count = int(reward.count)
        sample = buffer.sample()
        assert schema.REWARD_REC in sample.keys(True)
        assert int(reward.count) == count
