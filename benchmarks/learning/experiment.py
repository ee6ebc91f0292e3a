"""Variants of a training run, from one start per seed, compared by paired held-out success.

Used by the scripts beside it. Everything can be interrupted: starts and runs that are there are not made again, and
begun ones go on, so a few minutes at a time will do (``--minutes``).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import RESULTS, finish, processor

from wamrl_torchrl.data.analysis import Rate, paired_gain

QUIET = ("logger.tensorboard=false", "logger.video=false")
#: Scalars of every iteration that go into the CSV.
RAW = ("rollout/success", "held_out/success", "actor/kl", "actor/clip_fraction", "actor/lr", "groups/kept_fraction")
Outcomes = dict[tuple[int, int, int], bool]  # by task, init state and env seed


@dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        name: of the results.
        world: options of all commands.
        variants: options of ``wamrl-train`` by variant; the first is what is looked for.
        cloning: options of ``wamrl-pretrain`` by variant, for controls that clone instead of learning by reward.
        names: what success before and after is called in the results.
    """

    name: str
    world: tuple[str, ...]
    variants: dict[str, tuple[str, ...]]
    cloning: dict[str, tuple[str, ...]]
    names: tuple[str, str]


class Lab:
    """The runs of an experiment in a directory."""

    def __init__(self, experiment: Experiment, options: argparse.Namespace) -> None:
        self.experiment = experiment
        self.options = options
        self.root = Path(options.directory)
        self.deadline = time.monotonic() + 60 * options.minutes

    def _call(self, log: Path, module: str, *overrides: str) -> bool:
        """Run a command of the package; False if it failed or time is over."""
        seconds = self.deadline - time.monotonic()
        if seconds < 1:
            return False
        arguments = [sys.executable, "-m", f"wamrl_torchrl.{module}", *self.experiment.world, *QUIET, *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.options.threads)}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            try:
                subprocess.run(
                    [*arguments, f"device={self.options.device}", *self.options.overrides],
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=seconds,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                return False
        return True

    def _evaluate(self, directory: Path, seed: int) -> bool:
        """Held-out success of ``<directory>/start`` into ``<directory>/held_out``."""
        into = directory / "held_out"
        if (into / "evaluation.json").exists():
            return True
        return self._call(
            directory / "log.txt",
            "evaluate",
            f"model.policy={directory / 'start'}",
            f"seed={seed}",
            f"logger.directory={into}",
        )

    def start(self, seed: int) -> bool:
        """Demonstrate, pre-train and evaluate, once per seed; whether that is done."""
        directory = self.root / f"start_seed{seed}"
        log, common = directory / "log.txt", (f"logger.directory={directory}", f"seed={seed}")
        if not (directory / "start" / "config.json").exists():
            began = time.perf_counter()
            done = (directory / "demos").exists() or self._call(log, "demos", *common)
            if not (done and self._call(log, "pretrain", *common)):
                return False
            (directory / "minutes.json").write_text(json.dumps((time.perf_counter() - began) / 60))
        return self._evaluate(directory, seed)

    def run(self, variant: str, seed: int) -> None:
        """Train a variant, or go on with it."""
        start, directory = self.root / f"start_seed{seed}", self.root / f"{variant}_seed{seed}"
        common, log = (f"logger.directory={directory}", f"seed={seed}"), directory / "log.txt"
        if not (start / "held_out" / "evaluation.json").exists():
            return
        if variant in self.experiment.cloning:
            if not (directory / "start" / "config.json").exists():
                directory.mkdir(parents=True, exist_ok=True)
                if not (directory / "demos").exists():
                    (directory / "demos").symlink_to(Path(os.path.relpath(start / "demos", directory)))
                if not self._call(log, "pretrain", *common, *self.experiment.cloning[variant]):
                    return
            self._evaluate(directory, seed)
        elif not (directory / "summary.json").exists():
            policy = (f"model.policy={start / 'start'}", "resume=true", "evaluation.start=false")
            self._call(log, "train", *common, *policy, *self.experiment.variants[variant])

    # ---- reading ----------------------------------------------------------------------------------------------------
    def before(self, seed: int) -> Outcomes:
        """Held-out episodes of a start."""
        return _outcomes(json.loads((self.root / f"start_seed{seed}/held_out/evaluation.json").read_text())["episodes"])

    def after(self, variant: str, seed: int) -> Outcomes | None:
        """Held-out episodes of a finished run, or None."""
        directory = self.root / f"{variant}_seed{seed}"
        if variant in self.experiment.cloning:
            path = directory / "held_out" / "evaluation.json"
            return _outcomes(json.loads(path.read_text())["episodes"]) if path.exists() else None
        if not (directory / "summary.json").exists():
            return None
        return _outcomes(json.loads(max((directory / "held_out").glob("*.json")).read_text()))

    def scalars(self, variant: str, seed: int) -> dict[str, dict[int, float]]:
        """Scalars of a run by iteration."""
        directory, found = self.root / f"{variant}_seed{seed}" / "metrics" / "scalars", {}
        for name in RAW:
            if (path := directory / f"{name}.csv").exists():
                with path.open() as file:
                    found[name] = {int(float(step)): float(value) for step, value in csv.reader(file)}
        return found

    def minutes(self, variant: str, seed: int) -> float | None:
        """Wall time of a run, its last evaluation included; None for cloning."""
        path = self.root / f"{variant}_seed{seed}" / "summary.json"
        if not path.exists():
            return None
        return round(sum(json.loads(path.read_text())["seconds"].values()) / 60, 2)

    def figures(self, variant: str, seeds: Sequence[int]) -> dict:
        """Results of a variant."""
        first, last = self.experiment.names
        finished = {seed: outcomes for seed in seeds if (outcomes := self.after(variant, seed)) is not None}
        starts = {seed: self.before(seed) for seed in finished}
        figures: dict = {
            "options": [*self.experiment.variants.get(variant, ()), *self.experiment.cloning.get(variant, ())],
            "seeds": list(finished),
            first: [_rate(outcomes).value for outcomes in starts.values()],
            last: [_rate(outcomes).value for outcomes in finished.values()],
            "n": [len(outcomes) for outcomes in finished.values()],
            "minutes": [self.minutes(variant, seed) for seed in finished],
            "unfinished_seeds": [seed for seed in seeds if seed not in finished],
        }
        if finished:
            pooled = {name: _rate(*outcomes.values()) for name, outcomes in ((first, starts), (last, finished))}
            figures["pooled"] = {name: [*rate, *rate.interval()] for name, rate in pooled.items()}
            # Units are initial states, whatever the seed of policy and environment.
            figures |= paired_gain(_by_unit(starts.values()), _by_unit(finished.values()))._asdict()
            tasks = sorted({task for outcomes in finished.values() for task, *_ in outcomes})
            figures["tasks"] = {
                str(task): {
                    name: list(_rate(*outcomes.values(), task=task))
                    for name, outcomes in ((first, starts), (last, finished))
                }
                for task in tasks
            }
        return figures


def _outcomes(episodes: Sequence[dict]) -> Outcomes:
    return {(each["task_id"], each["init_state_id"], each["env_seed"]): each["success"] for each in episodes}


def _rate(*outcomes: Outcomes, task: int | None = None) -> Rate:
    found = [won for each in outcomes for (of, *_), won in each.items() if task in (None, of)]
    return Rate(sum(found), len(found))


def _by_unit(outcomes: Iterable[Outcomes]) -> dict[Hashable, float]:
    """Mean success by task and initial state."""
    found: dict[Hashable, list[bool]] = defaultdict(list)
    for each in outcomes:
        for (task, init, _), won in each.items():
            found[task, init].append(won)
    return {unit: statistics.mean(values) for unit, values in found.items()}


def draw(curves: dict[str, list[list[float]]], picture: Path, title: str) -> None:
    """Training success by iteration: mean and range over each variant's seeds, single runs as thin lines."""
    figure, axis = plt.subplots(figsize=(9, 5))
    for index, (name, runs) in enumerate(curves.items()):
        color = plt.get_cmap("tab20")(index % 20)
        for run in runs:
            axis.plot(range(1, len(run) + 1), run, linewidth=0.5, color=color, alpha=0.5)
        columns = list(zip(*runs, strict=False))  # as far as all of them went
        middle, steps = [statistics.mean(column) for column in columns], range(1, len(columns) + 1)
        axis.plot(steps, middle, linewidth=2.5 if not index else 1, color=color, label=f"{name} (n={len(runs)})")
        if len(runs) > 1:
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            axis.fill_between(steps, low, high, alpha=0.25 if not index else 0.1, color=color, linewidth=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="iteration", ylabel="success while exploring", ylim=(0, 1), title=title)
    axis.grid(alpha=0.3)
    if curves:
        axis.legend(fontsize=7, ncol=2, loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def show(figures: dict[str, dict], names: tuple[str, str]) -> None:
    """A table of what finished."""
    table = Table(
        "variant", "seeds", *names, "gain [95 %]", "p", "minutes", title="held-out success, pooled over seeds"
    )
    for name, found in figures.items():
        if not found["seeds"]:
            table.add_row(name, "0", "-", "not finished", "-", "-", "-")
            continue
        rates = [str(Rate(*found["pooled"][key][:2])) for key in names]
        gain = f"{found['gain']:+.3f} [{found['low']:+.2f}, {found['high']:+.2f}]"
        minutes = "-" if None in found["minutes"] else f"{statistics.mean(found['minutes']):.1f}"
        table.add_row(name, str(len(found["seeds"])), *rates, gain, f"{found['p_value']:.4f}", minutes)
    Console(width=150).print(table)


def main(experiment: Experiment, description: str) -> None:
    """Command line of an experiment."""
    known = [*experiment.variants, *experiment.cloning]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=known[:1], help="names, or all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of a run")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then; the same command goes on")
    parser.add_argument("--directory", default=f"runs/{experiment.name}")
    parser.add_argument("--save", action="store_true", help=f"write results/{experiment.name}.json, .csv and .png")
    parser.add_argument("overrides", nargs="*", help="further options of all commands")
    options = parser.parse_intermixed_args()
    # Options of the commands are told from names of variants by their "=", wherever they stand.
    options.overrides += [each for each in options.variants if "=" in each]
    options.variants = [each for each in options.variants if "=" not in each] or known[:1]
    names = known if options.variants == ["all"] else options.variants
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"unknown variants {unknown}; known are {known}")
    lab = Lab(experiment, options)
    with ThreadPoolExecutor(options.jobs) as pool:
        started = list(pool.map(lab.start, options.seeds))
        list(pool.map(lambda pair: lab.run(*pair), [(name, seed) for name in names for seed in options.seeds]))
    for seed, done in zip(options.seeds, started, strict=True):
        if not done:
            print(f"the start of seed {seed} is not finished: {lab.root / f'start_seed{seed}' / 'log.txt'}")
    figures = {name: lab.figures(name, options.seeds) for name in names}
    show(figures, experiment.names)
    curves: dict[str, list[list[float]]] = defaultdict(list)
    raw = [("variant", "seed", "iteration", *RAW)]
    for name in names:
        for seed in options.seeds:
            scalars = lab.scalars(name, seed)
            success = scalars.get("rollout/success", {})
            if success:
                curves[name].append([success[step] for step in sorted(success)])
            raw += [
                (
                    name,
                    seed,
                    step,
                    *(f"{scalars[key][step]:.6g}" if step in scalars.get(key, {}) else "" for key in RAW),
                )
                for step in sorted(success)
            ]
    if options.save:
        draw(curves, RESULTS / f"{experiment.name}.png", experiment.name.replace("_", ": "))
        with (RESULTS / f"{experiment.name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(raw)
    starts = [lab.root / f"start_seed{seed}" / "minutes.json" for seed in options.seeds]
    minutes = [round(json.loads(path.read_text()), 1) for path in starts if path.exists()]
    machine = f"{processor()}, device {options.device}, {options.jobs} runs of {options.threads} threads side by side"
    finish(experiment.name, figures, save=options.save, machine=machine, pretraining_minutes=minutes)
