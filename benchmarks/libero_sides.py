"""What the LIBERO benchmarks compare: this package's environment, TorchRL's, and the simulator stepped in full.

All run task 0 of libero_spatial from its init state 0, render both cameras at 256, and are given the same actions.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.envs import LiberoWrapper, ParallelEnv, step_mdp

from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_gl import render_threads, worker_environment
from wamrl_torchrl.envs.libero_suites import load_suite

SUITE, TASK, INIT_STATE = "libero_spatial", 0, 0
CAMERAS = ("agentview", "robot0_eye_in_hand")
RENDER_SIZE = 256
REPLAN = 10  # actions executed per chunk
SETTLE = 10  # no-op actions after a reset
FRAMES = (4, 8, REPLAN)  # executed actions after which our environment returns a frame
MAX_STEPS = 512  # TorchRL's default
NO_OP = [0.0] * 6 + [-1.0]
GATE_S = 300.0  # a process that is late by so much has died


class Side(Protocol):
    """Something that runs chunks of actions in a number of processes."""

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed`` in every process."""

    def chunk(self, actions: Tensor) -> None:
        """Execute ``actions`` float32 ``[N,10,7]``."""

    def position(self) -> Tensor:
        """End-effector position float32 ``[N,3]``, in m."""

    def close(self) -> None:
        """End."""


class Ours:
    """``wamrl_torchrl.envs.LiberoEnv``.

    Args:
        processes: simulator processes.
        options: further options of the environment, above all which frames it renders.
    """

    def __init__(self, processes: int, **options: Any) -> None:
        common = {"replan_steps": REPLAN, "settle_steps": SETTLE, "max_episode_steps": MAX_STEPS}
        self.env = LiberoEnv(SUITE, processes, task_ids=[TASK], **{**common, **options})
        self._episode = 0

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed`` in every slot."""
        self._episode += 1  # what carries a new id is another episode, also with everything else the same
        ids = (TASK, INIT_STATE, seed, self._episode, self._episode)
        shape = (self.env.num_envs, 1)
        asked = {key: torch.full(shape, value) for key, value in zip(schema.EPISODE_KEYS, ids, strict=True)}
        self._now = self.env.reset(TensorDict(asked, batch_size=self.env.batch_size))

    def chunk(self, actions: Tensor) -> None:
        """One step of the environment."""
        chunk = torch.zeros(self.env.num_envs, schema.CHUNK, schema.ACTION_DIM)
        chunk[:, : actions.shape[1]] = actions
        self._now = step_mdp(self.env.step(self._now.set(schema.ACTION, chunk)))

    def position(self) -> Tensor:
        """From the observation."""
        return self._now["observation", "state"][:, :3]

    def close(self) -> None:
        """End the processes."""
        self.env.close()


def make_torchrl() -> LiberoWrapper:
    """What ``torchrl.envs.LiberoEnv("libero_spatial", 0, wrist_camera=...)`` makes.

    Its own constructor looks for files where another provider of LIBERO has them; everything after it is the same.
    """
    tasks = load_suite(SUITE)
    return LiberoWrapper(
        make_full(),
        instruction=tasks.instructions[TASK],
        init_states=tasks.init_states[TASK],
        init_state_mode="fixed",
        init_state_id=INIT_STATE,
        camera=CAMERAS[0],
        wrist_camera=CAMERAS[1],
        settle_steps=SETTLE,
        max_episode_steps=MAX_STEPS,
    )


def make_full() -> Any:
    """LIBERO's own environment, which renders both cameras in every step."""
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv  # starts OpenGL

    return OffScreenRenderEnv(
        bddl_file_name=load_suite(SUITE).bddl_files[TASK],
        camera_names=list(CAMERAS),
        camera_heights=RENDER_SIZE,
        camera_widths=RENDER_SIZE,
    )


class TorchRL:
    """``torchrl.envs.LiberoEnv``: in this process, or in a ``ParallelEnv`` of several."""

    def __init__(self, processes: int) -> None:
        self._alone = processes == 1
        if self._alone:
            self.env = make_torchrl()
        else:  # the arguments are those of LiberoEnv(..., num_workers=processes)
            self.env = ParallelEnv(processes, [make_torchrl] * processes, metadata_from_workers=True)

    def reset(self, seed: int) -> None:
        """Start the episode of ``seed`` in every process."""
        self.env.set_seed(seed, static_seed=True)
        self._now = self.env.reset()

    def chunk(self, actions: Tensor) -> None:
        """One step of the environment per action."""
        for action in actions.unbind(1):
            self._now.set(schema.ACTION, action[0] if self._alone else action)
            self._now = step_mdp(self.env.step(self._now))

    def position(self) -> Tensor:
        """From the observation."""
        return self._now["observation", "state"].reshape(-1, 9)[:, :3]

    def close(self) -> None:
        """End the simulator and its processes."""
        self.env.close()


class FullStepping:
    """LIBERO's own environment in N plain processes: both cameras in every step, no tensordicts, no messages.

    The processes run a round, all of them at once, when :meth:`round` is called. They are started by the constructor
    and are ready after :meth:`wait`, so that another side can be started meanwhile.

    Args:
        actions: float32 ``[rounds,N,steps,7]``; a round starts from the episode of seed = its number.
    """

    def __init__(self, actions: Tensor) -> None:
        context = multiprocessing.get_context("spawn")
        self._gate = context.Barrier(actions.shape[1] + 1)
        of_process = actions.double().unbind(1)
        self._processes = [
            context.Process(target=_step_in_full, args=(self._gate, rows.numpy()), daemon=True) for rows in of_process
        ]
        before = dict(os.environ)
        os.environ.update(worker_environment(threads=render_threads(actions.shape[1])))  # as ours
        try:
            for process in self._processes:
                process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def wait(self) -> None:
        """Wait until every process stands at the start of a round."""
        try:
            self._gate.wait(GATE_S)
        except threading.BrokenBarrierError as error:
            codes = [process.exitcode for process in self._processes]
            raise RuntimeError(f"a process of full stepping failed; exit codes {codes} (None: running)") from error

    def round(self) -> float:
        """Run a round; its seconds, until the last process is through."""
        self.wait()
        began = time.perf_counter()
        self.wait()
        return time.perf_counter() - began

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


def _step_in_full(gate: Barrier, actions: np.ndarray) -> None:
    """A process of full stepping: its rounds, float64 ``[rounds,steps,7]``."""
    try:
        env = make_full()
        for seed, chunk in enumerate(actions):
            env.seed(seed)
            env.reset()
            env.set_init_state(load_suite(SUITE).init_states[TASK][INIT_STATE])
            for action in [NO_OP] * SETTLE:
                env.step(action)
            gate.wait(GATE_S)  # all are ready
            gate.wait(GATE_S)  # the clock runs
            for action in chunk:
                env.step(action)
            gate.wait(GATE_S)
    except BaseException:
        gate.abort()  # the others, and the parent, need not wait
        raise
    env.close()


# ---- memory ---------------------------------------------------------------------------------------------------------
@contextmanager
def new_processes() -> Iterator[list[psutil.Process]]:
    """Collects the processes that are started inside and hold a simulator, i.e. are no helpers of multiprocessing."""
    me = psutil.Process()
    before, started = set(me.children(recursive=True)), []
    yield started
    children = (child for child in me.children(recursive=True) if child not in before)
    started += [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def resident_mb(process: psutil.Process) -> float:
    """Resident memory in MB."""
    return process.memory_info().rss / 1e6


def peak_resident_mb(process: psutil.Process) -> float:
    """Largest resident memory so far, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6
