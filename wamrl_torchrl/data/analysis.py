"""Statistics of results."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch


class Rate(NamedTuple):
    """``k`` successes in ``n`` trials."""

    k: int
    n: int

    @property
    def value(self) -> float:
        """Share of successes, NaN without trials."""
        return self.k / self.n if self.n else math.nan

    def interval(self, z: float = 1.959964) -> tuple[float, float]:
        """Wilson score interval (95 % by default); (0, 1) without trials."""
        if not self.n:
            return 0.0, 1.0
        p, n = self.value, self.n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.k}/{self.n} = {self.value:.3f} [{low:.2f}, {high:.2f}]"


class PairedGain(NamedTuple):
    """How much more often something succeeds than before, over units that were tried both times."""

    gain: float  # mean difference
    low: float  # 95 % interval of it, by resampling the units
    high: float
    p_value: float  # two-sided: how often differences of random signs have a mean as far from 0
    units: int


def paired_gain(
    before: Mapping[Hashable, float], after: Mapping[Hashable, float], *, draws: int = 20_000
) -> PairedGain:
    """Compare success by unit, such as an initial state; trials that share a unit are not independent, so average them.

    Args:
        before: success 0..1 of every unit.
        after: the same of the same units.

    Keyword Args:
        draws: random signs and resamplings, always the same ones.

    Raises:
        ValueError: no units, or not the same ones.
    """
    if not before or before.keys() != after.keys():
        raise ValueError(f"the {len(before)} units before and the {len(after)} after must be the same, at least one")
    difference = torch.tensor([after[unit] - before[unit] for unit in before], dtype=torch.float64)
    generator, shape = torch.Generator().manual_seed(0), (draws, len(difference))
    signs = 2.0 * torch.randint(2, shape, generator=generator) - 1
    extreme = ((signs * difference).mean(1).abs() >= difference.mean().abs() - 1e-12).sum()
    resampled = difference[torch.randint(len(difference), shape, generator=generator)].mean(1)
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    # The differences as they are count as one of the draws, so that p is never 0.
    return PairedGain(float(difference.mean()), low, high, float((extreme + 1) / (draws + 1)), len(difference))
