"""Group-relative advantages of whole episodes, and the weights with which tasks are dealt."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from wamrl_torchrl import schema
from wamrl_torchrl.data.rows import take_rows


class GroupReport(NamedTuple):
    """What the last call saw and kept; for logs."""

    groups: int
    kept: int
    episodes: int
    successes: int
    task_success: dict[int, tuple[int, int]]  # task id: (successes, episodes)
    return_std: float


class GroupAdvantage(Transform):
    r"""Returns and group advantages, when whole episodes are written to a replay buffer (or by ``transform.inv``).

    The return of an episode is

    .. math:: R = w_{task} [success] + w_{rec} \, mean_t \tilde r_t

    with the mean over the decisions that have a reconstruction reward (a mean, as a sum of negative terms would reward
    short episodes). The advantage is ``R`` minus the mean of its group, the same for every decision of the episode,
    optionally over the group's standard deviation. Groups share task, init state and env seed.

    A group in which all or no episodes succeeded is dropped: judged on success, never on the return, since a dense
    reward differs inside every group and would turn noise into advantages. Episodes of groups that are not complete yet
    are kept back until they are; an episode whose simulator was lost (``("next", "invalid")``) is left out, and its
    group waits for another attempt of it. If nothing is left to write, ``None`` is returned, which a replay buffer
    takes as "nothing to extend".

    Args:
        group_size: episodes of a group, at least 2.

    Keyword Args:
        weight_task: weight of success.
        weight_rec: weight of the reconstruction reward; 0 needs no such reward.
        normalize: divide by the group's standard deviation (unbiased).
        drop_degenerate: drop groups that agree in success.
        success_momentum: share that the running success of a task keeps per group (for :meth:`task_weights`).

    Raises:
        ValueError: ``group_size`` below 2, a group with mixed initial conditions, or an incomplete episode.
    """

    def __init__(
        self,
        group_size: int,
        *,
        weight_task: float = 1.0,
        weight_rec: float = 0.1,
        normalize: bool = False,
        drop_degenerate: bool = True,
        success_momentum: float = 0.9,
    ) -> None:
        if group_size < 2:
            raise ValueError(f"group_size must be at least 2 (an advantage compares episodes), got {group_size}")
        super().__init__(in_keys=[], out_keys=[])
        self.group_size = group_size
        self.weight_task = weight_task
        self.weight_rec = weight_rec
        self.normalize = normalize
        self.drop_degenerate = drop_degenerate
        self.success_momentum = success_momentum
        self.report: GroupReport | None = None
        self._pending: TensorDictBase | None = None
        self._success: dict[int, float] = {}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave sampled batches alone: advantages are computed once, on writing."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        tensordict = _without_invalid(tensordict)
        if self._pending is not None:
            tensordict = torch.cat([self._pending, tensordict])
        done = tensordict.get(("next", "done")).squeeze(-1)
        episode, row_episode = tensordict.get(schema.EPISODE_ID).squeeze(-1).unique(return_inverse=True)
        count = len(episode)
        ended = torch.zeros(count, dtype=torch.int64).index_add_(0, row_episode, done.long())
        if bool((ended != 1).any()):
            bad = episode[ended != 1].tolist()
            raise ValueError(f"advantages need whole episodes; episodes {bad} do not end exactly once in the batch")
        # One row per episode: its last.
        last = torch.zeros(count, dtype=torch.int64)
        last[row_episode[done]] = done.nonzero().squeeze(-1)
        summary = tensordict.select(*schema.EPISODE_KEYS, ("next", schema.SUCCESS))[last]
        success = summary.get(("next", schema.SUCCESS)).squeeze(-1)
        returns = self._returns(tensordict, row_episode, success)

        group, episode_group = summary.get(schema.GROUP_ID).squeeze(-1).unique(return_inverse=True)
        self._check_groups(summary, group, episode_group)
        size = torch.bincount(episode_group, minlength=len(group))
        if bool((size > self.group_size).any()):
            over = group[size > self.group_size].tolist()
            raise ValueError(f"groups {over} have more than group_size={self.group_size} episodes")
        complete = (size == self.group_size)[episode_group]
        waiting = ~complete[row_episode]
        self._pending = take_rows(tensordict, waiting) if bool(waiting.any()) else None

        wins = torch.zeros(len(group), dtype=torch.int64).index_add_(0, episode_group, success.long())
        mixed = (wins > 0) & (wins < self.group_size)
        kept = (size == self.group_size) & (mixed | torch.tensor(not self.drop_degenerate))
        advantages, group_std = self._advantages(returns, episode_group, len(group))
        self._note(summary, episode_group, size, kept, success, group_std)

        tensordict = tensordict.set(schema.RETURN, returns[row_episode, None])
        tensordict = tensordict.set(schema.ADVANTAGE, advantages[row_episode, None])
        rows = kept[episode_group][row_episode]
        return take_rows(tensordict, rows) if bool(rows.any()) else None

    def _returns(self, tensordict: TensorDictBase, row_episode: Tensor, success: Tensor) -> Tensor:
        returns = self.weight_task * success.float()
        if not self.weight_rec:
            return returns
        if tensordict.get(schema.REWARD_REC, None) is None:
            raise ValueError(
                f"weight_rec={self.weight_rec} needs {schema.REWARD_REC!r}: append ReconstructionReward after this "
                "transform (inverse transforms run last to first), or set weight_rec=0"
            )
        mask = tensordict.get(schema.REWARD_REC_MASK).squeeze(-1).float()
        value = tensordict.get(schema.REWARD_REC).squeeze(-1) * mask
        zeros = torch.zeros(len(returns))
        total, live = zeros.index_add(0, row_episode, value), zeros.index_add(0, row_episode, mask)
        return returns + self.weight_rec * total / live.clamp(min=1)

    def _advantages(self, returns: Tensor, episode_group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(groups)
        size = zeros.index_add(0, episode_group, torch.ones_like(returns))
        centred = returns - (zeros.index_add(0, episode_group, returns) / size)[episode_group]
        std = (zeros.index_add(0, episode_group, centred.square()) / (size - 1).clamp(min=1)).sqrt()
        return (centred / (std[episode_group] + 1e-6) if self.normalize else centred), std

    def _check_groups(self, summary: TensorDictBase, group: Tensor, episode_group: Tensor) -> None:
        for key in (schema.TASK_ID, schema.INIT_STATE_ID, schema.ENV_SEED):
            value = summary.get(key).squeeze(-1)
            high = torch.full((len(group),), torch.iinfo(torch.int64).min).scatter_reduce(
                0, episode_group, value, "amax"
            )
            if bool((value != high[episode_group]).any()):
                bad = group[episode_group[value != high[episode_group]]].unique().tolist()
                raise ValueError(f"groups {bad} mix different {key!r}: a group shares task, init state and env seed")

    def _note(
        self,
        summary: TensorDictBase,
        episode_group: Tensor,
        size: Tensor,
        kept: Tensor,
        success: Tensor,
        group_std: Tensor,
    ) -> None:
        complete = size == self.group_size
        done = complete[episode_group]
        tasks = summary.get(schema.TASK_ID).squeeze(-1)
        per_task = {}
        for task in tasks[done].unique().tolist():
            of_task = done & (tasks == task)
            wins, total = int(success[of_task].sum()), int(of_task.sum())
            per_task[task] = (wins, total)
            keep = self.success_momentum ** (total / self.group_size)
            # Laplace's rule keeps a task with few episodes away from certainty.
            estimate = (wins + 1) / (total + 2)
            self._success[task] = keep * self._success.get(task, estimate) + (1 - keep) * estimate
        self.report = GroupReport(
            groups=int(complete.sum()),
            kept=int(kept.sum()),
            episodes=int(done.sum()),
            successes=int(success[done].sum()),
            task_success=per_task,
            return_std=float(group_std[complete].mean()) if bool(complete.any()) else 0.0,
        )

    def task_weights(
        self,
        task_ids: list[int],
        *,
        kind: Literal["mixed", "failure"] = "mixed",
        floor: float = 0.1,
        gamma: float = 1.0,
    ) -> Tensor:
        """Weights float32 [len(task_ids)] to deal tasks with, by their running success p (0.5 if not seen yet).

        Args:
            task_ids: the tasks.

        Keyword Args:
            kind: ``"mixed"`` is the chance ``1 - p^G - (1-p)^G`` of a group that gives an advantage; ``"failure"`` is
                ``(1-p)^gamma``.
            floor: least weight; keeps every task in play.
            gamma: exponent of ``"failure"``.
        """
        p = torch.tensor([self._success.get(task, 0.5) for task in task_ids])
        if kind == "failure":
            return ((1 - p) ** gamma).clamp(min=floor)
        return (1 - p**self.group_size - (1 - p) ** self.group_size).clamp(min=floor)

    def get_extra_state(self) -> dict:
        """Running success per task and the episodes of incomplete groups, for checkpoints."""
        return {"success": dict(self._success), "pending": self._pending}

    def set_extra_state(self, state: dict) -> None:
        """Restore :meth:`get_extra_state`."""
        self._success = dict(state["success"])
        self._pending = state["pending"]


def _without_invalid(tensordict: TensorDictBase) -> TensorDictBase:
    """Leave out the rows of episodes whose simulator was lost, but keep those of a later attempt."""
    invalid = tensordict.get(("next", schema.INVALID), None)
    if invalid is None or not bool(invalid.any()):
        return tensordict
    episode, row_episode = tensordict.get(schema.EPISODE_ID).squeeze(-1).unique(return_inverse=True)
    row = torch.arange(len(tensordict))
    lost_at = torch.where(invalid.squeeze(-1), row, -1)
    last_lost = torch.full((len(episode),), -1).scatter_reduce(0, row_episode, lost_at, "amax")
    return take_rows(tensordict, row > last_lost[row_episode])
