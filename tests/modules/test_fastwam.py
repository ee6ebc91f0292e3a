from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.conftest import make_model, make_states
from wamrl_torchrl.modules.fastwam.config import PRESETS, ExpertConfig, FastWAMConfig, preset
from wamrl_torchrl.modules.fastwam.mot import MixtureOfTransformers


class TestConfig:
    def test_unknown_preset_lists_known_ones(self):
        with pytest.raises(ValueError, match=r"'huge'.*libero.*tiny"):
            preset("huge")

    def test_image_size(self):
        assert preset("tiny", image_size=(64, 128)).tokens_per_frame == 8
        assert PRESETS["tiny"].tokens_per_frame == 98
        with pytest.raises(ValueError, match=r"image_size.*\(60, 128\)"):
            preset("tiny", image_size=(60, 128))

    def test_head_dim_must_fit_rope(self):
        with pytest.raises(ValueError, match="head_dim"):
            ExpertConfig(hidden_dim=8, ffn_dim=8, num_layers=1, num_heads=1, head_dim=16, text_dim=8)

    def test_experts_must_agree(self):
        video = ExpertConfig(hidden_dim=8, ffn_dim=8, num_layers=1, num_heads=1, head_dim=12, text_dim=8)
        action = ExpertConfig(hidden_dim=8, ffn_dim=8, num_layers=2, num_heads=1, head_dim=12, text_dim=8)
        with pytest.raises(ValueError, match="num_layers"):
            FastWAMConfig(video=video, action=action)

    def test_small_preset(self):
        with torch.device("meta"):
            mot = MixtureOfTransformers(PRESETS["small"])
        count = {name: sum(p.numel() for p in expert.parameters()) for name, expert in mot.mixtures.items()}
        assert count == {"video": 15_668_544, "action": 24_191_559 - 15_668_544}

    def test_libero_preset_has_the_released_size(self):
        with torch.device("meta"):
            mot = MixtureOfTransformers(PRESETS["libero"])
        count = {name: sum(p.numel() for p in expert.parameters()) for name, expert in mot.mixtures.items()}
        assert count == {"video": 4_999_787_712, "action": 1_020_886_023}
        assert len(mot.state_dict()) == 1649


class TestModel:
    def test_batch_rows_are_independent(self, model):
        states, noise = make_states(5), torch.randn(5, 32, 7)
        sigma = torch.linspace(0.1, 1, 5)
        batched = model.action_velocity(noise, sigma, model.condition(states))
        for row in range(5):
            part = slice(row, row + 1)
            single = model.action_velocity(noise[part], sigma[part], model.condition(states[part]))
            torch.testing.assert_close(batched[part], single, rtol=1e-4, atol=1e-5)

    def test_imagination_keeps_the_first_frame_and_depends_on_text(self, model):
        states, noise = make_states(3), torch.randn(3, 48, 2, 4, 8)
        latents = model.imagine(states, noise, num_steps=2)
        assert torch.equal(latents[:, :, :1], model.encode_image(states))
        other = states.clone()
        other["task_id"] = (states["task_id"] + 1) % 3
        assert not torch.allclose(latents[:, :, 1:], model.imagine(other, noise, num_steps=2)[:, :, 1:])

    def test_decode_frames_gives_the_frames_of_a_full_decode(self, model):
        latents = torch.randn(2, 48, 3, 4, 8)
        full = model.codec.decode(latents)
        assert torch.equal(model.decode_frames(latents, (4, 8)), full[:, :, [1, 2]].transpose(1, 2))
        assert torch.equal(model.decode_frames(latents, (32,)), full[:, :, [8]].transpose(1, 2))

    @pytest.mark.parametrize("step", [3, 36])
    def test_decode_frames_refuses_other_steps(self, model, step):
        with pytest.raises(ValueError, match=str(step)):
            model.decode_frames(torch.randn(1, 48, 3, 4, 8), (step,))

    def test_condition_trains_the_action_expert_only(self, model):
        states = make_states(2)
        model.action_velocity(torch.randn(2, 32, 7), torch.rand(2), model.condition(states)).square().sum().backward()
        touched = {name.split(".")[2] for name, p in model.named_parameters() if p.grad is not None}
        assert touched == {"action"}
        assert all(p.grad is not None for p in model.mot.action.parameters())

    def test_weights_in_bf16_keep_outputs_in_fp32(self):
        model, states = make_model(), make_states(2)
        noise, sigma = torch.randn(2, 32, 7), torch.rand(2)
        reference = model.action_velocity(noise, sigma, model.condition(states))
        model.bfloat16()
        velocity = model.action_velocity(noise, sigma, model.condition(states))
        assert velocity.dtype == torch.float32
        assert float(((velocity - reference).norm() / reference.norm()).detach()) < 0.05

    def test_unknown_task(self, model):
        state = TensorDict(make_states(1).to_dict(), batch_size=[1])
        state["task_id"] += 7
        with pytest.raises(KeyError, match="task_id"):
            model.condition(state)
