"""Jobs on simulators, without simulators."""

from __future__ import annotations

import torch

from wamrl_torchrl.envs.libero_jobs import Job, run_jobs
from wamrl_torchrl.envs.libero_pool import Lost


class FakePool:
    """Finishes one command at a time, of the slot that has waited longest; loses those told to."""

    def __init__(self, slots: int, lose: tuple[int, ...] = ()) -> None:
        self.processes = list(range(slots))
        self.submitted: list[tuple[int, int]] = []  # slot, number of the job
        self._lose = list(lose)  # numbers of jobs, each lost once
        self._running: dict[int, int] = {}
        self._replies: dict[int, object] = {}

    def submit(self, slot, command, what, *, number):
        assert slot not in self._running
        assert (command, what) == ("count", f"job {number}")
        self.submitted.append((slot, number))
        self._running[slot] = number

    def wait(self, slots, *, at_least=None):
        finished = list(self._running)[: len(slots) if at_least is None else at_least]
        for slot in finished:
            number = self._running.pop(slot)
            self._replies[slot] = 10 * number
            if number in self._lose:
                self._lose.remove(number)
                self._replies[slot] = Lost("gone")
        return finished

    def take(self, slot):
        return self._replies.pop(slot)

    def forgive(self, slot):
        assert slot in self.processes

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._replies


def jobs(*tasks: int) -> list[Job]:
    return [Job(task, "count", f"job {number}", {"number": number}) for number, task in enumerate(tasks)]


def test_every_job_is_done_once():
    pool = FakePool(3)
    results = dict(run_jobs(pool, jobs(*[0] * 8), torch.full((3,), -1)))
    assert results == {number: 10 * number for number in range(8)}
    assert sorted(number for _, number in pool.submitted) == list(range(8))


def test_fewer_jobs_than_slots_and_none():
    pool = FakePool(3)
    assert dict(run_jobs(pool, jobs(4), torch.full((3,), -1))) == {0: 0}
    assert list(run_jobs(pool, [], torch.full((3,), -1))) == []


def test_a_slot_keeps_its_task_while_it_can():
    pool, held = FakePool(2), torch.tensor([7, -1])
    assert len(list(run_jobs(pool, jobs(5, 5, 5, 7, 7, 7), held))) == 6
    assert [number for slot, number in pool.submitted if slot == 0] == [3, 4, 5]
    assert [number for slot, number in pool.submitted if slot == 1] == [0, 1, 2]
    assert held.tolist() == [7, 5]


def test_slots_begin_with_different_tasks():
    pool = FakePool(3)
    list(run_jobs(pool, jobs(1, 1, 2, 2, 3), torch.full((3,), -1)))
    assert pool.submitted[:3] == [(0, 0), (1, 2), (2, 4)]


def test_a_lost_job_is_repeated():
    pool = FakePool(2, lose=(1, 3, 3))
    assert dict(run_jobs(pool, jobs(0, 0, 0, 0), torch.full((2,), 0))) == {0: 0, 1: 10, 2: 20, 3: 30}
    assert [number for _, number in pool.submitted].count(3) == 3


def test_a_caller_that_stops_early_leaves_the_slots_free():
    pool = FakePool(2)
    results = run_jobs(pool, jobs(0, 0, 0, 0, 0), torch.full((2,), 0))
    next(results)
    results.close()
    assert pool.is_idle
