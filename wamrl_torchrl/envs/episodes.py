"""Who runs what: a plan of episode groups, dealt to whichever environment slot is free, in any number of workers."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from wamrl_torchrl import schema

_CAPACITY = 1 << 16
_MAX_WORKERS, _MAX_SLOTS = 256, 4096
_NO_TASK = -1
# Places in the table of counters.
_RELEASED, _GROUPS, _CLOSED, _FIRST_OPEN, _WORKERS = range(5)


def match_episodes(tasks: Tensor, held: Tensor, working: Tensor) -> Tensor:
    """Match slots that are free together with open episodes, so that slots rarely change their task.

    First every slot is given an episode of the task it holds. Each of the others then turns to the task with the most
    open episodes per slot, itself included (D'Hondt's method); on a tie, to the one whose next episode is the oldest.
    Inside a task episodes go in the order of their release, to slots in their own order.

    Args:
        tasks: task of each open episode in the order of release, int64 [E].
        held: task that each free slot holds, int64 [M]; -1 for none.
        working: tasks that all slots hold, the free ones among them, int64 [S].

    Returns:
        the row of ``tasks`` that each free slot is given, int64 [M]; -1 where nothing is left.
    """
    by_task = tasks.argsort(stable=True)
    task, count = tasks.unique(return_counts=True)
    start = count.cumsum(0) - count
    rows = torch.full_like(held, -1)
    holds = held[:, None] == task
    rank = holds.cumsum(0) - 1
    stays = holds & (rank < count)
    slot, column = stays.nonzero(as_tuple=True)
    rows[slot] = by_task[start[column] + rank[slot, column]]
    given = stays.sum(0)
    workers = (working[:, None] == task).sum(0)
    # A loop over the few slots that change their task: each choice alters the next one's shares.
    for slot in (rows < 0).nonzero().squeeze(-1).tolist():
        left = count - given
        if not bool(left.any()):
            break
        share = left / (workers + 1)
        best = (share == share.max()).nonzero().squeeze(-1)
        following = by_task[(start + given)[best]]
        chosen = best[following.argmin()]
        rows[slot] = following.min()
        given[chosen] += 1
        workers[chosen] += 1
    return rows


class EpisodePlan:
    """The episodes that may be run now, in memory-mapped tables that all worker processes share.

    The learner releases groups after it has pushed weights; every free slot of every worker claims the next episode
    that fits it (:func:`match_episodes`), and parks when nothing is left. So an iteration runs exactly its own
    episodes, under one set of weights, no short episode is preferred over a long one, and groups complete whatever the
    number of workers and slots.

    A claim is atomic: it is made under a lock on a file of the directory, which the system releases when a process
    dies. What that process had claimed stays claimed, since nobody can know how far it got; :meth:`requeue` opens an
    episode again. Only one process, the learner, may release and re-queue.

    Args:
        directory: where the tables live, on a local disk; a temporary directory if None, removed by :meth:`close`.

    Keyword Args:
        max_attempts: how often the same episode may be lost before :meth:`requeue` gives up.
    """

    def __init__(self, directory: str | Path | None = None, *, max_attempts: int = 3) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, got {max_attempts}")
        self.max_attempts = max_attempts
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="wamrl-plan-")) if directory is None else Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._table = self._map("episodes", (_CAPACITY, len(schema.EPISODE_KEYS)))
        self._claimed = self._map("claimed", (_CAPACITY,), torch.bool)
        self._slot_tasks = self._map("slot_tasks", (_MAX_WORKERS, _MAX_SLOTS))
        self._slot_tasks.fill_(_NO_TASK)
        # Episodes and groups released, whether the plan is closed, an episode before which all are claimed, workers.
        self._counters = self._map("counters", (5,))
        self._lost: Counter[int] = Counter()

    def _map(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        return MemoryMappedTensor.zeros(shape, dtype=dtype, filename=self.directory / f"{name}.memmap")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # Opened anew each time: a forked process would share the lock of a file that it inherits.
        try:
            file = (self.directory / "lock").open("a")
        except FileNotFoundError:
            raise RuntimeError(f"the episode plan at {self.directory} is closed: its directory is gone") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield  # closing the file releases the lock

    @property
    def released(self) -> int:
        """Episodes released so far."""
        return int(self._counters[_RELEASED])

    @property
    def unclaimed(self) -> int:
        """Released episodes that no slot has taken yet."""
        return len(self._open_episodes())

    def _open_episodes(self) -> Tensor:
        episodes = torch.arange(int(self._counters[_FIRST_OPEN]), self.released)
        return episodes[~self._claimed[episodes % _CAPACITY]]

    # ---- the learner --------------------------------------------------------------------------------------------
    def release(self, groups: Tensor, group_size: int) -> Tensor:
        """Release ``group_size`` episodes for each of ``groups``, int64 [M,3]: task, init state, env seed.

        Returns:
            the episodes int64 [M*group_size,5], columns :data:`wamrl_torchrl.schema.EPISODE_KEYS`.

        Raises:
            ValueError: groups of another shape, or more unclaimed episodes than the table holds.
        """
        if groups.ndim != 2 or groups.shape[1] != 3 or group_size < 1:
            raise ValueError(f"groups must be [M,3] and group_size positive, got {tuple(groups.shape)}, {group_size}")
        count = len(groups) * group_size
        with self._lock():
            first, first_group = self.released, int(self._counters[_GROUPS])
            waiting = first - int(self._counters[_FIRST_OPEN])
            if count > _CAPACITY - waiting:
                raise ValueError(f"cannot release {count} episodes: the plan holds {_CAPACITY}, {waiting} are waiting")
            group_id = first_group + torch.arange(len(groups))
            episode_id = first + torch.arange(count)
            episodes = torch.cat((groups, group_id[:, None]), 1).repeat_interleave(group_size, 0)
            episodes = torch.cat((episodes, episode_id[:, None]), 1)
            self._table[episode_id % _CAPACITY] = episodes
            self._claimed[episode_id % _CAPACITY] = False
            # The counter moves last: what it covers is complete.
            self._counters[_GROUPS] = first_group + len(groups)
            self._counters[_RELEASED] = first + count
        return episodes

    def requeue(self, episode_ids: Tensor) -> None:
        """Release lost episodes once more, each under the same five ids.

        Args:
            episode_ids: int64 [M], episodes that were claimed.

        Raises:
            ValueError: an episode that waits to be claimed, was not released, or was released too long ago.
            RuntimeError: an episode was lost ``max_attempts`` times.
        """
        with self._lock():
            known = (episode_ids >= max(0, self.released - _CAPACITY)) & (episode_ids < self.released)
            if not bool((known & self._claimed[episode_ids % _CAPACITY]).all()):
                raise ValueError(f"only claimed episodes can be re-queued, got {episode_ids.tolist()}")
            self._lost.update(episode_ids.tolist())
            given_up = [episode for episode in episode_ids.tolist() if self._lost[episode] >= self.max_attempts]
            if given_up:
                rows = self._table[torch.tensor(given_up) % _CAPACITY].tolist()
                named = "; ".join(describe_episode(row) for row in rows)
                raise RuntimeError(f"lost in each of {self.max_attempts} attempts: {named}")
            self._claimed[episode_ids % _CAPACITY] = False
            first = min([int(self._counters[_FIRST_OPEN]), *episode_ids.tolist()])
            self._counters[_FIRST_OPEN] = first

    # ---- the workers --------------------------------------------------------------------------------------------
    def claim(self, free: Tensor, slot_tasks: Tensor, *, worker: int = 0) -> Tensor:
        """Claim an episode for each free slot of a worker.

        Args:
            free: bool [N], the slots that want an episode.
            slot_tasks: int64 [N], the task that each slot holds, -1 for none.

        Keyword Args:
            worker: index of the worker that asks.

        Returns:
            episodes int64 [N,5], columns :data:`wamrl_torchrl.schema.EPISODE_KEYS`; all
            :data:`wamrl_torchrl.schema.PARKED` in slots that are not free or for which nothing is left.

        Raises:
            ValueError: more slots or workers than the plan keeps account of.
            RuntimeError: the plan is closed.
        """
        count = len(free)
        if count > _MAX_SLOTS or not 0 <= worker < _MAX_WORKERS:
            raise ValueError(
                f"a plan deals to at most {_MAX_WORKERS} workers of {_MAX_SLOTS} slots, got worker {worker} of {count}"
            )
        if self.closed:
            raise RuntimeError("the episode plan is closed: the run has ended and no episode will come")
        dealt = torch.full((count, len(schema.EPISODE_KEYS)), schema.PARKED, dtype=torch.int64)
        slots = free.nonzero().squeeze(-1)
        # Idle slots ask again and again: without a lock as long as nothing is open.
        if not len(slots) or int(self._counters[_FIRST_OPEN]) == self.released:
            return dealt
        with self._lock():
            tasks = self._slot_tasks[worker, :count]
            tasks.copy_(slot_tasks)
            workers = max(int(self._counters[_WORKERS]), worker + 1)
            self._counters[_WORKERS] = workers
            waiting = self._open_episodes()
            working = self._slot_tasks[:workers].flatten()
            rows = match_episodes(self._table[waiting % _CAPACITY, 0], slot_tasks[slots], working[working != _NO_TASK])
            slots, rows = slots[rows >= 0], rows[rows >= 0]
            dealt[slots] = self._table[waiting[rows] % _CAPACITY]
            tasks[slots] = dealt[slots, 0]
            self._claimed[waiting[rows] % _CAPACITY] = True
            waiting = self._open_episodes()
            self._counters[_FIRST_OPEN] = int(waiting[0]) if len(waiting) else self.released
        return dealt

    # ---- life ---------------------------------------------------------------------------------------------------
    @property
    def closed(self) -> bool:
        """Whether the learner has ended the run; idle workers then stop."""
        return bool(self._counters[_CLOSED])

    def close(self) -> None:
        """End the run, and remove temporary tables."""
        self._counters[_CLOSED] = 1
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Counters, so that a resumed run goes on numbering where it stopped."""
        return {"counters": self._counters[[_RELEASED, _GROUPS]].clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`state_dict`; nothing is released by it."""
        with self._lock():
            self._counters[[_RELEASED, _GROUPS]] = state["counters"]
            self._counters[_FIRST_OPEN] = self._counters[_RELEASED]


def describe_episode(ids: Sequence[int]) -> str:
    """Text of an episode's five ids, for messages."""
    return ", ".join(f"{key} {value}" for key, value in zip(schema.EPISODE_KEYS, ids, strict=True))


class DealEpisodes(Transform):
    """Gives every slot of a :class:`wamrl_torchrl.envs.ChunkEnv` that is reset an episode of a plan, or parks it.

    All slots that are reset together are dealt together; a slot that is still starting its episode
    (:attr:`wamrl_torchrl.envs.ChunkEnv.pending`) is left to it, unless the whole environment is reset. With one worker
    the same resets are dealt the same episodes; with several, which worker runs an episode depends on who is free.

    Args:
        plan: the plan.

    Keyword Args:
        worker: index of this worker among those that share the plan, from 0.

    Raises:
        RuntimeError: at a reset after the plan was closed.
    """

    def __init__(self, plan: EpisodePlan, *, worker: int = 0) -> None:
        if not 0 <= worker < _MAX_WORKERS:
            raise ValueError(f"worker must lie in 0..{_MAX_WORKERS - 1}, got {worker}")
        super().__init__(in_keys=[], out_keys=[])
        self.plan = plan
        self.worker = worker

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Nothing to do on data."""
        return tensordict

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        env = self.parent
        shape = env.batch_size
        if tensordict is None:
            tensordict = TensorDict(batch_size=shape)
        mask = tensordict.get("_reset", None)
        free = torch.ones(shape, dtype=torch.bool) if mask is None else mask.reshape(shape) & ~env.pending
        episodes = self.plan.claim(free, env.slot_tasks, worker=self.worker)
        for column, key in enumerate(schema.EPISODE_KEYS):
            tensordict.set(key, episodes[:, column : column + 1])
        return tensordict
