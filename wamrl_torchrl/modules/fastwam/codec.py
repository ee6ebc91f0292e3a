"""Video codecs: pixels to the latents that the video expert denoises, and back.

The contract is that of the Wan2.2 VAE which FastWAM was trained with: 48 channels, 16 x smaller in space and 4 x in
time, causal. The first frame is coded alone and every four frames after it together, so a clip has ``1 + 4n`` frames
and ``1 + n`` latents. :class:`TinyCodec` meets it with a fixed transform that needs no weights and runs anywhere.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wamrl_torchrl.precision import FixedBuffers


class Codec(nn.Module, abc.ABC):
    """Causal video codec; subclasses implement :meth:`_encode` and :meth:`_decode` on checked input.

    Three things hold for every codec and are relied on: the first latent of a clip is the latent of its first frame
    alone, latent ``k`` depends on frames up to ``4k`` only, and decoding the first latents gives the first frames.
    """

    latent_channels = 48
    spatial_stride = 16
    temporal_stride = 4

    @property
    @abc.abstractmethod
    def recipe(self) -> dict[str, Any]:
        """JSON-able description from which :func:`make_codec` builds an equal codec."""

    def encode(self, frames: Tensor) -> Tensor:
        """Encode clips.

        Args:
            frames: ``[B,3,T,H,W]`` with ``T = 1 + 4n``; uint8 in 0..255, or floating point in [-1, 1]. The range of
                floating-point frames is checked, which waits for the device; uint8 needs no such check.

        Returns:
            float32 ``[B,48,1+n,H/16,W/16]``, standardised over typical frames.

        Raises:
            ValueError: wrong number of dimensions, colours or frames, height or width not a multiple of 16, a dtype
                that is neither uint8 nor floating point, or floating-point values outside [-1, 1].
        """
        if frames.ndim != 5 or frames.shape[1] != 3:
            raise ValueError(f"frames must be [B,3,T,H,W], found shape {tuple(frames.shape)}")
        num_frames, height, width = frames.shape[2:]
        if num_frames % self.temporal_stride != 1:
            raise ValueError(f"frames must hold T = 1 + {self.temporal_stride}n frames, found T={num_frames}")
        if height % self.spatial_stride or width % self.spatial_stride:
            raise ValueError(
                f"frames must have a height and width that {self.spatial_stride} divides, found {height}x{width}"
            )
        if frames.dtype != torch.uint8:
            if not frames.is_floating_point():
                raise ValueError(f"frames must be uint8 or floating point, found {frames.dtype}")
            low, high = torch.aminmax(frames)
            if not bool((low >= -1 - 1e-5) & (high <= 1 + 1e-5)):
                raise ValueError(
                    f"floating-point frames must lie in [-1, 1], found [{float(low):.3g}, {float(high):.3g}]; "
                    "pass uint8, or pixels / 127.5 - 1"
                )
        return self._encode(frames)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents.

        Args:
            latents: floating point ``[B,48,F,h,w]``, ``F >= 1``.

        Returns:
            float32 ``[B,3,1+4(F-1),16h,16w]`` in [-1, 1].

        Raises:
            ValueError: wrong number of dimensions or channels, no latent frame, or not floating point.
        """
        if latents.ndim != 5 or latents.shape[1] != self.latent_channels or latents.shape[2] < 1:
            raise ValueError(
                f"latents must be [B,{self.latent_channels},F,h,w] with F >= 1, found shape {tuple(latents.shape)}"
            )
        if not latents.is_floating_point():
            raise ValueError(f"latents must be floating point, found {latents.dtype}")
        return self._decode(latents)

    @abc.abstractmethod
    def _encode(self, frames: Tensor) -> Tensor:
        """Encode checked frames."""

    @abc.abstractmethod
    def _decode(self, latents: Tensor) -> Tensor:
        """Decode checked latents."""


# Orthonormal opponent colours of (red, green, blue): luma, red against blue, green against both.
_PLANES = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 2.0, -1.0]], dtype=torch.float64)
_PLANES = _PLANES / _PLANES.norm(dim=-1, keepdim=True)

# Which DCT coefficients are kept, and their standard deviations: entry [v][u] belongs to vertical frequency v and
# horizontal frequency u of the 16 x 16 block. Measured on pixels in [-1, 1] of 144 frames (16 clips, 4 tasks from each
# of libero_spatial, _object, _goal and _10, random arm motion). The 48 coefficients of largest energy were taken, where
# the colour planes count four times (objects are told apart by colour) and share one choice.
_LUMA_FIRST = [
    [11.61, 2.33, 1.26, 0.80, 0.58, 0.43, 0.36, 0.27],
    [2.69, 1.17, 0.72, 0.52, 0.41, 0.32, 0.25],
    [1.61, 0.81, 0.55, 0.40, 0.31, 0.25],
    [0.97, 0.53, 0.40, 0.30],
    [0.65, 0.42, 0.31, 0.24],
    [0.51, 0.32, 0.24],
    [0.41, 0.25],
    [0.32],
    [0.25],
]
_COLOUR_FIRST = [[1.37, 0.31, 0.17], [0.35, 0.16], [0.21]]
# The same for the four temporal frequencies of a group of four frames.
_LUMA_GROUP = [
    [
        [21.83, 3.50, 1.89, 1.14, 0.87],
        [4.30, 1.64, 1.06, 0.78],
        [2.58, 1.17, 0.78],
        [1.55, 0.79],
        [1.08],
        [0.82],
        [0.66],
    ],
    [[5.54, 1.95, 0.97], [2.00, 0.95], [1.13, 0.69]],
    [[4.37, 1.81, 0.97], [1.99, 1.03], [1.21, 0.69], [0.66]],
    [[3.25, 1.65, 0.95], [1.56, 0.87], [0.96]],
]
_COLOUR_GROUP = [[[2.51, 0.46], [0.58]], [[0.70]], [[0.55]], []]
# The colour tables hold the red-blue plane; the green plane is five times weaker in LIBERO's brown and grey rooms.
# Bright objects on plain ground (the table top) are five to fifteen times stronger in both, so the scales lie between:
# colour latents have a standard deviation of 0.1 to 0.6 in LIBERO and 1 to 4 there; luma is near 1 in both.
_PLANE_SCALE = (1.0, 2.0, 1.0)
# Mean of the three planes in the same frames: the rooms are dark and warm.
_PLANE_MEAN = torch.tensor([-0.080, 0.107, 0.0], dtype=torch.float64)

_Tables = Sequence[Sequence[Sequence[float]]]  # [temporal frequency][v][u]


def _dct(size: int) -> Tensor:
    """Orthonormal DCT-II matrix, float64 ``[frequency, position]``."""
    frequency, position = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (position + 0.5) * frequency) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _full_precision(values: Tensor) -> torch.autocast:
    """Context without autocast for the device of ``values``."""
    return torch.autocast("cuda" if values.is_cuda else "cpu", enabled=False)


class _BlockTransform(FixedBuffers):
    """Orthonormal transform of ``frames x 16 x 16`` blocks to the standardised coefficients that the tables list."""

    atoms: Tensor
    offset: Tensor
    scale: Tensor

    def __init__(self, luma: _Tables, colour: _Tables) -> None:
        super().__init__()
        self.frames = len(luma)
        temporal, spatial = _dct(self.frames), _dct(Codec.spatial_stride)
        atoms, scale = [], []
        for plane, tables in enumerate((luma, colour, colour)):
            for t, table in enumerate(tables):
                for v, row in enumerate(table):
                    for u, std in enumerate(row):
                        atom = torch.einsum("c,t,y,x->ctyx", _PLANES[plane], temporal[t], spatial[v], spatial[u])
                        atoms.append(atom.flatten())
                        scale.append(std * _PLANE_SCALE[plane])
        basis = torch.stack(atoms)
        mean = (_PLANE_MEAN @ _PLANES)[:, None].expand(3, basis.shape[-1] // 3).flatten()
        for name, value in (("atoms", basis), ("offset", basis @ mean), ("scale", torch.tensor(scale))):
            self.register_buffer(name, value.float(), persistent=False)

    def analyse(self, frames: Tensor) -> Tensor:
        """[B,3,G*t,H,W] -> float32 [B,48,G,H/16,W/16]."""
        size = Codec.spatial_stride
        blocks = frames.unflatten(4, (-1, size)).unflatten(3, (-1, size)).unflatten(2, (-1, self.frames))
        blocks = blocks.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)  # rearranged while they are bytes
        blocks = blocks.float().div_(127.5).sub_(1) if frames.dtype == torch.uint8 else blocks.float()
        return F.linear(blocks, self.atoms / self.scale[:, None], -self.offset / self.scale).permute(0, 4, 1, 2, 3)

    def synthesise(self, latents: Tensor) -> Tensor:
        """[B,48,G,h,w] -> float32 [B,3,G*t,16h,16w]."""
        size = Codec.spatial_stride
        blocks = (latents.permute(0, 2, 3, 4, 1).float() * self.scale + self.offset) @ self.atoms
        blocks = blocks.unflatten(-1, (3, self.frames, size, size)).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return blocks.flatten(6).flatten(4, 5).flatten(2, 3)


class TinyCodec(Codec):
    """Fixed DCT codec with the contract of the Wan2.2 VAE; no weights, deterministic, linear up to the final clamp.

    A frame is cut into 16 x 16 blocks of three opponent colour planes; the first frame keeps 36 + 6 + 6 coefficients of
    each block, a group of four frames 38 + 5 + 5 of their temporal and spatial transform. On rendered LIBERO scenes at
    224 x 448 the first frame comes back at 30 to 33 dB and the groups, with a moving arm, at 25 to 28 dB.
    The transform runs in float32, also under autocast and in a model that was cast. It has no state to save.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = _BlockTransform([_LUMA_FIRST], [_COLOUR_FIRST])
        self.group = _BlockTransform(_LUMA_GROUP, _COLOUR_GROUP)

    @property
    def recipe(self) -> dict[str, Any]:
        """The codec has no options."""
        return {"kind": "tiny"}

    def _encode(self, frames: Tensor) -> Tensor:
        with _full_precision(frames):
            latents = [self.first.analyse(frames[:, :, :1])]
            if frames.shape[2] > 1:
                latents.append(self.group.analyse(frames[:, :, 1:]))
            return torch.cat(latents, 2)

    def _decode(self, latents: Tensor) -> Tensor:
        with _full_precision(latents):
            frames = [self.first.synthesise(latents[:, :, :1])]
            if latents.shape[2] > 1:
                frames.append(self.group.synthesise(latents[:, :, 1:]))
            return torch.cat(frames, 2).clamp_(-1, 1)


def make_codec(recipe: dict[str, Any], *, device: torch.device | str = "cpu") -> Codec:
    """Build a codec from its :attr:`Codec.recipe`.

    Raises:
        ValueError: unknown kind.
        FileNotFoundError: the weights of a Wan codec are no longer where the recipe says.
    """
    options = dict(recipe)
    kind = options.pop("kind", None)
    if kind == "tiny":
        return TinyCodec()
    if kind == "wan":
        from wamrl_torchrl.modules.fastwam.wan_codec import WanCodec  # needs the extra `wan`

        path, dtype = options.pop("path"), getattr(torch, options.pop("dtype"))
        return WanCodec.from_file(path, dtype=dtype, device=device, **options)
    raise ValueError(f"unknown codec kind {kind!r}; known are 'tiny' and 'wan'")
