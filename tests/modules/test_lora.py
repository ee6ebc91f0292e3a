from __future__ import annotations

import pytest
import torch

from tests.conftest import make_model, make_policy, make_record, make_states
from wamrl_torchrl.modules.lora import (
    VideoLoRA,
    actor_parameters,
    adapter_layers,
    adapters_disabled,
    add_video_lora,
    video_parameters,
)


def randomize(model) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in video_parameters(model):
            parameter.normal_(std=0.2)


class TestAdapters:
    def test_fresh_adapters_change_nothing(self):
        states, noise = make_states(3), torch.randn(3, 48, 2, 4, 8)
        before = make_model().imagine(states, noise, num_steps=2)
        after = add_video_lora(make_model(), VideoLoRA(rank=4)).imagine(states, noise, num_steps=2)
        assert torch.equal(before, after)

    def test_disabled_adapters_give_the_base_bit_for_bit(self):
        states, noise = make_states(3), torch.randn(3, 48, 2, 4, 8)
        base = make_model().imagine(states, noise, num_steps=2)
        model = add_video_lora(make_model(), VideoLoRA(rank=4))
        randomize(model)
        assert not torch.equal(model.imagine(states, noise, num_steps=2), base)
        with adapters_disabled(model.mot.video):
            assert torch.equal(model.imagine(states, noise, num_steps=2), base)
        assert all(p.requires_grad for p in video_parameters(model))
        assert len(video_parameters(model)) == 2 * 4 * model.config.video.num_layers  # two factors of q, k, v, o

    def test_adapters_come_back_after_an_error(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2))
        with pytest.raises(RuntimeError, match="inside"), adapters_disabled(model.mot.video):
            raise RuntimeError("inside")
        assert not any(layer.disable_adapters for layer in adapter_layers(model.mot.video))

    def test_what_is_trainable(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2, projections=("q", "v")))
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        adapters = {name for name in trainable if "lora_" in name}
        assert all(".video." in name and (".q." in name or ".v." in name) for name in adapters)
        assert trainable - adapters == {f"mot.mixtures.action.{n}" for n, _ in model.mot.action.named_parameters()}
        assert not {id(p) for p in actor_parameters(model)} & {id(p) for p in video_parameters(model)}

    @pytest.mark.parametrize(
        ("options", "name"),
        [({"rank": 0}, "rank"), ({"projections": ("q", "x")}, "projections"), ({"projections": ()}, "projections")],
    )
    def test_bad_options(self, options, name):
        with pytest.raises(ValueError, match=name):
            VideoLoRA(**options)

    def test_equal_ones_are_kept_and_others_refused(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2))
        randomize(model)
        before = [parameter.clone() for parameter in video_parameters(model)]
        add_video_lora(model, VideoLoRA(rank=2))
        assert all(torch.equal(a, b) for a, b in zip(before, video_parameters(model), strict=True))
        with pytest.raises(ValueError, match="already"):
            add_video_lora(model, VideoLoRA(rank=3))

    def test_actor_loss_leaves_the_adapters_without_gradient(self):
        policy = make_policy()
        add_video_lora(policy.model, VideoLoRA(rank=2))
        record = make_record(policy, 3)
        policy.log_prob_rows(record).sum().backward()
        assert all(p.grad is None for p in video_parameters(policy.model))
        assert all(p.grad is not None for p in actor_parameters(policy.model))
