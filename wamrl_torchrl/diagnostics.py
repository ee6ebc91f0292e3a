"""Is it learning? Numbers that tell, and warnings that say what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase

from wamrl_torchrl import schema
from wamrl_torchrl.data.analysis import Rate

if TYPE_CHECKING:
    from wamrl_torchrl.objectives.transforms.advantage import GroupReport

Metrics = Mapping[str, float]


@dataclass
class DiagnosticsConfig:
    """When to warn."""

    window: int = 5  # iterations that are compared with the window before, or with the best one
    repeat_every: int = 10  # iterations until the same warning is given again
    clip_fraction: float = 0.4  # of flow-PPO, above which its step is too large
    least_kl: float = 1e-4  # of flow-PPO, below which (and least_clip) nothing moves
    least_clip: float = 0.005
    z: float = 2.5  # standard errors between two windows that count as a change
    z_best: float = 3.5  # the same for intervals against the best window: the best of many was lucky


class Advice(NamedTuple):
    """What was seen and what to do about it."""

    cause: str
    iteration: int
    message: str


# ---- numbers of a rollout -------------------------------------------------------------------------------------------
def imagination_metrics(rollout: TensorDictBase) -> dict[str, float]:
    """How the reconstruction reward of scored whole episodes [M] relates to copying and to success.

    Returns:
        ``copy_mse``, the error of predicting that nothing moves, to be compared with ``mse``; ``success_correlation``,
        the point-biserial correlation of an episode's mean reward with its success (absent if all episodes ended
        alike), and ``correlation_episodes``, its n. Nothing if no decision was scored.
    """
    mask = rollout.get(schema.REWARD_REC_MASK).squeeze(-1)
    if not bool(mask.any()):
        return {}
    copied = rollout.get(schema.REWARD_REC_COPY).squeeze(-1)[mask]
    metrics = {"reconstruction/copy_mse": -float(copied.mean())}

    episode, row = rollout.get(schema.EPISODE_ID).squeeze(-1).unique(return_inverse=True)
    zeros = torch.zeros(len(episode), dtype=torch.float64)
    raw = rollout.get(schema.REWARD_REC_RAW).squeeze(-1).double() * mask
    count = zeros.index_add(0, row, mask.double())
    reward = (zeros.index_add(0, row, raw) / count)[count > 0]
    success = zeros.index_add(0, row, rollout.get(("next", schema.SUCCESS)).squeeze(-1).double())[count > 0]
    if float(success.std(correction=0)) > 0 and float(reward.std(correction=0)) > 0:
        correlation = torch.corrcoef(torch.stack((reward, success)))[0, 1]
        metrics |= {
            "reconstruction/success_correlation": float(correlation),
            "reconstruction/correlation_episodes": float(len(reward)),
        }
    return metrics


def group_metrics(report: GroupReport, group_size: int) -> dict[str, float]:
    """What an advantage computation saw and kept; ``expected_mixed`` is the chance of a group with both outcomes.

    It follows from the success of the tasks alone, were the episodes of a group independent: initial conditions that
    always succeed or always fail make the kept fraction smaller.
    """
    mixed = sum(n * (1 - (k / n) ** group_size - (1 - k / n) ** group_size) for k, n in report.task_success.values())
    metrics = {
        "groups/kept": float(report.kept),
        "groups/kept_fraction": report.kept / max(1, report.groups),
        "groups/expected_mixed": mixed / max(1, report.episodes),
        "groups/return_std": report.return_std,
    }
    for task, (k, n) in report.task_success.items():
        metrics |= {f"task_success/{task}": k / n, f"task_episodes/{task}": float(n)}
    return metrics


# ---- warnings -------------------------------------------------------------------------------------------------------
def _mean(history: Sequence[Metrics], name: str) -> float:
    values = [metrics[name] for metrics in history if name in metrics]
    return sum(values) / len(values) if values else math.nan


def _rate(history: Sequence[Metrics], name: str = "rollout/success", trials: str = "rollout/episodes") -> Rate:
    pairs = [(metrics[name] * metrics[trials], metrics[trials]) for metrics in history if name in metrics]
    return Rate(round(sum(k for k, _ in pairs)), round(sum(n for _, n in pairs)))


def _difference(before: Rate, after: Rate) -> float:
    """Change of a success rate in standard errors, pooled."""
    if not before.n or not after.n:
        return 0.0
    p = (before.k + after.k) / (before.n + after.n)
    error = math.sqrt(p * (1 - p) * (1 / before.n + 1 / after.n))
    return (after.value - before.value) / error if error else 0.0


def no_mixed_groups(history: Sequence[Metrics], _: DiagnosticsConfig) -> str | None:
    """Groups whose episodes all end alike carry no advantage."""
    last = history[-1]
    if last.get("groups/kept_fraction", 1.0) > 0:
        return None
    success = last["rollout/success"]
    why = "fails" if success < 0.5 else "succeeds"
    advice = (
        "start from a better policy, or along demonstrations (algo.curriculum.fraction)"
        if success < 0.5
        else "choose harder tasks or perturbed suites (env.suite, algo.task_weights=failure)"
    )
    return (
        f"no group had both outcomes: the policy nearly always {why} ({_rate(history[-1:])}), so there is nothing to "
        f"compare. {advice.capitalize()}, or larger groups (algo.group_size)."
    )


def step_too_large(history: Sequence[Metrics], config: DiagnosticsConfig) -> str | None:
    """Most ratios are clipped, or the KL passes what stops an update."""
    clip = history[-1].get("actor/clip_fraction", 0.0)
    if clip <= config.clip_fraction:
        return None
    kl = history[-1].get("actor/kl_approx", math.nan)
    return (
        f"{clip:.0%} of the ratios were clipped (KL {kl:.2g}): the step is larger than the clip range trusts. Lower "
        f"algo.actor_lr (now {history[-1].get('actor/lr', math.nan):.2g}) or algo.epochs, or set algo.kl_target=0.03."
    )


def nothing_moves(history: Sequence[Metrics], config: DiagnosticsConfig) -> str | None:
    """An update of flow-PPO that changes no probability."""
    last = history[-1]
    if last.get("actor/lr", 0.0) == 0 or "actor/kl_approx" not in last:
        return None
    kl, clip = last["actor/kl_approx"], last["actor/clip_fraction"]
    if kl >= config.least_kl or clip >= config.least_clip:
        return None
    return (
        f"the update moved next to nothing (KL {kl:.2g}, {clip:.1%} clipped). Raise algo.actor_lr (now "
        f"{last['actor/lr']:.2g}) or algo.epochs, or let algo.kl_target find the rate."
    )


def reward_hacked(history: Sequence[Metrics], config: DiagnosticsConfig) -> str | None:
    """The reconstruction reward rises while success falls, or it prefers failures."""
    n = config.window
    if len(history) >= 2 * n and "reconstruction/mse" in history[-1]:
        old, new = history[-2 * n : -n], history[-n:]
        fall = _difference(_rate(old), _rate(new))
        before, after = _mean(old, "reconstruction/mse"), _mean(new, "reconstruction/mse")
        if fall < -config.z and after < before:
            return (
                f"imagination errs less ({before:.4f} to {after:.4f}) while success fell ({_rate(old)} to "
                f"{_rate(new)}): the actor may be making its future easy to predict. Lower algo.weight_rec."
            )
    recent = [m for m in history[-n:] if "reconstruction/success_correlation" in m]
    episodes = sum(m["reconstruction/correlation_episodes"] for m in recent)
    correlation = _mean(recent, "reconstruction/success_correlation")
    if episodes > 3 and correlation * math.sqrt(episodes - 3) < -config.z:
        return (
            f"the reconstruction reward prefers failures (correlation with success {correlation:.2f} over "
            f"{episodes:.0f} episodes). Lower algo.weight_rec, or train the video expert longer before it judges."
        )
    return None


def imagination_useless(history: Sequence[Metrics], _: DiagnosticsConfig) -> str | None:
    """Imagined frames are no closer to the real ones than the current frame is."""
    last = history[-1]
    imagined, copied = last.get("reconstruction/mse", 0.0), last.get("reconstruction/copy_mse", math.inf)
    if imagined < copied:
        return None
    return (
        f"imagined frames are no closer to the real ones (MSE {imagined:.4f}) than a copy of the current frame "
        f"({copied:.4f}): the reconstruction reward measures the model's own error. Train the video expert first "
        f"(algo.mode=video_only, more pre-training), or set algo.weight_rec=0."
    )


def task_regresses(history: Sequence[Metrics], config: DiagnosticsConfig) -> str | None:
    """A task's success in the last window lies below its best window, beyond both intervals."""
    n, worse = config.window, []
    names = {name for metrics in history for name in metrics if name.startswith("task_success/")}
    for name in sorted(names):
        trials = name.replace("task_success/", "task_episodes/")
        windows = [_rate(history[i : i + n], name, trials) for i in range(len(history) - n + 1)]
        windows = [window for window in windows if window.n]
        if len(windows) < n + 1:
            continue
        best, last = max(windows[:-n], key=lambda rate: rate.value), windows[-1]
        if last.interval(config.z_best)[1] < best.interval(config.z_best)[0]:
            worse.append(f"task {name.split('/')[1]} ({best} at best, {last} now)")
    if not worse:
        return None
    return (
        f"success fell on {', '.join(worse)}. Lower algo.actor_lr, hold the actor to its start (algo.anchor), or deal "
        f"the task more often (algo.task_weights=failure)."
    )


#: By the name of their cause; each returns a message, or None while all is well.
RULES: dict[str, Callable[[Sequence[Metrics], DiagnosticsConfig], str | None]] = {
    "no_mixed_groups": no_mixed_groups,
    "step_too_large": step_too_large,
    "nothing_moves": nothing_moves,
    "reward_hacked": reward_hacked,
    "imagination_useless": imagination_useless,
    "task_regresses": task_regresses,
}


class Watch:
    """Applies the rules to a run's metrics; remembers what it has said. A checkpoint component.

    Args:
        config: thresholds.
    """

    def __init__(self, config: DiagnosticsConfig) -> None:
        self.config = config
        self.history: list[dict[str, float]] = []
        self._said: dict[str, int] = {}

    def check(self, iteration: int, metrics: Metrics) -> list[Advice]:
        """Take in an iteration's metrics and return the warnings to give."""
        kept = ("rollout/", "groups/", "actor/", "reconstruction/", "task_")
        self.history.append({name: value for name, value in metrics.items() if name.startswith(kept)})
        given = []
        for cause, rule in RULES.items():
            message = rule(self.history, self.config)
            said = self._said.get(cause)
            if message is not None and (said is None or iteration - said >= self.config.repeat_every):
                self._said[cause] = iteration
                given.append(Advice(cause, iteration, message))
        return given

    def state_dict(self) -> dict[str, Any]:
        """What was seen and said."""
        return {"history": list(self.history), "said": dict(self._said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.history, self._said = list(state["history"]), dict(state["said"])
