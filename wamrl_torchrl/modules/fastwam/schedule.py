"""The flow-matching schedule, built once and in fp32 for sampling, log-probs and training alike.

Convention: ``x_sigma = (1 - sigma) * data + sigma * noise``, the network predicts the velocity ``noise - data`` and is
told the time ``1000 * sigma``. ``sigma`` falls from 1 to 0 along the shifted grid ``s * u / (1 + (s - 1) * u)``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

TIME_SCALE = 1000.0


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """Map uniform ``u`` in [0, 1] to the shifted sigma, same shape and dtype."""
    return shift * u / (1 + (shift - 1) * u)


class Schedule(NamedTuple):
    """A sampling grid of K steps; all fp32."""

    sigmas: Tensor  # [K+1], from 1 down to 0

    @property
    def num_steps(self) -> int:
        """Steps K."""
        return len(self.sigmas) - 1

    @property
    def timesteps(self) -> Tensor:
        """Times [K] in (0, 1000] at which the network is evaluated."""
        return TIME_SCALE * self.sigmas[:-1]

    @property
    def deltas(self) -> Tensor:
        """Steps [K] in sigma, negative: ``x <- x + delta * velocity``."""
        return self.sigmas.diff()


def build_schedule(num_steps: int, shift: float, *, device: torch.device | str | None = None) -> Schedule:
    """Build the grid of ``num_steps`` steps with the given shift.

    Computed in float64 and rounded once, so that rollout and learner hold the same fp32 numbers whatever their devices.

    Raises:
        ValueError: ``num_steps`` below 1 or ``shift`` not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if not shift > 0:
        raise ValueError(f"shift must be positive, got {shift}")
    u = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return Schedule(shift_sigma(u, shift).float().to(device))


def _bell(sigma: Tensor) -> Tensor:
    return torch.exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)


@lru_cache(maxsize=16)
def _bell_mean(shift: float) -> float:
    u = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    return _bell(shift_sigma(u, shift)).mean().item()


def training_weight(sigma: Tensor, shift: float) -> Tensor:
    """Loss weight of FastWAM at ``sigma``, same shape: a bell that is 0 at both ends and has mean 1 over the grid."""
    return _bell(sigma) / _bell_mean(shift)
