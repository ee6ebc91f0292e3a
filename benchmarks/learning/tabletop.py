"""Does it learn? WAM-RL on the table top from a deliberately weak start: losses, modes, rewards, controls, sensitivity.

    python benchmarks/learning/tabletop.py --variants main --seeds 0 1 2 3 4 --save
    python benchmarks/learning/tabletop.py --variants all --seeds 0 --jobs 2 --save

Every seed is pre-trained once, on demonstrations of its own, too briefly to be good; every variant starts from there.
Held-out success is that of the deterministic policy on 200 episodes, 100 layouts that nothing was trained on. Runs that
are there are not run again, and interrupted ones go on, so a few minutes at a time will do (``--minutes``). What is to
be compared was written down beforehand in PLAN.md; everything that ran is in the result.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import RESULTS, finish, processor

from wamrl_torchrl.data.analysis import Rate

WORLD = ("preset=tabletop", "logger.tensorboard=false", "logger.video=false")
IMITATION = ("algo.actor_loss=self_imitation",)
WEIGHTED = ("algo.actor_loss=weighted_flow", "algo.self_imitation.weight=0")
PPO = (
    "algo.actor_loss=flow_ppo",
    "sde.stochastic_steps=all",
    "sde.noise_level=0.7",
    "algo.minibatch_size=512",
    "algo.epochs=2",
    "algo.actor_lr=1e-4",
    "algo.actor_lr_final=null",
    "algo.kl_target=0.03",
    "algo.target_kl=0.1",
    "algo.normalize_steps=false",
)
#: Overrides of ``preset=tabletop``, whose own options are the variant ``main``.
VARIANTS: dict[str, tuple[str, ...]] = {
    "main": (),
    # controls
    "rate_0": ("algo.actor_lr=0", "algo.iterations=3"),
    "shuffled": ("algo.shuffle_advantages=true",),
    # losses
    "ppo_all_steps": PPO,
    "ppo_one_step": (*PPO, "sde.stochastic_steps=one_random"),
    "ppo_and_imitation": (*PPO, "algo.self_imitation.weight=1"),
    "weighted_flow": WEIGHTED,
    "weighted_flow_and_imitation": (*WEIGHTED[:1], "algo.self_imitation.weight=1"),
    "nft": ("algo.actor_loss=nft", "algo.actor_lr=1e-4", "algo.self_imitation.weight=0"),
    # modes and rewards
    "alternate": ("algo.mode=alternate", "env.future_frames=true"),
    "ppo_reward_both": (*PPO, "env.future_frames=true", "algo.weight_rec=0.1"),
    "ppo_reward_rec": (*PPO, "env.future_frames=true", "algo.weight_task=0", "algo.weight_rec=1"),
    "ppo_alternate_both": (*PPO, "env.future_frames=true", "algo.weight_rec=0.1", "algo.mode=alternate"),
    # sensitivity of flow-PPO
    "ppo_noise_0.3": (*PPO, "sde.noise_level=0.3"),
    "ppo_noise_1.0": (*PPO, "sde.noise_level=1.0"),
    "ppo_K_3": (*PPO, "sde.num_steps=3"),
    "ppo_K_10": (*PPO, "sde.num_steps=10"),
    "ppo_kl_0.01": (*PPO, "algo.kl_target=0.01"),
    "ppo_kl_0.1": (*PPO, "algo.kl_target=0.1", "algo.target_kl=0.4"),
    "ppo_normalized": (*PPO, "algo.normalize_steps=true"),
    # sensitivity of self-imitation
    "imitation_rate_half": ("algo.actor_lr=2.5e-4",),
    "imitation_rate_double": ("algo.actor_lr=1e-3",),
    "imitation_noise_0.5": ("sde.noise_level=0.5",),
}


def command(module: str, *overrides: str) -> list[str]:
    """A command of the package."""
    return [sys.executable, "-m", f"wamrl_torchrl.{module}", *WORLD, *overrides]


def call(arguments: list[str], log: Path, options: argparse.Namespace, *, seconds: float | None = None) -> bool:
    """Run a command into a log; False if it failed or ran out of time."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        try:
            subprocess.run(
                arguments, env=environment, stdout=file, stderr=subprocess.STDOUT, check=True, timeout=seconds
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return False
    return True


def prepare_start(seed: int, options: argparse.Namespace) -> Path:
    """Demonstrate and pre-train once per seed; returns the policy."""
    directory = Path(options.directory) / f"start_seed{seed}"
    if not (directory / "start" / "config.json").exists():
        common = (f"logger.directory={directory}", f"seed={seed}", f"device={options.device}")
        began = time.perf_counter()
        for module in ("demos", "pretrain"):
            if not call(command(module, *common), directory / "log.txt", options):
                sys.exit(f"{module} of seed {seed} failed: see {directory / 'log.txt'}")
        (directory / "minutes.json").write_text(json.dumps((time.perf_counter() - began) / 60))
    return directory / "start"


def run(variant: str, seed: int, options: argparse.Namespace, deadline: float) -> None:
    """Train a variant, or go on with it."""
    directory = Path(options.directory) / f"{variant}_seed{seed}"
    seconds = deadline - time.monotonic()
    if (directory / "summary.json").exists() or seconds < 1:
        return
    overrides = (f"model.policy={Path(options.directory) / f'start_seed{seed}' / 'start'}", f"seed={seed}")
    overrides += (f"device={options.device}", f"logger.directory={directory}", "resume=true", *VARIANTS[variant])
    call(command("train", *overrides, *options.overrides), directory / "log.txt", options, seconds=seconds)


def read(variant: str, seed: int, options: argparse.Namespace) -> dict | None:
    """Curve and held-out success of a run; None if it has not begun."""
    directory = Path(options.directory) / f"{variant}_seed{seed}"
    path = directory / "metrics" / "scalars" / "rollout" / "success.csv"
    if not path.exists():
        return None
    with path.open() as file:
        curve = {int(float(step)): float(value) for step, value in csv.reader(file)}
    result: dict = {"seed": seed, "curve": [curve[step] for step in sorted(curve)]}
    if (directory / "summary.json").exists():
        summary = json.loads((directory / "summary.json").read_text())
        result |= {name: summary["held_out"][name][:2] for name in ("start", "end")}
        result["minutes"] = sum(summary["seconds"].values()) / 60
    return result


def draw(results: dict[str, list[dict]], picture: Path) -> None:
    """Training success by iteration: mean and range of each variant's finished seeds, thin lines for single runs."""
    figure, axis = plt.subplots(figsize=(9, 5))
    for name, runs in results.items():
        curves = [run["curve"] for run in runs if "end" in run]
        for run in runs:
            axis.plot(range(1, len(run["curve"]) + 1), run["curve"], linewidth=0.5, color="gray", alpha=0.6)
        if not curves:
            continue
        length = min(map(len, curves))
        columns = list(zip(*(curve[:length] for curve in curves), strict=True))
        middle, steps = [statistics.mean(column) for column in columns], range(1, length + 1)
        (line,) = axis.plot(steps, middle, linewidth=2.5 if name == "main" else 1, label=f"{name} (n={len(curves)})")
        if len(curves) > 1:
            axis.fill_between(
                steps, list(map(min, columns)), list(map(max, columns)), alpha=0.2, color=line.get_color(), linewidth=0
            )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="iteration (128 episodes)", ylabel="success while exploring", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncol=2)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def show(results: dict[str, list[dict]]) -> None:
    """A table of what finished."""
    table = Table(
        "variant", "seeds", "start", "end", "gain", "minutes", title="held-out success, 95 % Wilson intervals"
    )
    for name, runs in results.items():
        done = [run for run in runs if "end" in run]
        if not done:
            table.add_row(name, str(len(runs)), "-", "not finished", "-", "-")
            continue
        start, end = (
            Rate(sum(run[key][0] for run in done), sum(run[key][1] for run in done)) for key in ("start", "end")
        )
        minutes = statistics.mean(run["minutes"] for run in done)
        table.add_row(name, str(len(done)), str(start), str(end), f"{end.value - start.value:+.3f}", f"{minutes:.1f}")
    Console(width=140).print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["main"], help="names, or all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of a run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then; the same command goes on")
    parser.add_argument("--directory", default="runs/learning_tabletop")
    parser.add_argument("--save", action="store_true", help="write results/learning_tabletop.json and .png")
    parser.add_argument("overrides", nargs="*", help="further options of wamrl-train")
    options = parser.parse_intermixed_args()
    names = list(VARIANTS) if options.variants == ["all"] else options.variants
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        parser.error(f"unknown variants {unknown}; known are {sorted(VARIANTS)}")
    deadline = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda seed: prepare_start(seed, options), options.seeds))
        list(pool.map(lambda pair: run(*pair, options, deadline), [(name, s) for name in names for s in options.seeds]))
    found = {name: [read(name, seed, options) for seed in options.seeds] for name in names}
    results = {name: [run for run in runs if run is not None] for name, runs in found.items()}
    show(results)
    figures = {}
    for name, runs in results.items():
        done = [run for run in runs if "end" in run]
        figures[name] = {
            "options": list(VARIANTS[name]),
            "start": [run["start"][0] / run["start"][1] for run in done],
            "final": [run["end"][0] / run["end"][1] for run in done],
            "n": [run["end"][1] for run in done],
            "intervals_final": [Rate(*run["end"]).interval() for run in done],
            "seeds": [run["seed"] for run in done],
            "minutes": [round(run["minutes"], 2) for run in done],
            "curves": [[round(value, 4) for value in run["curve"]] for run in runs],
            "unfinished_seeds": [run["seed"] for run in runs if "end" not in run],
        }
    if options.save:
        draw(results, RESULTS / "learning_tabletop.png")
    starts = [Path(options.directory) / f"start_seed{seed}" / "minutes.json" for seed in options.seeds]
    minutes = [round(json.loads(path.read_text()), 1) for path in starts if path.exists()]
    machine = f"{processor()}, device {options.device}, {options.jobs} runs of {options.threads} threads side by side"
    finish("learning_tabletop", figures, save=options.save, machine=machine, pretraining_minutes=minutes)


if __name__ == "__main__":
    main()
