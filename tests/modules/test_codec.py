from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.modules.codec_contract import CodecContract, noise
from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.modules.fastwam.codec import TinyCodec


@pytest.fixture(scope="module")
def codec() -> TinyCodec:
    return TinyCodec()


def scene(frames: int = 9, size: int = 64) -> Tensor:
    """A red and a green disc gliding over a shaded table, uint8 [1,3,T,size,size]."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    clip = (0.5 + 0.2 * x + 0.1 * y).expand(3, frames, size, size).clone()
    for t in range(frames):
        for colour, centre in (((0.8, 0.2, 0.2), -0.4 + 0.04 * t), ((0.2, 0.7, 0.3), 0.4 - 0.02 * t)):
            edge = torch.sigmoid(12 * (0.35 - ((x - centre) ** 2 + (y - centre / 2) ** 2).sqrt()))
            clip[:, t] = torch.lerp(clip[:, t], torch.tensor(colour)[:, None, None].expand(3, size, size), edge)
    return (clip * 255).round().byte()[None]


def psnr(decoded: Tensor, frames: Tensor) -> float:
    """Peak signal-to-noise ratio in dB; the peak of [-1, 1] is 2."""
    error = (decoded - (frames.float() / 127.5 - 1)).square().mean()
    return float(10 * torch.log10(4 / error))


class TestContract(CodecContract):
    atol = 0

    def test_strides_are_those_of_the_wan_vae(self, codec):
        assert (codec.latent_channels, codec.spatial_stride, codec.temporal_stride) == (48, 16, 4)

    @pytest.mark.parametrize("changed", range(1, 9))
    def test_groups_do_not_see_each_other(self, codec, changed):
        frames = noise()
        other = frames.clone()
        other[:, :, changed] = 255 - other[:, :, changed]
        same = (codec.encode(frames) == codec.encode(other)).flatten(3).all(-1).all(1).all(0)
        assert same.tolist() == [math.ceil(changed / 4) != k for k in range(3)]

    def test_nothing_to_train_or_save(self, codec):
        assert not list(codec.parameters())
        assert not codec.state_dict()

    def test_casting_its_owner_does_not_lower_the_precision(self, codec):
        frames = noise()
        owner = torch.nn.Sequential(TinyCodec()).bfloat16()
        assert torch.equal(owner[0].encode(frames), codec.encode(frames))
        assert owner.to("meta")[0].encode(frames.to("meta")).shape == codec.encode(frames).shape

    def test_bfloat16_latents_decode_in_float32(self, codec):
        latents = codec.encode(noise()).bfloat16()
        assert torch.equal(codec.decode(latents), codec.decode(latents.float()))


class TestTransform:
    @pytest.mark.parametrize("part", ["first", "group"])
    def test_atoms_are_orthonormal(self, codec, part):
        atoms = getattr(codec, part).atoms
        torch.testing.assert_close(atoms @ atoms.mT, torch.eye(48), atol=1e-5, rtol=0)

    def test_encoding_inverts_decoding(self, codec):
        """What is kept is kept: encode(decode(z)) = z wherever no pixel is clamped."""
        latents = 0.05 * torch.randn(2, 48, 3, 2, 4, generator=torch.Generator().manual_seed(0))
        decoded = codec.decode(latents)
        assert decoded.abs().max() < 1
        torch.testing.assert_close(codec.encode(decoded), latents, atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        "colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (90, 60, 30)]
    )
    def test_flat_colours_are_exact(self, codec, colour):
        frames = torch.tensor(colour, dtype=torch.uint8)[None, :, None, None, None].expand(1, 3, 5, 16, 32)
        torch.testing.assert_close(
            codec.decode(codec.encode(frames)), frames.float() / 127.5 - 1, atol=5e-5, rtol=0, check_stride=False
        )

    def test_grey_level_in_closed_form(self, codec):
        """A flat grey g has luma sqrt(3) g, so its only varying latents are (16 or 32) (sqrt(3) g + 0.080) / std."""
        level = 0.3
        latents = codec.encode(torch.full((1, 3, 5, 16, 16), level))[0, :, :, 0, 0]
        luma = math.sqrt(3) * level + 0.080
        torch.testing.assert_close(latents[0], torch.tensor([16 * luma / 11.61, 32 * luma / 21.83]))
        zero = latents.abs().amax(1) < 1e-5
        # Besides luma only the red-blue mean is off zero: grey is colder than the rooms.
        assert (~zero).sum() == 3
        assert (latents[36, 0], latents[38, 1]) == pytest.approx((-8 * 0.107 / 1.37, -16 * 0.107 / 2.51), abs=1e-4)

    def test_a_moving_scene_comes_back(self, codec):
        frames = scene()
        decoded = codec.decode(codec.encode(frames))
        assert psnr(decoded[:, :, :1], frames[:, :, :1]) > 33
        assert psnr(decoded[:, :, 1:], frames[:, :, 1:]) > 30

    def test_a_still_scene_is_as_sharp_later_as_a_luma_cut_allows(self, codec):
        frames = scene(1).expand(-1, -1, 5, -1, -1)
        latents = codec.encode(frames)
        # 17 luma and 3 + 3 colour channels describe the mean of the group, the other 25 its change: none here.
        change = torch.cat([latents[:, 17:38, 1], latents[:, 41:43, 1], latents[:, 46:, 1]], 1)
        assert change.abs().max() < 1e-4


@pytest.mark.libero
@pytest.mark.slow
class TestLibero:
    """Quality on rendered scenes: 9 frames at every fourth step of a moving arm, both cameras side by side."""

    @staticmethod
    def render(suite: str) -> Tensor:
        env = LiberoEnv(suite, 1, task_ids=[1], replan_steps=32, frame_offsets=range(4, 33, 4), settle_steps=0)
        try:
            observation = env.reset()
            first = observation[schema.IMAGE]
            observation["action"] = torch.tensor([0.6, 0.4, -0.3, 0.1, 0.1, 0.2, -1.0]).expand(1, schema.CHUNK, 7)
            later = env.step(observation)["next", schema.FUTURE_FRAMES]
        finally:
            env.close()
        return torch.cat([first[:, None], later], 1).transpose(1, 2)

    @pytest.mark.parametrize("suite", ["libero_object", "libero_10"])
    def test_quality_and_scale(self, codec, suite):
        frames = self.render(suite)
        latents = codec.encode(frames)
        decoded = codec.decode(latents)
        first, groups = psnr(decoded[:, :, :1], frames[:, :, :1]), psnr(decoded[:, :, 1:], frames[:, :, 1:])
        assert first >= 28.5, f"first frame {first:.1f} dB"
        assert groups >= 24, f"groups {groups:.1f} dB"
        assert 0.6 < latents[:, :, 0].std() < 1.6
        assert 0.5 < latents[:, :, 1:].std() < 1.6
