"""What every codec promises; a codec's own test module inherits it and provides the fixture ``codec``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wamrl_torchrl.modules.fastwam.codec import Codec


def noise(frames: int = 9, height: int = 16, width: int = 32, *, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, 3, frames, height, width), dtype=torch.uint8, generator=generator)


def close(actual: Tensor, expected: Tensor, *, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


class CodecContract:
    #: By how much the code of a part of a clip may differ from the part of the code of the clip.
    atol = 1e-5

    @pytest.mark.parametrize(("frames", "height", "width"), [(1, 16, 16), (5, 32, 64), (13, 16, 32)])
    def test_shapes_and_dtypes(self, codec: Codec, frames, height, width):
        latents = codec.encode(noise(frames, height, width))
        assert latents.dtype == torch.float32
        assert latents.shape == (2, 48, 1 + (frames - 1) // 4, height // 16, width // 16)
        decoded = codec.decode(latents)
        assert decoded.dtype == torch.float32
        assert decoded.shape == (2, 3, frames, height, width)

    def test_uint8_and_float_pixels_agree(self, codec: Codec):
        frames = noise()
        assert torch.equal(codec.encode(frames), codec.encode(frames.float() / 127.5 - 1))

    def test_pixels_are_clamped(self, codec: Codec):
        latents = 1000 * torch.randn(1, 48, 2, 2, 2, generator=torch.Generator().manual_seed(0))
        decoded = codec.decode(latents)
        assert (decoded.min(), decoded.max()) == (-1, 1)

    def test_first_latent_is_the_single_image_latent(self, codec: Codec):
        frames = noise()
        close(codec.encode(frames)[:, :, :1], codec.encode(frames[:, :, :1]), atol=self.atol)

    @pytest.mark.parametrize("changed", range(1, 9))
    def test_latents_are_causal(self, codec: Codec, changed):
        """Latent k depends on the frames up to 4k; the next group has to see the change, later ones may."""
        frames = noise(batch=1)
        other = frames.clone()
        other[:, :, changed] = 255 - other[:, :, changed]
        same = (codec.encode(frames) == codec.encode(other)).transpose(0, 2).flatten(1).all(1).tolist()
        group = (changed + 3) // 4
        assert all(same[:group])
        assert not same[group]

    @pytest.mark.parametrize("kept", [1, 2])
    def test_a_prefix_of_latents_decodes_to_the_prefix_of_frames(self, codec: Codec, kept):
        latents = codec.encode(noise())
        frames = codec.decode(latents)[:, :, : 1 + 4 * (kept - 1)]
        close(codec.decode(latents[:, :, :kept]), frames, atol=self.atol)

    def test_samples_of_a_batch_do_not_mix(self, codec: Codec):
        frames = noise(batch=3)
        latents = codec.encode(frames)
        close(latents, torch.cat([codec.encode(clip[None]) for clip in frames]))
        close(codec.decode(latents), torch.cat([codec.decode(clip[None]) for clip in latents]))

    def test_autocast_does_not_lower_the_precision(self, codec: Codec):
        frames = noise(5)
        latents = codec.encode(frames)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(codec.encode(frames), latents)
            decoded = codec.decode(latents)
        assert torch.equal(decoded, codec.decode(latents))

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            (torch.zeros(3, 5, 16, 16), r"\[B,3,T,H,W\]"),
            (torch.zeros(1, 4, 5, 16, 16), r"\[B,3,T,H,W\].*\(1, 4, 5"),
            (torch.zeros(1, 3, 4, 16, 16), "T=4"),
            (torch.zeros(1, 3, 0, 16, 16), "T=0"),
            (torch.zeros(1, 3, 5, 24, 16), "24x16"),
            (torch.zeros(1, 3, 5, 16, 17), "16x17"),
            (torch.zeros(1, 3, 5, 16, 16, dtype=torch.int64), "int64"),
            (torch.full((1, 3, 1, 16, 16), 255.0), r"\[255, 255\].*127.5"),
            (torch.full((1, 3, 1, 16, 16), torch.nan), "nan"),
        ],
    )
    def test_bad_frames_are_refused(self, codec: Codec, frames, message):
        with pytest.raises(ValueError, match=message):
            codec.encode(frames)

    @pytest.mark.parametrize(
        ("latents", "message"),
        [
            (torch.zeros(1, 16, 1, 2, 2), r"\[B,48,F,h,w\].*\(1, 16"),
            (torch.zeros(1, 48, 2, 2), r"\[B,48,F,h,w\]"),
            (torch.zeros(1, 48, 0, 2, 2), "F >= 1"),
            (torch.zeros(1, 48, 1, 2, 2, dtype=torch.int64), "int64"),
        ],
    )
    def test_bad_latents_are_refused(self, codec: Codec, latents, message):
        with pytest.raises(ValueError, match=message):
            codec.decode(latents)
