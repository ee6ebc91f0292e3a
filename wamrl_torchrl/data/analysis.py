"""Statistics of results."""

from __future__ import annotations

import math
from typing import NamedTuple


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
