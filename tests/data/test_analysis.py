from __future__ import annotations

import math

import pytest
import torch

from wamrl_torchrl.data.analysis import Rate, paired_gain


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


class TestPairedGain:
    def test_equals_the_exact_sign_test_where_every_unit_changes(self):
        """Eight units that all gain: of 256 patterns of signs 2 are as extreme."""
        before, after = dict.fromkeys(range(8), 0.0), dict.fromkeys(range(8), 1.0)
        result = paired_gain(before, after)
        assert result.gain == result.low == result.high == 1
        assert result.units == 8
        assert result.p_value == pytest.approx(2 / 256, abs=0.003)

    def test_nothing_changed(self):
        result = paired_gain({"a": 0.5, "b": 1.0}, {"b": 1.0, "a": 0.5})
        assert result.gain == 0
        assert result.p_value == 1

    def test_p_values_are_uniform_without_an_effect(self):
        generator = torch.Generator().manual_seed(1)
        p_values = []
        for _ in range(200):
            before, after = torch.randint(3, (2, 40), generator=generator).double() / 2
            result = paired_gain(dict(enumerate(before.tolist())), dict(enumerate(after.tolist())), draws=500)
            p_values.append(result.p_value)
            assert result.low <= result.gain <= result.high
        assert 0.01 < sum(p < 0.1 for p in p_values) / 200 < 0.19

    def test_units_must_be_the_same(self):
        with pytest.raises(ValueError, match="1 units before and the 2 after"):
            paired_gain({"a": 1.0}, {"a": 1.0, "b": 0.0})
