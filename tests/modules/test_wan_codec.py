from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.conftest import IMAGE_SIZE, make_model, make_states
from tests.modules.codec_contract import CodecContract, close, noise
from wamrl_torchrl.modules.fastwam import wan_codec
from wamrl_torchrl.modules.fastwam.codec import make_codec
from wamrl_torchrl.modules.fastwam.wan_codec import LATENT_MEAN, LATENT_STD, WAN22_VAE, WanCodec


def make_vae(seed: int = 0, **options):
    """The Wan2.2 VAE 20 to 32 times narrower, with random weights (1.05 M parameters)."""
    torch.manual_seed(seed)
    return AutoencoderKLWan(**{**WAN22_VAE, "base_dim": 8, "decoder_base_dim": 8, **options})


def make_wan(**options) -> WanCodec:
    return WanCodec(make_vae(), **{"dtype": torch.float32, **options})


@pytest.fixture(scope="module")
def codec() -> WanCodec:
    return make_wan()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).square().mean().sqrt() / expected.std())


class Spy:
    """Calls a function and keeps its inputs."""

    def __init__(self, function) -> None:
        self.function = function
        self.inputs: list[Tensor] = []

    def __call__(self, values: Tensor):
        self.inputs.append(values)
        return self.function(values)


class TestContract(CodecContract):
    def test_an_empty_batch(self, codec):
        latents = codec.encode(noise(5, batch=0))
        assert latents.shape == (0, 48, 2, 1, 2)
        assert codec.decode(latents).shape == (0, 3, 5, 16, 32)

    def test_frames_before_colours_in_memory(self, codec):
        frames = noise()
        videos = frames.transpose(1, 2).contiguous()
        assert torch.equal(codec.encode(videos.transpose(1, 2)), codec.encode(frames))

    def test_calls_do_not_remember_each_other(self, codec):
        frames = noise(5)
        latents = codec.encode(frames)
        decoded = codec.decode(latents)
        codec.decode(codec.encode(noise(9, seed=1)))
        assert torch.equal(codec.encode(frames), latents)
        assert torch.equal(codec.decode(latents), decoded)


class TestLatents:
    def test_statistics_are_those_of_wan22(self):
        """Sums, plain and weighted by position, of the numbers in wan/modules/vae2_2.py."""
        place = torch.arange(1.0, 49.0, dtype=torch.float64)
        for values, total, weighted in ((LATENT_MEAN, -0.5589, -7.6248), (LATENT_STD, 32.5360, 790.8891)):
            column = torch.tensor(values, dtype=torch.float64)
            assert column.shape == (48,)
            assert float(column.sum()) == pytest.approx(total, abs=1e-9)
            assert float(column @ place) == pytest.approx(weighted, abs=1e-9)

    def test_encoding_is_the_standardised_posterior_mean(self, codec):
        frames = noise()
        posterior = codec.vae.encode(frames.float() / 127.5 - 1).latent_dist
        mean, std = (torch.tensor(values).view(1, 48, 1, 1, 1) for values in (LATENT_MEAN, LATENT_STD))
        close(codec.encode(frames), (posterior.mean - mean) / std)
        assert posterior.std.min() > 0.1, "a sample would differ"

    def test_decoding_undoes_the_standardisation(self):
        codec = make_wan()
        frames = noise(5)
        raw = codec.vae.encode(frames.float() / 127.5 - 1).latent_dist.mean
        codec.vae.decode = spy = Spy(codec.vae.decode)
        decoded = codec.decode(codec.encode(frames))
        close(spy.inputs[0], raw)
        close(decoded, spy.function(raw).sample)

    def test_bfloat16_is_close(self, codec):
        """Measured: 0.6 % of the standard deviation of the latents, 1.3 % of that of the pixels."""
        low = make_wan(dtype=torch.bfloat16)
        frames = noise(9, 32, 32)
        latents = codec.encode(frames)
        assert 0 < relative_error(low.encode(frames), latents) < 0.02
        assert 0 < relative_error(low.decode(latents), codec.decode(latents)) < 0.02

    def test_nothing_is_differentiated(self, codec):
        latents = codec.encode(noise(5)).requires_grad_()
        assert not codec.decode(latents).requires_grad
        assert not codec.encode(noise(1).float().div(255).requires_grad_()).requires_grad


class TestOptions:
    @pytest.mark.parametrize("batch_size", [1, 2, 8])
    def test_parts_give_the_whole(self, codec, batch_size):
        parts = make_wan(batch_size=batch_size)
        parts.vae.encode, parts.vae.decode = Spy(parts.vae.encode), Spy(parts.vae.decode)
        frames = noise(5, batch=5)
        latents = codec.encode(frames)
        close(parts.encode(frames), latents)
        close(parts.decode(latents), codec.decode(latents))
        sizes = {1: [1] * 5, 2: [2, 2, 1], 8: [5]}[batch_size]
        assert [len(values) for values in parts.vae.encode.inputs] == sizes
        assert [len(values) for values in parts.vae.decode.inputs] == sizes

    def test_channels_last_changes_the_layout_alone(self, codec):
        weights = [weight for weight in codec.vae.parameters() if weight.ndim == 5]
        assert weights
        assert all(weight.is_contiguous(memory_format=torch.channels_last_3d) for weight in weights)
        first = make_wan(channels_last=False)
        assert all(weight.is_contiguous() for weight in first.vae.parameters())
        frames = noise()
        latents = codec.encode(frames)
        close(first.encode(frames), latents)
        close(first.decode(latents), codec.decode(latents))

    def test_channels_last_lasts(self):
        last = copy.deepcopy(make_wan()).bfloat16().to("meta")
        weight = last.vae.decoder.conv_in.weight
        assert weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert not weight.is_contiguous()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": torch.int8}, "one of .* found torch.int8"),
            ({"batch_size": 0}, "batch_size must be at least 1"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            make_wan(**options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"z_dim": 16}, "16 latent channels and strides 16 in space and 4 in time"),
            ({"patch_size": None, "in_channels": 3, "out_channels": 3}, "48 latent channels and strides 8 in space"),
            ({"temperal_downsample": [True, True, True]}, "8 in time"),
        ],
    )
    def test_a_vae_of_other_strides_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            WanCodec(make_vae(**options))


class TestOwner:
    """The weights of the VAE belong to no model, but are where the model is."""

    def test_the_model_does_not_see_the_weights(self):
        model = make_model()
        without = set(model.state_dict()), [name for name, _ in model.named_parameters()]
        model.codec = make_wan()
        assert (set(model.state_dict()), [name for name, _ in model.named_parameters()]) == without
        assert not list(model.codec.parameters())
        assert not model.codec.state_dict()
        model.load_state_dict(make_model(1).state_dict(), strict=True)

    def test_the_model_imagines_through_it(self):
        model = make_model()
        model.codec = make_wan()
        shape = 2, 48, 2, IMAGE_SIZE[0] // 16, IMAGE_SIZE[1] // 16
        latents = model.imagine(make_states(2), torch.randn(shape), num_steps=2)
        torch.testing.assert_close(latents[:, :, :1], model.encode_image(make_states(2)))
        assert model.decode_frames(latents, (4, 8)).shape == (2, 2, 3, *IMAGE_SIZE)

    def test_training_the_owner_does_not_reach_the_weights(self):
        owner = nn.Sequential(make_wan()).train().requires_grad_(True)
        assert not owner[0].vae.training
        assert not any(weight.requires_grad for weight in owner[0].vae.parameters())

    @pytest.mark.parametrize(("own", "cast"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    def test_casting_the_owner_changes_nothing(self, own, cast):
        codec = make_wan(dtype=own)
        frames = noise(5)
        latents = codec.encode(frames)
        weights = [weight.data_ptr() for weight in codec.vae.parameters()]
        nn.Sequential(codec, nn.Linear(1, 1)).to(cast)
        assert [weight.data_ptr() for weight in codec.vae.parameters()] == weights
        assert {weight.dtype for weight in codec.vae.parameters()} == {own}
        assert torch.equal(codec.encode(frames), latents)

    def test_it_moves_with_its_owner(self):
        owner = nn.Sequential(make_wan(), nn.Linear(1, 1)).to("meta", torch.bfloat16)
        codec = owner[0]
        assert owner[1].weight.dtype == torch.bfloat16
        assert {(weight.device.type, weight.dtype) for weight in codec.vae.parameters()} == {("meta", torch.float32)}
        latents = codec.encode(noise().to("meta"))
        assert (latents.device.type, latents.shape) == ("meta", (2, 48, 3, 1, 2))

    def test_emptying_the_owner_keeps_the_weights(self):
        codec = make_wan()
        frames = noise(1)
        latents = codec.encode(frames)
        nn.Sequential(codec, nn.Linear(1, 1, device="meta")).to_empty(device="cpu")
        assert torch.equal(codec.encode(frames), latents)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda codec: pickle.loads(pickle.dumps(codec))])
    def test_a_copy_is_equal_and_independent(self, copied):
        codec = make_wan(batch_size=2, source="a.pth")
        frames = noise(5)
        latents = codec.encode(frames)
        other = copied(codec)
        assert torch.equal(other.encode(frames), latents)
        assert other.recipe == codec.recipe
        with torch.no_grad():
            other.vae.encoder.conv_in.weight.zero_()
        assert not torch.equal(other.encode(frames), latents)
        assert torch.equal(codec.encode(frames), latents)


def original_layout(base: int, decoder: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Names in ``Wan2.2_VAE.pth``, names in diffusers, and shapes, from wan/modules/vae2_2.py."""

    def conv(original, name, out, into, *kernel):
        yield f"{original}.weight", f"{name}.weight", (out, into, *kernel)
        yield f"{original}.bias", f"{name}.bias", (out,)

    def residual(original, name, into, out):
        yield f"{original}.residual.0.gamma", f"{name}.norm1.gamma", (into, 1, 1, 1)
        yield from conv(f"{original}.residual.2", f"{name}.conv1", out, into, 3, 3, 3)
        yield f"{original}.residual.3.gamma", f"{name}.norm2.gamma", (out, 1, 1, 1)
        yield from conv(f"{original}.residual.6", f"{name}.conv2", out, out, 3, 3, 3)
        if into != out:
            yield from conv(f"{original}.shortcut", f"{name}.conv_shortcut", out, into, 1, 1, 1)

    def middle(part, dim):
        yield from residual(f"{part}.middle.0", f"{part}.mid_block.resnets.0", dim, dim)
        attention, name = f"{part}.middle.1", f"{part}.mid_block.attentions.0"
        yield f"{attention}.norm.gamma", f"{name}.norm.gamma", (dim, 1, 1)
        yield from conv(f"{attention}.to_qkv", f"{name}.to_qkv", 3 * dim, dim, 1, 1)
        yield from conv(f"{attention}.proj", f"{name}.proj", dim, dim, 1, 1)
        yield from residual(f"{part}.middle.2", f"{part}.mid_block.resnets.1", dim, dim)

    def head(part, dim, out):
        yield f"{part}.head.0.gamma", f"{part}.norm_out.gamma", (dim, 1, 1, 1)
        yield from conv(f"{part}.head.2", f"{part}.conv_out", out, dim, 3, 3, 3)

    def stages(part, widths, blocks, temporal, stage, block, resampler):
        """``temporal``: channels that the temporal convolution of a stage gives per input channel; 0 without one."""
        for i, (into, out) in enumerate(itertools.pairwise(widths)):
            original, name = f"{part}.{stage}.{i}.{stage}", f"{part}.{block}.{i}"
            for j in range(blocks):
                yield from residual(f"{original}.{j}", f"{name}.resnets.{j}", out if j else into, out)
            if i < 3:
                yield from conv(f"{original}.{blocks}.resample.1", f"{name}.{resampler}.resample.1", out, out, 3, 3)
            if temporal[i]:
                outputs = temporal[i] * out
                yield from conv(
                    f"{original}.{blocks}.time_conv", f"{name}.{resampler}.time_conv", outputs, out, 3, 1, 1
                )

    yield from conv("encoder.conv1", "encoder.conv_in", base, 12, 3, 3, 3)
    down = [base, base, 2 * base, 4 * base, 4 * base]
    yield from stages("encoder", down, 2, (0, 1, 1, 0), "downsamples", "down_blocks", "downsampler")
    yield from middle("encoder", 4 * base)
    yield from head("encoder", 4 * base, 96)
    yield from conv("conv1", "quant_conv", 96, 96, 1, 1, 1)
    yield from conv("conv2", "post_quant_conv", 48, 48, 1, 1, 1)
    yield from conv("decoder.conv1", "decoder.conv_in", 4 * decoder, 48, 3, 3, 3)
    yield from middle("decoder", 4 * decoder)
    up = [4 * decoder, 4 * decoder, 4 * decoder, 2 * decoder, decoder]
    yield from stages("decoder", up, 3, (2, 2, 0, 0), "upsamples", "up_blocks", "upsampler")
    yield from head("decoder", decoder, 12)


class TestFullSize:
    def test_it_is_the_released_architecture(self):
        codec = WanCodec(wan_codec._build(WAN22_VAE))
        assert sum(weight.numel() for weight in codec.vae.parameters()) == 704_688_668
        latents = codec.encode(torch.empty(2, 3, 9, 224, 448, dtype=torch.uint8, device="meta"))
        assert latents.shape == (2, 48, 3, 14, 28)
        assert codec.decode(latents).shape == (2, 3, 9, 224, 448)

    def test_original_names_are_a_renaming_of_the_modules(self):
        """Every parameter of diffusers' module is one of the original file, of the same shape, and the other way."""
        state = wan_codec._build(WAN22_VAE).state_dict()
        found = {(wan_codec._original_name(name), name, tuple(value.shape)) for name, value in state.items()}
        expected = list(original_layout(160, 256))
        assert len(expected) == len(state) == 196
        assert len({original for original, _, _ in expected}) == 196
        assert found == set(expected)


def original_state(vae) -> dict[str, Tensor]:
    state = vae.state_dict()
    return {original: state[name] for original, name, _ in original_layout(8, 8)}


def write(state: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


class TestFromFile:
    @pytest.fixture(params=["original.pth", "diffusers.safetensors", "directory"])
    def path(self, request, tmp_path) -> Path:
        vae, path = make_vae(), tmp_path / request.param
        if request.param == "directory":
            vae.save_pretrained(path)
            return path
        return write(original_state(vae) if "original" in request.param else vae.state_dict(), path)

    def test_every_format_gives_the_same_weights(self, path, codec):
        loaded = WanCodec.from_file(path, dtype=torch.float32)
        expected = codec.vae.state_dict()
        found = loaded.vae.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(weight.requires_grad for weight in loaded.vae.parameters())
        assert not loaded.vae.training
        assert torch.equal(loaded.encode(noise(5)), codec.encode(noise(5)))

    def test_options_and_recipe(self, path):
        loaded = WanCodec.from_file(path, channels_last=False, batch_size=3)
        assert {weight.dtype for weight in loaded.vae.parameters()} == {torch.bfloat16}
        recipe = json.loads(json.dumps(loaded.recipe))
        assert recipe == {
            "kind": "wan",
            "path": str(path),
            "dtype": "bfloat16",
            "channels_last": False,
            "batch_size": 3,
        }
        again = make_codec(recipe)
        assert again.recipe == recipe
        assert torch.equal(again.encode(noise(5)), loaded.encode(noise(5)))

    def test_weights_do_not_stay_tied_to_the_file(self, tmp_path, codec):
        path = write(original_state(make_vae()), tmp_path / "vae.pth")
        loaded = WanCodec.from_file(path, dtype=torch.float32)
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        assert torch.equal(loaded.encode(noise(5)), codec.encode(noise(5)))

    def test_onto_a_device(self, tmp_path):
        path = write(original_state(make_vae()), tmp_path / "vae.pth")
        loaded = WanCodec.from_file(path, device="meta")
        assert {weight.device.type for weight in loaded.vae.parameters()} == {"meta"}
        assert loaded.latent_mean.device.type == "meta"

    def test_a_relative_path_is_found_from_elsewhere(self, tmp_path, monkeypatch):
        write(original_state(make_vae()), tmp_path / "vae.pth")
        monkeypatch.chdir(tmp_path)
        assert WanCodec.from_file("vae.pth").recipe["path"] == str(tmp_path / "vae.pth")

    def test_a_link_is_read_by_its_own_name(self, tmp_path):
        write(original_state(make_vae()), tmp_path / "vae.pth").rename(tmp_path / "0123abcd")
        (tmp_path / "vae.pth").symlink_to(tmp_path / "0123abcd")
        assert WanCodec.from_file(tmp_path / "vae.pth").recipe["path"] == str(tmp_path / "vae.pth")


class TestErrors:
    def test_without_a_source_there_is_no_recipe(self):
        with pytest.raises(ValueError, match="made from a VAE in memory"):
            _ = make_wan().recipe

    @pytest.mark.parametrize("name", ["vae.pth", "vae.safetensors", "vae"])
    def test_no_such_file(self, tmp_path, name):
        with pytest.raises(FileNotFoundError, match=rf"{name} does not exist"):
            WanCodec.from_file(tmp_path / name)

    @pytest.mark.parametrize(
        ("original", "message"),
        [
            (True, r"conv1.bias is missing; conv2.weight has shape \(47, 48, 1, 1, 1\), expected \(48, 48, 1, 1, 1\)"),
            (False, r"quant_conv.bias is missing; post_quant_conv.weight has shape \(47, 48, .*"),
        ],
    )
    def test_tensors_that_do_not_fit_are_named_as_in_the_file(self, tmp_path, original, message):
        state = original_state(make_vae()) if original else make_vae().state_dict()
        missing, cut = ("conv1.bias", "conv2.weight") if original else ("quant_conv.bias", "post_quant_conv.weight")
        del state[missing]
        state[cut] = state[cut][1:]
        path = write(state, tmp_path / "vae.safetensors")
        with pytest.raises(ValueError, match=f"{path} does not fit the Wan2.2 VAE: {message}$"):
            WanCodec.from_file(path)

    def test_the_vae_of_wan21(self, tmp_path):
        state = {"encoder.conv1.weight": torch.zeros(8, 3, 3, 3, 3)}
        state["encoder.downsamples.0.residual.0.gamma"] = torch.ones(8, 1, 1, 1)
        path = write(state, tmp_path / "Wan2.1_VAE.pth")
        with pytest.raises(ValueError, match=r"Wan2.1_VAE.pth does not fit the Wan2.2 VAE"):
            WanCodec.from_file(path)

    def test_a_damaged_file(self, tmp_path):
        (tmp_path / "vae.pth").write_bytes(b"<html>not found</html>")
        with pytest.raises(ValueError, match=rf"cannot read {tmp_path / 'vae.pth'}: it is damaged"):
            WanCodec.from_file(tmp_path / "vae.pth")

    @pytest.mark.parametrize("name", ["config.json", "diffusion_pytorch_model.safetensors"])
    def test_a_directory_without_one_of_its_files(self, tmp_path, name):
        make_vae().save_pretrained(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=rf"holds no {name}; .*often `vae`"):
            WanCodec.from_file(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"_class_name": "AutoencoderKL"}, "no AutoencoderKLWan, found 'AutoencoderKL'"),
            ({"latents_mean": [0.0] * 48}, "other latents_mean than the Wan2.2 VAE"),
            ({"latents_std": [1.0] * 48}, "other latents_std than the Wan2.2 VAE"),
            ({"base_dim": 16}, r"encoder.conv_in.weight has shape \(8, 12, 3, 3, 3\), expected \(16, "),
        ],
    )
    def test_a_directory_of_another_vae(self, tmp_path, change, message):
        make_vae().save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(ValueError, match=message):
            WanCodec.from_file(tmp_path)

    @pytest.mark.parametrize(("text", "message"), [("{", "cannot read .*config.json"), ("[]", r"found \[\]")])
    def test_a_damaged_configuration(self, tmp_path, text, message):
        make_vae().save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            WanCodec.from_file(tmp_path)

    def test_without_diffusers(self, tmp_path, monkeypatch):
        path = write(original_state(make_vae()), tmp_path / "vae.pth")
        monkeypatch.setitem(sys.modules, "diffusers", None)
        with pytest.raises(ImportError, match=r"pip install 'wamrl_torchrl\[wan\]'"):
            WanCodec.from_file(path)

    def test_the_module_imports_without_diffusers(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "diffusers", None)
        spec = importlib.util.spec_from_file_location("fresh_wan_codec", wan_codec.__file__)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
