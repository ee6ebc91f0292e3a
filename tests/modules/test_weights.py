from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import IMAGE_SIZE, make_model, make_states
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import ExpertConfig, preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.weights import build_empty, fill, materialize


def empty(name: str = "tiny", **options):
    config = preset(name, **options)
    contexts = ContextBank.hashed(["plate"], length=config.context_length, text_dim=config.video.text_dim)
    return build_empty(config, TinyCodec(), contexts)


def attention_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in "qkv":
        shapes |= {f"{prefix}.{name}.weight": (inner, hidden), f"{prefix}.{name}.bias": (inner,)}
    shapes |= {f"{prefix}.o.weight": (hidden, inner), f"{prefix}.o.bias": (hidden,)}
    return shapes | {f"{prefix}.norm_q.weight": (inner,), f"{prefix}.norm_k.weight": (inner,)}


def linear_shapes(name: str, out: int, inp: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, inp), f"{name}.bias": (out,)}


def released_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released checkpoints, written out from their documented layout."""
    shapes: dict[str, tuple[int, ...]] = {}
    for expert, hidden, ffn in (("video", 3072, 14336), ("action", 1024, 4096)):
        own: dict[str, tuple[int, ...]] = {}
        for i in range(30):
            block = f"blocks.{i}"
            own[f"{block}.modulation"] = (1, 6, hidden)
            own |= attention_shapes(f"{block}.self_attn", hidden, 3072)
            own |= attention_shapes(f"{block}.cross_attn", hidden, 3072)
            own |= {f"{block}.norm3.weight": (hidden,), f"{block}.norm3.bias": (hidden,)}
            own |= linear_shapes(f"{block}.ffn.0", ffn, hidden) | linear_shapes(f"{block}.ffn.2", hidden, ffn)
        own |= linear_shapes("text_embedding.0", hidden, 4096) | linear_shapes("text_embedding.2", hidden, hidden)
        own |= linear_shapes("time_embedding.0", hidden, 256) | linear_shapes("time_embedding.2", hidden, hidden)
        own |= linear_shapes("time_projection.1", 6 * hidden, hidden)
        if expert == "video":
            own |= {"patch_embedding.weight": (3072, 48, 1, 2, 2), "patch_embedding.bias": (3072,)}
            own |= linear_shapes("head.head", 192, 3072) | {"head.modulation": (1, 2, 3072)}
        else:
            own |= linear_shapes("action_encoder", 1024, 7) | linear_shapes("head", 7, 1024)
        shapes |= {f"mot.mixtures.{expert}.{name}": shape for name, shape in own.items()}
    return shapes | linear_shapes("proprio_encoder", 4096, 8)


class TestFullSize:
    def test_names_and_shapes_are_those_of_the_released_files(self):
        model = empty("libero")
        found = {name: tuple(value.shape) for name, value in model.named_parameters()}
        expected = released_shapes()
        assert found == expected
        mot = [name for name in expected if name.startswith("mot.")]
        assert len(mot) == 1649
        assert len(expected) == 1649 + 2
        assert sum("mixtures.video" in name for name in mot) == 825
        assert sum(p.numel() for p in model.mot.parameters()) == 6_020_673_735
        assert sum(p.numel() for p in model.mot.video.parameters()) == 4_999_787_712
        assert sum(p.numel() for p in model.mot.action.parameters()) == 1_020_886_023
        assert sum(p.numel() for p in model.proprio_encoder.parameters()) == 36_864
        # The tensors of a bf16 file, to the byte.
        assert 2 * sum(p.numel() for p in model.parameters()) == 12_041_421_198
        assert set(found) == set(model.state_dict()) - {"contexts.contexts"}

    def test_takes_no_memory(self):
        assert {p.device.type for p in empty("libero").parameters()} == {"meta"}


class TestMaterialize:
    def test_starts_like_a_model_built_as_usual(self):
        """Constants agree exactly, random weights in their spread."""
        model, usual = materialize(empty(image_size=IMAGE_SIZE), seed=1), make_model()
        for (name, fresh), reference in zip(model.named_parameters(), usual.parameters(), strict=True):
            assert fresh.shape == reference.shape
            if (reference.numel() > 1 and bool((reference == reference.flatten()[0]).all())) or "modulation" in name:
                assert torch.equal(fresh, reference), name
            elif reference.numel() > 500:
                assert fresh.detach().std().item() == pytest.approx(reference.detach().std().item(), rel=0.15), name
        modulation = model.mot.video.blocks[0].modulation
        assert modulation[0, :, 0].tolist() == [0, 0, 1, 0, 0, 1]

    def test_same_seed_same_weights(self):
        first, second, other = (materialize(empty(image_size=IMAGE_SIZE), seed=seed) for seed in (3, 3, 4))
        same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
        assert all(same)
        assert not torch.equal(first.proprio_encoder.weight, other.proprio_encoder.weight)

    def test_works_at_once_in_bfloat16(self):
        model = materialize(empty(image_size=IMAGE_SIZE), dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        states = make_states(2)
        states["task_id"].zero_()
        velocity = model.action_velocity(torch.randn(2, 32, 7), torch.rand(2), model.condition(states))
        assert velocity.dtype == torch.float32
        assert bool(torch.isfinite(velocity).all())


class TestFill:
    def test_what_is_trainable_stays_so(self):
        model = empty(image_size=IMAGE_SIZE)
        model.mot.video.requires_grad_(False)
        fill(model, materialize(empty(image_size=IMAGE_SIZE)).state_dict(), source="here")
        assert not any(p.requires_grad for p in model.mot.video.parameters())
        assert all(p.requires_grad for p in model.mot.action.parameters())

    def test_takes_copies(self):
        source, model = materialize(empty(image_size=IMAGE_SIZE)), empty(image_size=IMAGE_SIZE)
        fill(model, source.state_dict(), source="here")
        before = model.proprio_encoder.weight.clone()
        with torch.no_grad():
            source.proprio_encoder.weight.add_(1)
        assert torch.equal(model.proprio_encoder.weight, before)

    def test_a_misfit_changes_nothing(self):
        model = make_model(seed=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        tensors = make_model(seed=2).state_dict()
        del tensors["proprio_encoder.bias"]
        with pytest.raises(ValueError, match=r"here does not fit the model: proprio_encoder.bias is missing"):
            fill(model, tensors, source="here")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_names_of_the_file(self):
        model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
        tensors = {"w": torch.randn(2, 2), "0.bias": torch.zeros(2), "b": torch.ones(2)}
        names = {"0.weight": "w", "1.weight": "w", "1.bias": "b"}
        fill(model, tensors, source="here", names=names)
        assert torch.equal(model[0].weight, tensors["w"])
        assert model[1].weight.data_ptr() == model[0].weight.data_ptr() != tensors["w"].data_ptr()
        assert torch.equal(model[1].bias, tensors["b"])
        with pytest.raises(ValueError, match="here does not fit the pair: b is missing"):
            fill(model, {"w": tensors["w"], "0.bias": tensors["b"]}, source="here", what="the pair", names=names)

    def test_without_a_copy_what_fits_is_taken_over(self):
        tensors = {"weight": torch.randn(3, 2), "bias": torch.zeros(3).bfloat16()}
        model = nn.Linear(2, 3, device="meta")
        fill(model, tensors, source="here", dtype=torch.float32, copy=False)
        assert model.weight.data_ptr() == tensors["weight"].data_ptr()
        assert model.bias.dtype == torch.float32

    def test_only_parameters_are_cast(self):
        model = empty(image_size=IMAGE_SIZE)
        fill(model, materialize(empty(image_size=IMAGE_SIZE)).state_dict(), source="here", dtype=torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.contexts.contexts.dtype == torch.float32


def test_head_dims_that_rope_cannot_split_are_refused():
    with pytest.raises(ValueError, match="head_dim"):
        ExpertConfig(hidden_dim=64, ffn_dim=64, num_layers=1, num_heads=4, head_dim=16, text_dim=8)
