"""Does a LIBERO simulator's memory stay flat? 2,000 steps of the environment and 50 resets in one process.

    python benchmarks/libero_memory.py

Chunks of two actions, so that the many steps take minutes. Prints a table and, as its last line, one JSON object; with
`--save` also writes results/libero_memory.json and a figure beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import psutil
import torch
from libero_sides import Ours, new_processes, peak_resident_mb, resident_mb
from matplotlib import pyplot
from record import RESULTS, finish, processor
from rich.console import Console
from rich.table import Table
from scipy import stats

from wamrl_torchrl.report import progress_bar

REPLAN = 2
WARM_UP = 0.1  # share of the run in which caches fill; not part of the fit


def record(steps: int, resets: int, *, frames: bool) -> tuple[dict[str, np.ndarray], float]:
    """Resident memory in MB of ``worker`` and ``parent`` after every step, float64 ``[steps]``; the worker's peak."""
    options = {"frame_offsets": (REPLAN,)} if frames else {"images": False}
    with new_processes() as started:
        ours = Ours(1, replan_steps=REPLAN, **options)
        ours.reset(0)
    memory = {name: np.empty(steps) for name in ("worker", "parent")}
    processes = {"worker": started[0], "parent": psutil.Process()}
    generator = torch.Generator().manual_seed(0)
    with progress_bar(Console(stderr=True), "steps", steps) as advance:
        for step in range(steps):
            # The first episode counts as a reset as well.
            if step and step * resets // steps > (step - 1) * resets // steps:
                ours.reset(step)
            ours.chunk(torch.rand(1, REPLAN, 7, generator=generator) * 2 - 1)
            for name, process in processes.items():
                memory[name][step] = resident_mb(process)
            advance(1, f"worker {memory['worker'][step]:.0f} MB, parent {memory['parent'][step]:.0f} MB")
    peak = peak_resident_mb(started[0])
    ours.close()
    return memory, peak


def slope(memory: np.ndarray, resets: int) -> tuple[float, float, float]:
    """Growth in kB per step: least squares over the episodes' means after the warm-up, with a 95 % interval."""
    # Single steps within an episode are far from independent; episodes are what may be taken for so.
    first = round(WARM_UP * resets)
    means = np.array([part.mean() for part in np.array_split(memory, resets)])[first:]
    step = (np.arange(first, resets) + 0.5) * len(memory) / resets
    fit = stats.linregress(step, 1000 * means)
    half = stats.t.ppf(0.975, len(means) - 2) * np.nan_to_num(fit.stderr)  # NaN where memory does not change at all
    return fit.slope, fit.slope - half, fit.slope + half


def draw(memory: dict[str, np.ndarray], path: Path) -> None:
    """Draw both curves."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3))
    for axis, (name, curve) in zip(axes, memory.items(), strict=True):
        axis.plot(curve)
        axis.set(
            title=name, xlabel="step of the environment", ylabel="resident memory (MB)", ylim=(0, 1.2 * curve.max())
        )
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"written: {path}")


def main() -> None:
    """Run, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--resets", type=int, default=50)
    parser.add_argument("--frames", action="store_true", help="also render every step's image (slow in software)")
    parser.add_argument("--save", action="store_true", help="write results/libero_memory.json and .png")
    options = parser.parse_args()
    if not 10 <= options.resets <= options.steps:
        parser.error("--resets must lie between 10 and --steps")
    memory, peak = record(options.steps, options.resets, frames=options.frames)
    names = ("after warm-up", "end", "largest", "slope (kB/step)", "95 % interval")
    table = Table("resident memory (MB)", *names, title=f"{options.steps} steps, {options.resets} resets")
    figures: dict[str, float | list[float]] = {"worker_peak_mb": round(peak, 1)}
    tenth = options.steps // 10
    for name, curve in memory.items():
        start, end = float(np.median(curve[tenth : 2 * tenth])), float(np.median(curve[-tenth:]))
        per_step, low, high = slope(curve, options.resets)
        values = (f"{start:.1f}", f"{end:.1f}", f"{curve.max():.1f}", f"{per_step:+.3f}", f"{low:+.3f} to {high:+.3f}")
        table.add_row(name, *values)
        figures |= {
            f"{name}_start_mb": round(start, 1),
            f"{name}_end_mb": round(end, 1),
            f"{name}_kb_per_step": round(per_step, 3),
            f"{name}_kb_per_step_interval": [round(low, 3), round(high, 3)],
        }
    Console().print(table)
    if options.save:
        draw(memory, RESULTS / "libero_memory.png")
    n = {"steps": options.steps, "resets": options.resets, "frames": options.frames}
    finish("libero_memory", figures, save=options.save, machine=processor(), n=n)


if __name__ == "__main__":
    main()
