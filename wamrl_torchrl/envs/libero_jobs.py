"""Jobs for the simulators of an environment that are not steps of its slots: demonstrations, rendering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero_pool import Lost, SimPool
from wamrl_torchrl.envs.libero_suites import LiberoSuite

STORED_KEYS = (schema.TASK_ID, schema.ENV_SEED, schema.SIM_STATES)
RENDER_ROWS = 8  # frames that a simulator renders at a time: a few seconds of software rendering


class Job(NamedTuple):
    """A command that any simulator can carry out, and whose result does not depend on which."""

    task: int  # whose model it needs
    command: str
    what: str  # for messages
    arguments: dict[str, Any]


def run_jobs(pool: SimPool, jobs: Sequence[Job], slot_tasks: Tensor) -> Iterator[tuple[int, Any]]:
    """Run ``jobs`` on all slots, and yield the index and result of each as it is finished.

    A job is repeated if its simulator is lost. Another task takes a simulator seconds to compile, so a slot takes a job
    of its own task if there is one, else of a task that no other slot has.

    Args:
        pool: simulators without a command in progress.
        jobs: what is to be done.
        slot_tasks: int64 ``[N]``, task whose model each slot holds; kept up to date.
    """
    todo, running = list(range(len(jobs))), dict[int, int]()

    def submit(slot: int, index: int) -> None:
        job = jobs[index]
        running[slot] = index
        slot_tasks[slot] = job.task
        pool.submit(slot, job.command, job.what, **job.arguments)

    def submit_next(slot: int) -> None:
        held = slot_tasks.tolist()
        own = held.pop(slot)
        index = min(
            todo, key=lambda index: (jobs[index].task != own, jobs[index].task in held)
        )  # the first of the best
        todo.remove(index)
        submit(slot, index)

    for slot in range(min(len(slot_tasks), len(jobs))):
        submit_next(slot)
    try:
        while running:
            for slot in pool.wait(list(running), at_least=1):
                index, result = running.pop(slot), pool.take(slot)
                if isinstance(result, Lost):
                    submit(slot, index)
                    continue
                pool.forgive(slot)
                if todo:
                    submit_next(slot)
                yield index, result
    finally:  # also when the caller stops early: the slots must be free for the next call
        if pool.processes:
            for slot in pool.wait(list(running)):
                pool.take(slot)


# ---- rendering ------------------------------------------------------------------------------------------------------
def read_stored(episode: TensorDictBase, *, index: int, width: int) -> tuple[int, int, Tensor]:
    """Task, env seed and simulator states float64 ``[T,width]`` of an episode that is to be rendered.

    Raises:
        KeyError: one of them is missing; the message names the episode by ``index``.
        ValueError: the states have another shape or dtype.
    """
    missing = [key for key in STORED_KEYS if episode.get(key, None) is None]
    if missing:
        raise KeyError(f"episode {index} lacks {missing}, which rendering needs; it has {sorted(episode.keys())}")
    states = episode.get(schema.SIM_STATES).cpu()
    if states.ndim != 2 or states.dtype != torch.float64 or states.shape[1] != width or len(states) == 0:
        raise ValueError(
            f"{schema.SIM_STATES!r} of episode {index} must be float64 [T,{width}], rows as this environment "
            f"returns them, found {states.dtype} {list(states.shape)}; only they hold what the picture shows"
        )
    return int(episode.get(schema.TASK_ID)), int(episode.get(schema.ENV_SEED)), states


def render_jobs(suite: LiberoSuite, task: int, env_seed: int, states: Tensor) -> list[Job]:
    """Jobs that render ``states`` (float64 ``[T,D]``) in order, cut so that all slots can share in an episode."""
    start = {"bddl_file": suite.bddl_files[task], "env_seed": env_seed}
    what = f"render of {suite.name}, task_id {task}"
    return [Job(task, "render", what, {**start, "sim_states": rows.numpy()}) for rows in states.split(RENDER_ROWS)]
