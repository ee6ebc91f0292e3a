from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import IMAGE_SIZE, make_model, make_states
from tests.modules._wan import make_vae, make_wan
from tests.modules.codec_contract import CodecContract, close, noise
from wamrl_torchrl.modules.fastwam.wan_codec import LATENT_MEAN, LATENT_STD, WanCodec


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
