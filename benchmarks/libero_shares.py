"""Where the time of a chunk goes: physics, rendering, controller, and Python around them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
from libero_sides import FRAMES, INIT_STATE, REPLAN, SETTLE, SUITE, TASK, TorchRL

from wamrl_torchrl.envs.libero_suites import load_suite, worker_environment

PARTS = ("physics", "render", "controller", "python")
SIDES = ("ours_frames", "ours_no_frames", "torchrl")


class Stopwatch:
    """Time spent in functions, without that in other timed functions that they call."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner: list[float] = []

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time the function ``owner.name`` from now on, as ``part``."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                self.seconds[part] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        setattr(owner, name, timed)


def shares(side: str, chunks: int) -> dict[str, float]:
    """Seconds per chunk of 10 actions in each of :data:`PARTS`, measured in a process of its own.

    Args:
        side: ``ours_frames`` and ``ours_no_frames``: what a simulator process of ours does; ``torchrl``: TorchRL's
            environment, tensordicts included.
        chunks: chunks to measure, after one that is not counted.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, side, chunks).result()


def _measure(side: str, chunks: int) -> dict[str, float]:
    if side != "torchrl":
        os.environ.update(worker_environment())
    watch = Stopwatch()
    _watch_all(watch)
    if side == "torchrl":
        theirs = TorchRL(1)
        theirs.reset(0)
        run_chunk = lambda actions: theirs.chunk(torch.from_numpy(actions).float()[None])  # noqa: E731
    else:
        run_chunk = _our_chunk(render=side == "ours_frames")
    generator, began = np.random.default_rng(0), 0.0
    for index in range(chunks + 1):
        if index == 1:
            watch.seconds.clear()
            began = time.perf_counter()
        run_chunk(generator.uniform(-1.0, 1.0, (REPLAN, 7)))
    seconds = {part: watch.seconds[part] / chunks for part in PARTS}
    return seconds | {"python": (time.perf_counter() - began) / chunks - sum(seconds.values())}


def _watch_all(watch: Stopwatch) -> None:
    import mujoco
    from robosuite.robots.single_arm import SingleArm

    for name in ("mj_step", "mj_step1", "mj_step2", "mj_forward"):
        watch.wrap(mujoco, name, "physics")
    for name in ("mjv_updateScene", "mjr_render", "mjr_readPixels"):
        watch.wrap(mujoco, name, "render")
    watch.wrap(SingleArm, "control", "controller")


def _our_chunk(*, render: bool) -> Any:
    from wamrl_torchrl.envs.libero_sim import LiberoSim

    tasks = load_suite(SUITE)
    sim = LiberoSim(resize="render256")
    state, image = tasks.init_states[TASK][INIT_STATE], np.empty((3, 224, 448), np.uint8)
    sim_state = np.empty(tasks.sim_state_dim)
    bddl_file = tasks.bddl_files[TASK]
    sim.reset(bddl_file=bddl_file, env_seed=0, state=state, settle_steps=SETTLE, resume=False)

    def run_chunk(actions: np.ndarray) -> None:
        for executed, action in enumerate(actions, 1):
            sim.step(action)
            sim.write_sim_state(sim_state)
            if render and executed in FRAMES:
                sim.write_image(image)

    return run_chunk
