"""The model core against reference tensors made with an independent implementation (fp32, CPU)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tensordict import TensorDict
from torch import Tensor

from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import ExpertConfig, FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import Condition, FastWAM, FlowNoise, force_future
from wamrl_torchrl.modules.fastwam.schedule import TIME_SCALE, build_schedule, training_weight
from wamrl_torchrl.modules.flow_sde import ChainNoise, sample_chain

GOLDEN = Path(__file__).parents[1] / "data" / "fastwam_tiny.safetensors"


def assert_close(found: Tensor, expected: Tensor) -> None:
    error = float(((found - expected).norm() / expected.norm()).detach())
    assert error <= 1e-5, f"relative error {error:.2e}"


def expert(text: str) -> ExpertConfig:
    fields = json.loads(text)
    fields["head_dim"] = fields.pop("attn_head_dim")
    fields.pop("action_dim", None)
    return ExpertConfig(**fields)


class Golden:
    """Reference inputs and outputs, and our model with the reference weights."""

    def __init__(self) -> None:
        with safe_open(GOLDEN, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            metadata = file.metadata()
        self.inputs = {key[3:]: value for key, value in tensors.items() if key.startswith("in.")}
        self.outputs = {key[4:]: value for key, value in tensors.items() if key.startswith("out.")}
        self.weights = {key[8:]: value for key, value in tensors.items() if key.startswith("weights.")}
        config = FastWAMConfig(
            video=expert(metadata["video"]),
            action=expert(metadata["action"]),
            image_size=(64, 128),
            context_length=6,
            action_shift=float(metadata["action_shift"]),
            video_shift=float(metadata["video_shift"]),
        )
        self.model = FastWAM(config, TinyCodec(), ContextBank.hashed(["task"], length=6, text_dim=32))
        for name in ("mot", "proprio_encoder"):
            part = {key[len(name) + 1 :]: value for key, value in self.weights.items() if key.startswith(f"{name}.")}
            getattr(self.model, name).load_state_dict(part, strict=True)
        self.context = self.model.append_proprio(self.inputs["context"], self.inputs["proprio"])
        self.first = self.inputs["latents"][:, :, :1]
        self.future = self.inputs["latents"][:, :, 1:]

    def caches(self):
        text = self.model.mot.video.text_cache(self.context)
        return text, self.model.mot.first_frame_cache(self.first, text)

    def velocity(self, cache) -> Tensor:
        condition = Condition(cache, self.model.mot.action.text_cache(self.context))
        return self.model.action_velocity(self.inputs["action_noisy"], self.inputs["t_action"] / TIME_SCALE, condition)


@pytest.fixture
def golden() -> Golden:
    return Golden()


class TestForward:
    def test_all_released_names_are_used(self, golden):
        names = {f"mot.{name}" for name in golden.model.mot.state_dict()}
        names |= {f"proprio_encoder.{name}" for name in golden.model.proprio_encoder.state_dict()}
        assert names == set(golden.weights)

    def test_context_with_proprio(self, golden):
        assert_close(golden.context, golden.outputs["context_with_proprio"])

    def test_first_frame_cache(self, golden):
        _, cache = golden.caches()
        for layer, (key, value) in enumerate(cache):
            assert_close(key, golden.outputs[f"first_frame.kv.{layer}.k"])
            assert_close(value, golden.outputs[f"first_frame.kv.{layer}.v"])

    def test_action_velocity_on_the_first_frame(self, golden):
        velocity = golden.velocity(golden.caches()[1])
        assert_close(velocity, golden.outputs["first_frame.action_velocity"])
        assert_close(velocity, golden.outputs["joint_action_velocity"])

    def test_action_velocity_on_the_whole_video(self, golden):
        text, first = golden.caches()
        cache = golden.model.mot.full_video_cache(golden.future, text, first)
        assert_close(golden.velocity(cache), golden.outputs["idm.action_velocity"])

    def test_video_velocity(self, golden):
        text, first = golden.caches()
        velocity = golden.model.mot.video_velocity(golden.future, golden.inputs["t_video"], text, first)
        assert_close(velocity, golden.outputs["video_velocity"][:, :, 1:])

    def test_imagined_latents(self, golden, monkeypatch):
        monkeypatch.setattr(FastWAM, "encode_image", lambda self, state: golden.first)
        monkeypatch.setattr(FastWAM, "context", lambda self, state: golden.context)
        noise = golden.inputs["video_noise"][:, :, 1:]
        latents = golden.model.imagine(TensorDict(batch_size=[3]), noise, num_steps=10)
        assert_close(latents, golden.outputs["imagined_latents"])


class TestSchedule:
    @pytest.mark.parametrize("shift", [1, 5])
    def test_schedule(self, golden, shift):
        schedule = build_schedule(10, float(shift))
        assert_close(schedule.timesteps, golden.outputs[f"schedule.shift{shift}.timesteps"])
        assert_close(schedule.deltas, golden.outputs[f"schedule.shift{shift}.deltas"])

    @pytest.mark.parametrize("shift", [1.0, 5.0])
    def test_ode_chain_of_the_sampler(self, golden, shift, monkeypatch):
        model = golden.model
        condition = Condition(golden.caches()[1], model.mot.action.text_cache(golden.context))
        monkeypatch.setattr(FastWAM, "condition", lambda self, state: condition)
        start = golden.inputs["action_noisy"]
        noise = ChainNoise(start, torch.zeros(3, 10, 32, 7), torch.full((3, 10), 0.5))
        state = TensorDict(batch_size=[3])
        chain = sample_chain(model, state, 10, 0.3, stochastic_steps="none", shift=shift, noise=noise).chain
        assert_close(chain, golden.outputs[f"ode_chain.shift{shift:.0f}"])

    @pytest.mark.parametrize(("shift", "norm", "middle"), [(1.0, 0.249094, 1.580), (5.0, 0.189496, 2.076)])
    def test_training_weight(self, shift, norm, middle):
        sigma = torch.tensor([0.0, 0.5, 1.0])
        weight = training_weight(sigma, shift)
        assert weight[0] == pytest.approx(0, abs=1e-6)
        assert weight[2] == pytest.approx(0, abs=1e-6)
        assert float(weight[1]) == pytest.approx(middle, abs=1e-3)
        assert float(weight[1]) == pytest.approx((1 - 0.606531) / norm, rel=1e-4)

    def test_bad_options(self):
        with pytest.raises(ValueError, match="num_steps"):
            build_schedule(0, 1.0)
        with pytest.raises(ValueError, match="shift"):
            build_schedule(4, 0.0)


class TestTraining:
    @pytest.mark.parametrize("mode", ["train", "train_idm"])
    def test_losses(self, golden, mode):
        forced = force_future(torch.arange(3), golden.future, 5.0) if mode == "train_idm" else None
        loss, parts = training_loss(golden, forced=forced)
        assert_close(loss.detach(), golden.outputs[f"{mode}.loss"][0])
        for name, value in parts.items():
            assert_close(value.detach(), golden.outputs[f"{mode}.{name}"][0])

    def test_gradients(self, golden):
        training_loss(golden)[0].backward()
        parameters = dict(golden.model.mot.named_parameters())
        prefix = "train.grad."
        expected = {key[len(prefix) :]: value for key, value in golden.outputs.items() if key.startswith(prefix)}
        assert len(expected) == 4
        for name, gradient in expected.items():
            assert_close(parameters[name].grad, gradient)

    def test_split_losses_sum_to_the_joint_one(self, golden):
        """Pre-training computes the two losses on batches of their own; on one batch they are the joint loss."""
        loss, _ = training_loss(golden)
        inputs, model = golden.inputs, golden.model
        video = model.video_loss(
            inputs["latents"], golden.context, video_flow(golden), image_is_pad=inputs["train.image_is_pad"]
        )
        action = model.action_loss(
            golden.first,
            golden.context,
            inputs["train.action"],
            action_flow(golden),
            action_is_pad=inputs["train.action_is_pad"],
        )
        assert_close((video.mean() + action.mean()).detach(), loss.detach())

    def test_padding_does_not_leak(self, golden):
        """Noise of padded actions must not change the loss of the others beyond attention: their targets do not."""
        pad = torch.zeros(3, 32, dtype=torch.bool)
        pad[:, 20:] = True
        inputs, model = golden.inputs, golden.model
        losses = []
        for change in (0.0, 5.0):
            actions = inputs["train.action"].clone()
            flow = action_flow(golden)
            # The noisy input stays the same, only the target of padded rows moves.
            noise = flow.noise.clone()
            sigma = flow.sigma[:, None, None]
            actions[:, 20:] += change
            noise[:, 20:] -= (change * (1 - sigma) / sigma).expand(-1, 12, 7)
            flow = FlowNoise(flow.sigma, noise)
            losses.append(model.action_loss(golden.first, golden.context, actions, flow, action_is_pad=pad))
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


def video_flow(golden: Golden) -> FlowNoise:
    return FlowNoise(golden.inputs["t_video"] / TIME_SCALE, golden.inputs["train.video_noise"])


def action_flow(golden: Golden) -> FlowNoise:
    return FlowNoise(golden.inputs["t_action"] / TIME_SCALE, golden.inputs["train.action_noise"])


def training_loss(golden: Golden, **options):
    inputs = golden.inputs
    return golden.model.training_loss(
        inputs["latents"],
        golden.context,
        inputs["train.action"],
        video_flow=video_flow(golden),
        action_flow=action_flow(golden),
        image_is_pad=inputs["train.image_is_pad"],
        action_is_pad=inputs["train.action_is_pad"],
        **options,
    )
