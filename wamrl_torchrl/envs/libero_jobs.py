"""Jobs for the simulators of an environment that are not steps of its slots: demonstrations, rendering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from wamrl_torchrl.envs.libero_pool import Lost, SimPool


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
