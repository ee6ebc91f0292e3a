"""Who runs what: a plan of episode groups, dealt to environment slots in any number of collector workers."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from wamrl_torchrl import schema

_CAPACITY = 1 << 16


class EpisodePlan:
    """The episodes that may be run now, in a memory-mapped table that every worker process reads.

    The learner releases groups after it has pushed weights; workers take what is released and park their slots when
    nothing is left. So an iteration runs exactly its own episodes, under one set of weights, and no short episode is
    preferred over a long one. There is one writer and nothing to lock.

    Args:
        directory: where the table lives; a temporary directory if None, removed by :meth:`close`.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="wamrl-plan-")) if directory is None else Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        shape = (_CAPACITY, len(schema.EPISODE_KEYS))
        self._table = MemoryMappedTensor.zeros(shape, dtype=torch.int64, filename=self.directory / "episodes.memmap")
        # [episodes released, groups released, closed]
        self._counters = MemoryMappedTensor.zeros((3,), dtype=torch.int64, filename=self.directory / "counters.memmap")

    @property
    def released(self) -> int:
        """Episodes released so far."""
        return int(self._counters[0])

    def release(self, groups: Tensor, group_size: int) -> Tensor:
        """Release ``group_size`` episodes for each of ``groups``, int64 [M,3]: task, init state, env seed.

        Returns:
            the episodes int64 [M*group_size,5], columns :data:`wamrl_torchrl.schema.EPISODE_KEYS`.

        Raises:
            ValueError: groups of another shape, or more episodes at once than the table holds.
        """
        if groups.ndim != 2 or groups.shape[1] != 3 or group_size < 1:
            raise ValueError(f"groups must be [M,3] and group_size positive, got {tuple(groups.shape)}, {group_size}")
        count = len(groups) * group_size
        if count > _CAPACITY:
            raise ValueError(f"cannot release {count} episodes at once, the plan holds {_CAPACITY}")
        first, first_group = int(self._counters[0]), int(self._counters[1])
        group_id = first_group + torch.arange(len(groups))
        episode_id = first + torch.arange(count)
        episodes = torch.cat((groups, group_id[:, None]), 1).repeat_interleave(group_size, 0)
        episodes = torch.cat((episodes, episode_id[:, None]), 1)
        self._table[episode_id % _CAPACITY] = episodes
        # The counter moves last: what it covers is complete.
        self._counters[1] = first_group + len(groups)
        self._counters[0] = first + count
        return episodes

    def episode(self, index: int) -> Tensor | None:
        """Episode number ``index`` int64 [5], or None while it is not released."""
        return self._table[index % _CAPACITY].clone() if index < self.released else None

    @property
    def closed(self) -> bool:
        """Whether the learner has ended the run; idle workers then stop."""
        return bool(self._counters[2])

    def close(self) -> None:
        """End the run, and remove a temporary table."""
        self._counters[2] = 1
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Counters, so that a resumed run goes on numbering where it stopped."""
        return {"counters": self._counters[:2].clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`state_dict`; nothing is released by it."""
        self._counters[:2] = state["counters"]


class DealEpisodes(Transform):
    """Gives every slot that is reset its next episode from a plan, and parks it when there is none.

    Worker ``w`` of ``W`` runs the episodes ``w, w + W, ...`` of the plan in order, so which worker runs an episode, and
    which noise it sees, does not depend on timing.

    Args:
        plan: the plan.

    Keyword Args:
        worker: index of this worker.
        num_workers: workers that share the plan.

    Raises:
        RuntimeError: at a reset after the plan was closed.
    """

    def __init__(self, plan: EpisodePlan, *, worker: int = 0, num_workers: int = 1) -> None:
        if not 0 <= worker < num_workers:
            raise ValueError(f"worker must lie in 0..{num_workers - 1}, got {worker}")
        super().__init__(in_keys=[], out_keys=[])
        self.plan = plan
        self.worker = worker
        self.num_workers = num_workers
        # What was released before belongs to an earlier run.
        self._next = plan.released + (worker - plan.released) % num_workers

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Nothing to do on data."""
        return tensordict

    def _deal(self) -> Tensor:
        episode = self.plan.episode(self._next)
        if episode is None:
            return torch.full((len(schema.EPISODE_KEYS),), schema.PARKED, dtype=torch.int64)
        self._next += self.num_workers
        return episode

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if self.plan.closed:
            raise RuntimeError("the episode plan is closed: the run has ended and no episode will come")
        shape = self.parent.batch_size
        if tensordict is None:
            tensordict = TensorDict(batch_size=shape)
        mask = tensordict.get("_reset", None)
        mask = torch.ones(*shape, dtype=torch.bool) if mask is None else mask.reshape(shape)
        # Slots that are not reset keep whatever they carry; the environment reads the others only.
        episodes = torch.full((*shape, len(schema.EPISODE_KEYS)), schema.PARKED, dtype=torch.int64)
        # A loop over the few slots that are reset: each takes the next episode of one shared order.
        for slot in mask.nonzero().tolist():
            episodes[tuple(slot)] = self._deal()
        for column, key in enumerate(schema.EPISODE_KEYS):
            tensordict.set(key, episodes[..., column : column + 1])
        return tensordict
