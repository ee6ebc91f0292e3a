"""Advantages of an actor-critic: generalised advantage estimation over macro-steps."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import Transform
from torchrl.objectives.value import GAE

from wamrl_torchrl import schema
from wamrl_torchrl.data.rows import take_rows
from wamrl_torchrl.modules.value import STATE_VALUE, VALUE_FEATURES, ValueHead

VALUE_TARGET = "value_target"


class CriticAdvantage(Transform):
    r"""Advantages by TorchRL's ``GAE``, when whole episodes are written to a replay buffer (or by ``transform.inv``).

    The reward of a decision is

    .. math:: r_t = w_{task} [success_t] + w_{rec} \, \tilde r_t

    The end of an episode counts as its end, also at the horizon: success within it is what is asked for, and the value
    head knows the time. In place of :class:`GroupAdvantage`'s, no group is needed or dropped; run after it
    (``Compose(critic, group)``, as inverse transforms go last to first) both give their statistics.

    Writes ``advantage``, ``state_value`` and ``value_target`` float32 [M,1] and ``value_features`` [M,D]; rows are put
    in the order of episodes and decisions.

    Args:
        value: the value head.

    Keyword Args:
        gamma: discount per decision.
        lmbda: exponential weight of longer returns.
        weight_task: weight of success.
        weight_rec: weight of the reconstruction reward; 0 needs no such reward.
        normalize: bring the advantages of a call to mean 0 and deviation 1.
        batch_size: decisions whose features are computed at once.

    Raises:
        ValueError: an incomplete episode, or a reconstruction reward that is wanted and not there.
    """

    def __init__(
        self,
        value: ValueHead,
        *,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        weight_task: float = 1.0,
        weight_rec: float = 0.0,
        normalize: bool = True,
        batch_size: int = 64,
    ) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._value = (value,)  # trained and saved elsewhere
        self.weight_task, self.weight_rec = weight_task, weight_rec
        self.batch_size = batch_size
        self.gae = GAE(gamma=gamma, lmbda=lmbda, value_network=None, average_gae=normalize)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave sampled batches alone: advantages are computed once, on writing."""
        return tensordict

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None:  # nothing was left to write
            return None
        tensordict = take_rows(tensordict, _episode_order(tensordict))
        done = tensordict.get(("next", "done"))
        value = self._values(tensordict)
        # The state after a decision is the next decision's own; after the last one nothing counts.
        following = torch.cat((value[1:], value.new_zeros(1, 1)))
        steps = TensorDict(
            {
                STATE_VALUE: value,
                "next": {
                    STATE_VALUE: following.masked_fill(done, 0.0),
                    "reward": self._rewards(tensordict),
                    "done": done,
                    "terminated": done,
                },
            },
            batch_size=tensordict.batch_size,
        )
        steps = self.gae(steps)
        tensordict.set(STATE_VALUE, value).set(schema.ADVANTAGE, steps.get("advantage"))
        return tensordict.set(VALUE_TARGET, steps.get("value_target"))

    def _values(self, tensordict: TensorDictBase) -> Tensor:
        head = self._value[0]
        device = head.head[0].weight.device
        parts = [head(part.select(*head.in_keys).to(device)) for part in tensordict.split(self.batch_size)]
        where = tensordict.get(schema.PROPRIO).device
        tensordict.set(VALUE_FEATURES, torch.cat([part.get(VALUE_FEATURES) for part in parts]).to(where))
        return torch.cat([part.get(STATE_VALUE) for part in parts]).to(where)

    def _rewards(self, tensordict: TensorDictBase) -> Tensor:
        reward = self.weight_task * tensordict.get(("next", schema.SUCCESS)).float()
        if not self.weight_rec:
            return reward
        rec = tensordict.get(schema.REWARD_REC, None)
        if rec is None:
            raise ValueError(f"weight_rec={self.weight_rec} needs {schema.REWARD_REC!r} (ReconstructionReward)")
        return reward + self.weight_rec * rec * tensordict.get(schema.REWARD_REC_MASK)


def _episode_order(tensordict: TensorDictBase) -> Tensor:
    """Rows int64 [M] such that decisions of an episode follow each other.

    Raises:
        ValueError: an episode that is not whole.
    """
    index, episode = (tensordict.get(key).squeeze(-1) for key in (schema.CHUNK_INDEX, schema.EPISODE_ID))
    order = index.argsort(stable=True)
    order = order[episode[order].argsort(stable=True)]
    index, episode = index[order], episode[order]
    last = torch.ones_like(episode, dtype=torch.bool)
    last[:-1] = episode[1:] != episode[:-1]
    first = last.roll(1)
    gap = index != torch.where(first, 0, index.roll(1) + 1)
    wrong = gap | (tensordict.get(("next", "done")).squeeze(-1)[order] != last)
    if bool(wrong.any()):
        bad = episode[wrong].unique().tolist()
        raise ValueError(f"advantages need whole episodes; episodes {bad} lack decisions or their end")
    return order
