from __future__ import annotations

import math

import pytest

from wamrl_torchrl.data.analysis import Rate


class TestRate:
    @pytest.mark.parametrize(
        ("k", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)]
    )
    def test_wilson_interval(self, k, n, low, high):
        """Reference values of the Wilson score interval at 95 %."""
        assert Rate(k, n).interval() == pytest.approx((low, high), abs=1e-4)

    def test_no_trials(self):
        assert math.isnan(Rate(0, 0).value)
        assert Rate(0, 0).interval() == (0.0, 1.0)

    def test_reads_well(self):
        assert str(Rate(3, 4)) == "3/4 = 0.750 [0.30, 0.95]"
