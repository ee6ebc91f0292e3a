"""LIBERO side by side: this package's LiberoEnv against torchrl.envs.LiberoEnv, on the same task, cameras and actions.

    python benchmarks/libero_env.py                        # one and two processes; 8 minutes on two slow cores
    python benchmarks/libero_env.py --quick                # the same with fewer rounds
    python benchmarks/libero_env.py --egl --processes 16   # GPU machine: against LIBERO's own environment

A round runs every side once, so that a machine whose speed drifts slows all of them. A speed-up is a ratio of medians
over the rounds; its range is that of the ratios within the rounds. Both sides are started and reset with the same seeds
and given the same random actions, and the end-effector positions are compared after every chunk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from libero_shares import PARTS, SIDES, alone, make_sim, shares
from libero_sides import (
    FRAMES,
    MAX_STEPS,
    REPLAN,
    FullStepping,
    Ours,
    Side,
    TorchRL,
    new_processes,
    peak_resident_mb,
    resident_mb,
)
from record import finish, processor
from rich.console import Console
from rich.table import Table

from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero_gl import check_gl, choose_gl
from wamrl_torchrl.report import progress_bar


class Bench:
    """Figures of one run, and how they are measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rounds = 2 if options.quick else options.rounds
        self.resets = 1 if options.quick else options.resets
        self.chunks_per_round = 1 if options.quick else 6  # with many processes: a round takes seconds on a GPU
        self.figures: dict[str, float] = {}
        self.spread: dict[str, list[float]] = {}
        self.n: dict[str, int] = {}
        self.console = Console(stderr=True)
        self._generator = torch.Generator().manual_seed(0)

    def note(self, **figures: float) -> None:
        """Keep and print figures."""
        for name, value in figures.items():
            self.figures[name] = float(f"{value:.4g}")
            print(f"{name:<44}{value:>12.4g}", flush=True)

    def speedup(self, name: str, ours: list[float], theirs: list[float]) -> None:
        """Keep and print how much faster ours is, from seconds for the same work per round."""
        self.note(**{name: statistics.median(theirs) / statistics.median(ours)})
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        self.n[name] = len(ratios)
        self.spread[name] = [float(f"{value:.4g}") for value in (min(ratios), max(ratios))]
        print(
            f"{'  range over rounds, n=' + str(len(ratios)):<44}{min(ratios):>12.4g} to {max(ratios):.4g}", flush=True
        )

    def actions(self, *shape: int) -> torch.Tensor:
        """Random actions."""
        return torch.rand(*shape, schema.ACTION_DIM, generator=self._generator) * 2 - 1

    def alternate(
        self, what: str, sides: Mapping[str, Side], rounds: int, run: Callable[[Side, int], None]
    ) -> dict[str, list[float]]:
        """Seconds of ``run(side, round)`` for every side in every round; the sides take turns."""
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        with progress_bar(self.console, what, rounds * len(sides)) as advance:
            for index in range(rounds):
                for name, side in sides.items():
                    began = time.perf_counter()
                    run(side, index)
                    seconds[name].append(time.perf_counter() - began)
                    advance(1, f"{name} {seconds[name][-1]:.2f} s")
                positions = [side.position() for side in sides.values()]
                gap = max(float((position - positions[0]).abs().max()) for position in positions)
                if gap > 0:
                    raise RuntimeError(f"{what}, round {index}: the sides are in different states, {gap:.2g} m apart")
        return seconds

    def chunks(self, what: str, sides: Mapping[str, Side], processes: int) -> dict[str, list[float]]:
        """Seconds of a chunk for every side; the first round, in which caches fill, is not counted."""
        actions = self.actions(self.rounds + 1, processes, REPLAN)
        times = self.alternate(what, sides, self.rounds + 1, lambda side, index: side.chunk(actions[index]))
        return {name: seconds[1:] for name, seconds in times.items()}


def one_process(bench: Bench) -> None:
    """A chunk with frames and without, and a reset, each with one process."""
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        for name, make in {
            "frames": lambda: Ours(1, frame_offsets=FRAMES),
            "no_frames": lambda: Ours(1, images=False),
            "torchrl": lambda: TorchRL(1),
        }.items():
            sides[name] = make()
            stack.callback(sides[name].close)
            sides[name].reset(0)
        pair = {name: sides[name] for name in ("frames", "torchrl")}
        reset = bench.alternate("reset", pair, bench.resets, lambda side, index: side.reset(1 + index))
        sides["no_frames"].reset(bench.resets)
        seconds = bench.chunks("one process", sides, 1)
    for name, times in seconds.items():
        bench.note(**{f"env_steps_per_s_{name}_1p": REPLAN / statistics.median(times)})
    bench.speedup("speedup_frames_1p", seconds["frames"], seconds["torchrl"])
    bench.speedup("speedup_no_frames", seconds["no_frames"], seconds["torchrl"])
    for name, times in reset.items():
        bench.note(**{f"reset_s_{name}": statistics.median(times)})
    bench.speedup("reset_speedup", reset["frames"], reset["torchrl"])


def two_processes(bench: Bench) -> None:
    """A chunk with frames in two processes, and the memory of a process."""
    sides: dict[str, Side] = {}
    processes = {}
    with ExitStack() as stack:
        for name, make in {"frames": lambda: Ours(2, frame_offsets=FRAMES), "torchrl": lambda: TorchRL(2)}.items():
            with new_processes() as processes[name]:
                sides[name] = make()
                stack.callback(sides[name].close)
                sides[name].reset(0)
        seconds = bench.chunks("two processes", sides, 2)
        for name, started in processes.items():
            bench.note(
                **{
                    f"rss_mb_{name}": statistics.mean(map(resident_mb, started)),
                    f"peak_rss_mb_{name}": statistics.mean(map(peak_resident_mb, started)),
                }
            )
    for name, times in seconds.items():
        bench.note(**{f"env_steps_per_s_{name}_2p": 2 * REPLAN / statistics.median(times)})
    bench.speedup("speedup_frames_2p", seconds["frames"], seconds["torchrl"])


def time_shares(bench: Bench) -> None:
    """Where the time of a chunk goes."""
    table = Table("ms per chunk of 10 actions", *PARTS, title="Where the time goes", title_justify="left")
    for side in SIDES:
        seconds = alone(shares, side, bench.rounds, like_ours=side != "torchrl")
        total = sum(seconds.values())
        table.add_row(side, *(f"{1000 * value:.0f} ({value / total:.0%})" for value in seconds.values()))
        for part, value in seconds.items():
            bench.figures[f"share_{part}_{side}"] = round(value / total, 4)
    Console().print(table)


def many_processes(bench: Bench, processes: int) -> None:
    """Our environment with frames against LIBERO's own in as many plain processes, both cameras in every step."""
    backend = choose_gl()
    actions = bench.actions(bench.rounds, processes, bench.chunks_per_round * REPLAN)
    steps = processes * actions.shape[2]
    began = time.perf_counter()
    with ExitStack() as stack:
        full = FullStepping(actions)
        stack.callback(full.close)
        ours = Ours(processes, frame_offsets=FRAMES)
        stack.callback(ours.close)
        ours.reset(0)
        full.wait()
        print(f"started in {time.perf_counter() - began:.1f} s", flush=True)
        seconds: dict[str, list[float]] = {"ours": [], "full": []}
        for index in range(bench.rounds):
            if index:
                full.wait()  # until it is reset
            ours.reset(index)
            began = time.perf_counter()
            for chunk in actions[index].split(REPLAN, dim=1):
                ours.chunk(chunk)
            seconds["ours"].append(time.perf_counter() - began)
            seconds["full"].append(full.round())
            rates = ", ".join(f"{name} {steps / times[-1]:.1f}" for name, times in seconds.items())
            print(f"round {index + 1}/{bench.rounds}, env-steps/s: {rates}", flush=True)
    bench.note(**{f"{backend}_env_steps_per_s_{processes}p": steps / statistics.median(seconds["ours"])})
    bench.note(**{f"{backend}_full_env_steps_per_s_{processes}p": steps / statistics.median(seconds["full"])})
    bench.speedup(f"{backend}_speedup_{processes}p", seconds["ours"], seconds["full"])


def steps(bench: Bench) -> None:
    """A control step against the calls into MuJoCo that it makes."""
    bench.note(**alone(step_ratios_of_ours))


def step_ratios_of_ours() -> dict[str, float]:
    """Of a simulator as our processes hold it."""
    from libero_steps import step_ratios

    return step_ratios(make_sim())


def main() -> None:
    """Run all parts and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="chunks per side that are counted")
    parser.add_argument("--resets", type=int, default=4, help="resets per side that are counted")
    parser.add_argument("--quick", action="store_true", help="two rounds, one reset")
    parser.add_argument("--egl", action="store_true", help="render on the GPU")
    parser.add_argument(
        "--processes", type=int, help="compare with full stepping in so many processes, and nothing else"
    )
    parser.add_argument("--save", action="store_true", help="write results/libero_env.json")
    options = parser.parse_args()
    if not 1 <= options.rounds < MAX_STEPS // REPLAN or options.resets < 1:
        parser.error(
            f"an episode has {MAX_STEPS} steps: --rounds must lie in 1..{MAX_STEPS // REPLAN - 1}, --resets from 1"
        )
    if options.egl:
        os.environ["MUJOCO_GL"] = "egl"
    gl = check_gl()
    if not gl.ok:
        parser.error(f"{gl.check}: {gl.detail}")
    # What our processes are given is what TorchRL's simulator, in this process, reads as well.
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = choose_gl()
    bench = Bench(options)
    began = time.perf_counter()
    if options.processes:
        many_processes(bench, options.processes)
    else:
        for part in (one_process, two_processes, time_shares, steps):
            print(f"# {part.__doc__.strip()}", flush=True)
            part(bench)
    name = "libero_env_egl" if options.egl else "libero_env"
    machine = f"{processor()}; {gl.check}: {gl.detail}"
    minutes = round((time.perf_counter() - began) / 60, 1)
    finish(name, bench.figures, save=options.save, machine=machine, range=bench.spread, n=bench.n, minutes=minutes)


if __name__ == "__main__":
    main()
