from __future__ import annotations

import json
import weakref
from dataclasses import asdict

import pytest
import torch
from accelerate import init_empty_weights

from tests.conftest import make_model, make_policy, make_record, make_states, randomize_adapters
from wamrl_torchrl.modules.adapters import adapter_layers, adapters_disabled
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora, merged_state
from wamrl_torchrl.modules.trainable import ActorTraining, actor_parameters, set_actor_training, video_parameters

EVERYWHERE = VideoLoRA(rank=4, cross_attention=True, ffn=True)
ACTOR_LORA = ActorTraining(kind="lora", rank=3, alpha=6, projections=("q", "o"), ffn=True, blocks=(1, 3))


def adapted_layers(expert) -> set[str]:
    return {name.removesuffix(".lora_A") for name, _ in expert.named_modules() if name.endswith(".lora_A")}


def act(model, states):
    """Video and action velocities after a few steps, at fixed noise."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(len(states), 48, 2, 4, 8, generator=generator)
    actions = torch.randn(len(states), *model.chunk_shape, generator=generator)
    with torch.no_grad():
        action = model.action_velocity(actions, torch.full((len(states),), 0.5), model.condition(states))
    return model.imagine(states, noise, num_steps=2), action


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"rank": 0}, "rank"),
            ({"alpha": 0}, "alpha"),
            ({"projections": ("q", "x")}, "projections"),
            ({"projections": ()}, "projections"),
            ({"blocks": (2, 2)}, "blocks"),
            ({"blocks": (-1, 2)}, "blocks"),
            ({"blocks": (1,)}, "blocks"),
        ],
    )
    def test_bad_options(self, options, name):
        with pytest.raises(ValueError, match=name):
            VideoLoRA(**options)

    @pytest.mark.parametrize(
        "lora", [VideoLoRA(), VideoLoRA(rank=2, alpha=5, projections=("v", "q"), ffn=True, blocks=(1, 3))]
    )
    def test_round_trip_through_json(self, lora):
        again = VideoLoRA(**json.loads(json.dumps(asdict(lora))))
        assert again == lora

    def test_order_of_projections_does_not_matter(self):
        assert VideoLoRA(projections=("o", "q")) == VideoLoRA(projections=("q", "o"))


class TestPlacement:
    @pytest.mark.parametrize(
        ("options", "blocks", "parts"),
        [
            ({}, range(4), ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"]),
            ({"projections": ("q", "v")}, range(4), ["self_attn.q", "self_attn.v"]),
            (
                {"projections": ("k",), "cross_attention": True, "blocks": (1, 3)},
                (1, 2),
                ["self_attn.k", "cross_attn.k"],
            ),
            ({"projections": ("o",), "ffn": True, "blocks": [3, 4]}, (3,), ["self_attn.o", "ffn.0", "ffn.2"]),
        ],
    )
    def test_adapters_are_where_the_options_say(self, options, blocks, parts):
        model = add_video_lora(make_model(), VideoLoRA(rank=2, **options))
        assert adapted_layers(model.mot.video) == {f"blocks.{block}.{part}" for block in blocks for part in parts}
        assert not adapter_layers(model.mot.action)

    def test_range_beyond_the_last_block(self):
        model = make_model()
        before = list(model.state_dict())
        with pytest.raises(ValueError, match=r"\(2, 5\) ends beyond the 4 blocks"):
            add_video_lora(model, VideoLoRA(blocks=(2, 5)))
        assert model.lora is None
        assert list(model.state_dict()) == before

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            # Per block 4 projections of 3072 to 3072, and 3072 to 14336 and back; 30 blocks.
            ({}, 23_592_960),
            ({"cross_attention": True}, 47_185_920),
            ({"cross_attention": True, "ffn": True}, 80_609_280),
        ],
    )
    def test_parameters_at_the_size_of_the_released_checkpoints(self, options, expected):
        contexts = ContextBank.hashed(["push the plate"], length=128, text_dim=4096)
        with init_empty_weights():
            model = FastWAM(preset("libero"), TinyCodec(), contexts)
            add_video_lora(model, VideoLoRA(rank=32, **options))
        assert sum(parameter.numel() for parameter in video_parameters(model)) == expected
        assert sum(parameter.numel() for parameter in actor_parameters(model)) == 1_020_886_023


class TestAdapters:
    def test_fresh_adapters_change_nothing(self):
        states = make_states(3)
        model = set_actor_training(add_video_lora(make_model(), EVERYWHERE), ACTOR_LORA)
        for before, after in zip(act(make_model(), states), act(model, states), strict=True):
            assert torch.equal(before, after)

    @pytest.mark.parametrize("lora", [VideoLoRA(rank=4), EVERYWHERE])
    def test_disabled_adapters_give_the_base_bit_for_bit(self, lora):
        states = make_states(3)
        base = act(make_model(), states)[0]
        model = add_video_lora(make_model(), lora)
        randomize_adapters(model)
        assert not torch.equal(act(model, states)[0], base)
        with adapters_disabled(model.mot.video):
            assert torch.equal(act(model, states)[0], base)
        assert all(p.requires_grad for p in video_parameters(model))
        assert len(video_parameters(model)) == 2 * len(adapted_layers(model.mot.video))  # two factors each

    def test_only_adapters_of_the_module_are_disabled(self):
        states = make_states(3)
        actor_alone = set_actor_training(make_model(), ACTOR_LORA)
        randomize_adapters(actor_alone)
        base_video, adapted_action = act(actor_alone, states)
        model = add_video_lora(set_actor_training(make_model(), ACTOR_LORA), EVERYWHERE)
        randomize_adapters(model)
        model.mot.action.load_state_dict(actor_alone.mot.action.state_dict())
        with adapters_disabled(model.mot.video):
            assert all(p.requires_grad for p in actor_parameters(model))
            video, action = act(model, states)
        assert torch.equal(video, base_video)
        assert torch.equal(action, adapted_action)
        with adapters_disabled(model.mot):
            assert torch.equal(act(model, states)[1], act(make_model(), states)[1])

    def test_adapters_come_back_after_an_error(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2))
        with pytest.raises(RuntimeError, match="inside"), adapters_disabled(model.mot.video):
            raise RuntimeError("inside")
        assert not any(layer.disable_adapters for layer in adapter_layers(model.mot.video))

    def test_what_was_off_or_frozen_stays_so(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2))
        model.requires_grad_(False)
        with adapters_disabled(model.mot.video):
            with adapters_disabled(model.mot.video):
                pass
            assert all(layer.disable_adapters for layer in adapter_layers(model.mot.video))
        assert not any(layer.disable_adapters for layer in adapter_layers(model.mot.video))
        assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_what_is_trainable(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2, projections=("q", "v")))
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        adapters = {name for name in trainable if "lora_" in name}
        assert all(".video." in name and (".q." in name or ".v." in name) for name in adapters)
        assert trainable - adapters == {f"mot.mixtures.action.{n}" for n, _ in model.mot.action.named_parameters()}
        assert not {id(p) for p in actor_parameters(model)} & {id(p) for p in video_parameters(model)}

    def test_equal_ones_are_kept_and_others_refused(self):
        model = add_video_lora(make_model(), VideoLoRA(rank=2))
        randomize_adapters(model)
        before = [parameter.clone() for parameter in video_parameters(model)]
        for same in (VideoLoRA(rank=2), VideoLoRA(rank=2, alpha=2, blocks=(0, 4))):
            add_video_lora(model, same)
            assert all(torch.equal(a, b) for a, b in zip(before, video_parameters(model), strict=True))
        for other in (VideoLoRA(rank=3), VideoLoRA(rank=2, alpha=1), VideoLoRA(rank=2, ffn=True)):
            with pytest.raises(ValueError, match="already"):
                add_video_lora(model, other)

    def test_actor_loss_leaves_the_adapters_without_gradient(self):
        policy = make_policy()
        add_video_lora(policy.model, VideoLoRA(rank=2))
        record = make_record(policy, 3)
        policy.log_prob_rows(record).sum().backward()
        assert all(p.grad is None for p in video_parameters(policy.model))
        assert all(p.grad is not None for p in actor_parameters(policy.model))


def adapted_model(dtype: torch.dtype = torch.float32) -> FastWAM:
    lora = VideoLoRA(rank=4, alpha=6, cross_attention=True, ffn=True, blocks=(0, 3))
    model = set_actor_training(add_video_lora(make_model().to(dtype), lora), ACTOR_LORA)
    randomize_adapters(model, std=0.1)
    return model


class TestMergedState:
    def test_without_adapters_it_is_the_live_state(self):
        model = make_model()
        state, merged = model.mot.state_dict(), merged_state(model)
        assert list(merged) == list(state)
        assert len(merged) == len(state)
        assert all(merged[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items())

    def test_a_fresh_model_acts_as_the_adapted_one(self):
        states, model, fresh = make_states(3), adapted_model(), make_model(seed=5)
        base = act(make_model(), states)
        fresh.load_state_dict(model.state_dict(), strict=False)  # all but the mixture
        merged = merged_state(model)
        assert list(merged) == list(fresh.mot.state_dict())
        fresh.mot.load_state_dict(merged, strict=True)
        for expected, found, unadapted in zip(act(model, states), act(fresh, states), base, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            assert (found - unadapted).abs().max() > 1e-2

    def test_the_live_model_is_not_touched(self):
        model = adapted_model()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        flags = [parameter.requires_grad for parameter in model.parameters()]
        dict(merged_state(model))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert [parameter.requires_grad for parameter in model.parameters()] == flags

    def test_only_adapted_weights_are_new_and_one_lives_at_a_time(self):
        model = adapted_model()
        live = {tensor.data_ptr() for tensor in model.state_dict().values()}
        made: list[weakref.ref] = []
        names = set()
        for name, tensor in merged_state(model).items():
            if tensor.data_ptr() not in live:
                assert not any(reference() is not None for reference in made)
                made.append(weakref.ref(tensor))
                names.add(name)
            assert not tensor.requires_grad
        expected = {
            f"mixtures.{name}.{layer}.weight"
            for name, expert in model.mot.mixtures.items()
            for layer in adapted_layers(expert)
        }
        assert names == expected

    def test_asking_for_a_name_computes_nothing(self, monkeypatch):
        model = adapted_model()
        merged = merged_state(model)
        layer = model.mot.video.layers[0].self_attn.q
        monkeypatch.setattr(layer, "get_delta_weight", lambda adapter: pytest.fail("merged"))
        assert "mixtures.video.blocks.0.self_attn.q.weight" in merged
        assert "mixtures.video.blocks.0.self_attn.q.lora_A.default.weight" not in merged
        with pytest.raises(KeyError, match="surplus"):
            merged["surplus"]

    @pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
    def test_half_precision_is_rounded_after_the_sum(self, adapter_dtype):
        model = adapted_model(torch.bfloat16)
        layer = model.mot.video.layers[1].ffn[2]
        for factor in (layer.lora_A, layer.lora_B):
            factor.to(adapter_dtype)
        merged = merged_state(model)["mixtures.video.blocks.1.ffn.2.weight"]
        exact = layer.base_layer.weight.double() + layer.get_delta_weight("default").double()
        assert merged.dtype == torch.bfloat16
        assert torch.equal(merged, exact.float().bfloat16())
