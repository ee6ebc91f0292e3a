"""Where the time of a chunk goes: physics, rendering, controller, and Python around them."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from libero_sides import FRAMES, INIT_STATE, REPLAN, SETTLE, SUITE, TASK, TorchRL

from wamrl_torchrl.envs.libero_gl import render_threads, worker_environment
from wamrl_torchrl.envs.libero_suites import load_suite

if TYPE_CHECKING:
    from wamrl_torchrl.envs.libero_sim import LiberoSim

Result = TypeVar("Result")
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
    """Seconds per chunk of 10 actions in each of :data:`PARTS`; to be called in a fresh process, see :func:`alone`.

    Args:
        side: ``ours_frames`` and ``ours_no_frames``: what a simulator process of ours does; ``torchrl``: TorchRL's
            environment, tensordicts included.
        chunks: chunks to measure, after one that is not counted.
    """
    watch = Stopwatch()
    _watch(watch, ours=side != "torchrl")
    run_chunk = _their_chunk() if side == "torchrl" else _our_chunk(render=side == "ours_frames")
    generator, began = np.random.default_rng(0), 0.0
    for index in range(chunks + 1):
        if index == 1:
            watch.seconds.clear()
            began = time.perf_counter()
        run_chunk(generator.uniform(-1.0, 1.0, (REPLAN, 7)))
    seconds = {part: watch.seconds[part] / chunks for part in PARTS}
    return seconds | {"python": (time.perf_counter() - began) / chunks - sum(seconds.values())}


def alone(function: Callable[..., Result], *args: Any, like_ours: bool = True) -> Result:
    """Result of ``function(*args)``, run in a fresh process, since one holds one simulator, and is patched.

    Args:
        function: what to run.
        args: its arguments.
        like_ours: with the environment variables of our simulator processes.
    """
    environ = worker_environment(threads=render_threads(1)) if like_ours else {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_set_environment, initargs=(environ,)) as pool:
        return pool.submit(function, *args).result()


def _set_environment(environ: dict[str, str]) -> None:
    os.environ.update(environ)


def make_sim() -> LiberoSim:
    """The simulator of one of our processes, in this process, at the start of an episode."""
    from wamrl_torchrl.envs.libero_sim import LiberoSim  # starts OpenGL

    tasks = load_suite(SUITE)
    sim = LiberoSim(resize="render256")
    bddl_file, state = tasks.bddl_files[TASK], tasks.init_states[TASK][INIT_STATE]
    sim.reset(bddl_file=bddl_file, env_seed=0, state=state, settle_steps=SETTLE, resume=False)
    return sim


def _watch(watch: Stopwatch, *, ours: bool) -> None:
    """Time what MuJoCo does, and what computes the torques: our loop around a control step, or robosuite's robot."""
    import mujoco
    from robosuite.robots.single_arm import SingleArm

    from wamrl_torchrl.envs.libero_control import ControlLoop

    for name in ("mj_step", "mj_step1", "mj_step2", "mj_forward"):
        watch.wrap(mujoco, name, "physics")
    for name in ("mjv_updateScene", "mjr_render", "mjr_readPixels"):
        watch.wrap(mujoco, name, "render")
    if ours:
        watch.wrap(ControlLoop, "step", "controller")
    else:
        watch.wrap(SingleArm, "control", "controller")


def _our_chunk(*, render: bool) -> Callable[[np.ndarray], None]:
    sim = make_sim()
    image, sim_state = np.empty((3, 224, 448), np.uint8), np.empty(load_suite(SUITE).sim_state_dim)

    def run_chunk(actions: np.ndarray) -> None:
        for executed, action in enumerate(actions, 1):
            sim.step(action)
            sim.write_sim_state(sim_state)
            if render and executed in FRAMES:
                sim.write_image(image)

    return run_chunk


def _their_chunk() -> Callable[[np.ndarray], None]:
    theirs = TorchRL(1)
    theirs.reset(0)
    return lambda actions: theirs.chunk(torch.from_numpy(actions).float()[None])
