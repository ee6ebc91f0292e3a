"""Numbers that tell whether a run learns, and the warnings that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from wamrl_torchrl import schema
from wamrl_torchrl.diagnostics import DiagnosticsConfig, Watch, group_metrics, imagination_metrics
from wamrl_torchrl.objectives.transforms.advantage import GroupReport

HEALTHY = {
    "rollout/success": 0.5,
    "rollout/episodes": 128.0,
    "groups/kept_fraction": 0.8,
    "actor/clip_fraction": 0.1,
    "actor/kl_approx": 0.02,
    "actor/lr": 1e-4,
    "reconstruction/mse": 0.01,
    "reconstruction/copy_mse": 0.02,
    "reconstruction/success_correlation": 0.1,
    "reconstruction/correlation_episodes": 128.0,
    "task_success/0": 0.5,
    "task_episodes/0": 128.0,
}


def causes(*series: dict[str, float], **options) -> list[tuple[str, int]]:
    watch = Watch(DiagnosticsConfig(**options))
    given = [watch.check(number, {**HEALTHY, **metrics}) for number, metrics in enumerate(series, 1)]
    return [(advice.cause, advice.iteration) for each in given for advice in each]


def message(*series: dict[str, float]) -> str:
    watch = Watch(DiagnosticsConfig())
    given = [watch.check(number, {**HEALTHY, **metrics}) for number, metrics in enumerate(series, 1)]
    return given[-1][0].message


class TestWarnings:
    def test_a_healthy_run_is_left_alone(self):
        rising = [{"rollout/success": 0.3 + 0.01 * i, "task_success/0": 0.3 + 0.01 * i} for i in range(30)]
        assert causes(*rising) == []

    def test_noise_is_no_news(self):
        """Binomial noise around a constant rate, twenty runs of 60 iterations of 128 episodes."""
        for draws in np.random.default_rng(0).binomial(128, 0.5, (20, 60)) / 128:
            assert causes(*({"rollout/success": p, "task_success/0": p} for p in draws)) == []

    @pytest.mark.parametrize(("success", "advice"), [(0.0, "Start from a better policy"), (1.0, "Choose harder tasks")])
    def test_no_mixed_groups(self, success, advice):
        bad = {"groups/kept_fraction": 0.0, "rollout/success": success}
        assert causes(bad) == [("no_mixed_groups", 1)]
        assert advice in message(bad)

    def test_step_too_large(self):
        bad = {"actor/clip_fraction": 0.55, "actor/kl_approx": 0.9}
        assert causes(bad) == [("step_too_large", 1)]
        assert "55% of the ratios were clipped (KL 0.9)" in message(bad)

    def test_nothing_moves(self):
        bad = {"actor/clip_fraction": 0.0, "actor/kl_approx": 1e-6}
        assert causes(bad) == [("nothing_moves", 1)]
        assert causes({**bad, "actor/lr": 0.0}) == []  # a control: it was asked for

    def test_reward_hacked(self):
        before = [{"rollout/success": 0.6}] * 5
        after = [{"rollout/success": 0.4, "reconstruction/mse": 0.005}] * 5
        assert causes(*before, *after)[-1][0] == "reward_hacked"
        # Better imagination with better success is what is wanted, and worse success alone is another matter.
        assert causes(*after, *before) == []
        assert causes(*before, *[{"rollout/success": 0.4}] * 5) == []

    def test_a_reward_that_prefers_failures(self):
        bad = {"reconstruction/success_correlation": -0.4}
        assert causes(bad) == [("reward_hacked", 1)]
        assert causes({**bad, "reconstruction/correlation_episodes": 16.0}) == []  # as good as chance

    def test_imagination_useless(self):
        bad = {"reconstruction/mse": 0.03}
        assert causes(bad) == [("imagination_useless", 1)]
        assert "MSE 0.0300" in message(bad)
        assert "0.0200" in message(bad)

    def test_task_regresses(self):
        series = [{"task_success/0": 0.8}] * 6 + [{"task_success/0": 0.5}] * 6
        assert ("task_regresses", 9) in causes(*series) or ("task_regresses", 10) in causes(*series)
        watch = Watch(DiagnosticsConfig())
        given = [watch.check(i, {**HEALTHY, **metrics}) for i, metrics in enumerate(series, 1)]
        (advice,) = [each[0] for each in given if each]
        assert "task 0 (512/640 = 0.800" in advice.message

    def test_is_not_repeated_at_once(self):
        bad = {"actor/clip_fraction": 0.9}
        assert causes(*[bad] * 25) == [("step_too_large", i) for i in (1, 11, 21)]
        assert causes(*[bad] * 3, repeat_every=1) == [("step_too_large", i) for i in (1, 2, 3)]

    def test_without_any_metrics_there_is_nothing_to_say(self):
        assert Watch(DiagnosticsConfig()).check(1, {}) == []

    def test_goes_on_after_a_checkpoint(self):
        first, second = Watch(DiagnosticsConfig()), Watch(DiagnosticsConfig())
        bad = {**HEALTHY, "actor/clip_fraction": 0.9, "time/collect": 3.0}
        assert first.check(1, bad)
        second.load_state_dict(first.state_dict())
        assert second.check(2, bad) == []
        assert len(second.history) == 2
        assert "time/collect" not in second.history[0]


class TestGroups:
    def test_chance_of_a_mixed_group(self):
        report = GroupReport(4, 2, 16, 10, {0: (8, 8), 3: (2, 8)}, 0.3)
        metrics = group_metrics(report, 4)
        assert metrics["groups/kept_fraction"] == 0.5
        assert metrics["groups/expected_mixed"] == pytest.approx(0.5 * (1 - 0.25**4 - 0.75**4))
        assert (metrics["task_success/3"], metrics["task_episodes/3"]) == (0.25, 8.0)


def scored(success: list[bool], reward: list[float]) -> TensorDict:
    """Episodes of two decisions; a copy of the picture errs by .1 in the first and by .04 in the second."""
    count = 2 * len(success)
    won = torch.tensor(success).repeat_interleave(2)[:, None] & (torch.arange(count) % 2 == 1)[:, None]
    return TensorDict(
        {
            schema.EPISODE_ID: torch.arange(len(success)).repeat_interleave(2)[:, None],
            "next": {
                "reward_rec_raw": torch.tensor(reward).repeat_interleave(2)[:, None],
                "reward_rec_copy": -torch.tensor([0.1, 0.04]).repeat(len(success))[:, None],
                "reward_rec_mask": torch.ones(count, 1, dtype=torch.bool),
                "success": won,
            },
        },
        batch_size=[count],
    )


class TestImagination:
    def test_error_of_copying(self):
        rollout = scored([True, False], [0.0, 0.0])
        assert imagination_metrics(rollout)["reconstruction/copy_mse"] == pytest.approx(0.07)
        rollout["next", "reward_rec_mask"][0] = False
        assert imagination_metrics(rollout)["reconstruction/copy_mse"] == pytest.approx((0.04 + 0.1 + 0.04) / 3)

    def test_correlation_with_success(self):
        success, reward = [True, True, False, False, False], [-1.0, -2.0, -2.5, -4.0, -3.0]
        metrics = imagination_metrics(scored(success, reward))
        expected = np.corrcoef(success, reward)[0, 1]
        assert metrics["reconstruction/success_correlation"] == pytest.approx(expected)
        assert metrics["reconstruction/correlation_episodes"] == 5

    def test_unscored_decisions_are_left_out(self):
        rollout = scored([True, False, True], [-1.0, -2.0, -3.0])
        rollout["next", "reward_rec_mask"][:2] = False
        metrics = imagination_metrics(rollout)
        assert metrics["reconstruction/correlation_episodes"] == 2
        assert metrics["reconstruction/success_correlation"] == pytest.approx(-1.0)
        rollout["next", "reward_rec_mask"][:] = False
        assert imagination_metrics(rollout) == {}

    def test_without_both_outcomes_there_is_no_correlation(self):
        assert "reconstruction/success_correlation" not in imagination_metrics(scored([True, True], [-1.0, -2.0]))
