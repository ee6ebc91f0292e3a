"""The Wan2.2 VAE from files: the names of the original one, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.modules._wan import make_vae, make_wan
from tests.modules.codec_contract import noise
from wamrl_torchrl.modules.fastwam import wan_codec
from wamrl_torchrl.modules.fastwam.codec import make_codec
from wamrl_torchrl.modules.fastwam.wan_codec import WanCodec


@pytest.fixture(scope="module")
def codec() -> WanCodec:
    return make_wan()


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
        codec = WanCodec(wan_codec._build(wan_codec.WAN22_VAE))
        assert sum(weight.numel() for weight in codec.vae.parameters()) == 704_688_668
        latents = codec.encode(torch.empty(2, 3, 9, 224, 448, dtype=torch.uint8, device="meta"))
        assert latents.shape == (2, 48, 3, 14, 28)
        assert codec.decode(latents).shape == (2, 3, 9, 224, 448)

    def test_original_names_are_a_renaming_of_the_modules(self):
        """Every parameter of diffusers' module is one of the original file, of the same shape, and the other way."""
        state = wan_codec._build(wan_codec.WAN22_VAE).state_dict()
        found = {(wan_codec.original_name(name), name, tuple(value.shape)) for name, value in state.items()}
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
