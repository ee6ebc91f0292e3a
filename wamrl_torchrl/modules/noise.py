"""Noise as a function of integer seeds, one row per seed.

A rollout must come out the same whatever the batch it was computed in, and a record must say where its noise came from.
A ``torch.Generator`` gives neither: its stream depends on the batch. Here every number is a hash of (seed, position),
so a row depends on its own seed alone, on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Constants of the SplitMix64 finaliser (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's ``>>`` on int64 copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def mix_seeds(*parts: Tensor | int) -> Tensor:
    """Hash integers into one int64 seed; tensors broadcast. The order of the parts matters."""
    seed = torch.zeros((), dtype=torch.int64)
    for part in parts:
        seed = _finalise((seed.to(part.device) if isinstance(part, Tensor) else seed) + _GAMMA + part)
    return seed


def seeded_uniform(seeds: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers strictly inside (0, 1): float64 [B,*shape] for int64 ``seeds`` [B]."""
    position = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device=seeds.device)
    bits = _finalise(_finalise(seeds)[:, None] + position * _GAMMA)
    return ((_shift_right(bits, 11).double() + 0.5) * 2.0**-53).view(len(seeds), *shape)


def seeded_normal(seeds: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers: float32 [B,*shape] for int64 ``seeds`` [B]."""
    return (math.sqrt(2) * torch.erfinv(2 * seeded_uniform(seeds, shape) - 1)).float()
