"""Decisions of successful episodes, kept to be imitated again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer

from wamrl_torchrl import schema
from wamrl_torchrl.data.rows import take_rows


def successful_rows(rollout: TensorDictBase) -> Tensor:
    """Bool [M]: decisions of whole episodes [M] that ended in success."""
    ids = rollout.get(schema.EPISODE_ID).squeeze(-1)
    return torch.isin(ids, ids[rollout.get(("next", schema.SUCCESS)).squeeze(-1)])


def decisions_to_end(rollout: TensorDictBase) -> Tensor:
    """Int64 [M]: how many decisions follow each one of whole episodes [M] that lie one after the other."""
    last = rollout.get(("next", "done")).squeeze(-1).nonzero().squeeze(-1)
    rows = torch.arange(len(rollout), device=last.device)
    return last[torch.searchsorted(last, rows)] - rows


def shuffle_outcomes(rollout: TensorDictBase) -> TensorDictBase:
    """The ids of whole episodes [M] with their outcomes exchanged at random."""
    last = rollout.get(("next", "done")).squeeze(-1).nonzero().squeeze(-1)
    outcome = rollout.get(("next", schema.SUCCESS)).clone()
    outcome[last] = outcome[last[torch.randperm(len(last))]]
    return rollout.select(schema.EPISODE_ID).set(("next", schema.SUCCESS), outcome)


class SuccessReplay:
    """The newest decisions of successful episodes, in a TorchRL replay buffer (self-imitation, arXiv 1806.05635).

    Groups in which every episode succeeded teach flow-PPO nothing and are dropped there; here they count. As a weighted
    flow loss reads it, the last decision of an episode has an advantage of 1, and each one before it ``discount`` times
    that of its successor. A checkpoint component with ``dump`` and ``load``.

    Args:
        capacity: decisions kept.

    Keyword Args:
        batch_size: decisions of a sample.
        keys: keys that are kept.
        discount: per decision.
    """

    def __init__(self, capacity: int, *, batch_size: int, keys: Sequence[NestedKey], discount: float = 1.0) -> None:
        self.capacity = capacity
        self.keys = tuple(keys)
        self.discount = discount
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity), sampler=RandomSampler(), batch_size=batch_size
        )

    def __len__(self) -> int:
        return len(self.buffer)

    def add(self, rollout: TensorDictBase, *, shuffled: bool = False) -> None:
        """Add the successful episodes of a rollout of whole episodes [M].

        Keyword Args:
            shuffled: exchange the outcomes of episodes at random first (a control).
        """
        rows = successful_rows(shuffle_outcomes(rollout) if shuffled else rollout)
        rows = rows.nonzero().squeeze(-1)[-self.capacity :]
        if len(rows):
            kept = take_rows(rollout.select(*self.keys), rows)
            weight = self.discount ** decisions_to_end(rollout)[rows].float()
            self.buffer.extend(kept.set(schema.ADVANTAGE, weight.unsqueeze(-1)))

    def sample(self) -> TensorDictBase:
        """A batch of decisions, drawn with replacement by the default generator."""
        return self.buffer.sample().select(*self.keys, schema.ADVANTAGE)

    def dump(self, path: Path) -> None:
        """Write the decisions below ``path``."""
        if len(self):
            self.buffer.dumps(path / "successes")

    def load(self, path: Path) -> None:
        """Restore what :meth:`dump` wrote."""
        if (path / "successes").exists():
            self.buffer.loads(path / "successes")
