"""How far an update moved the policy, measured alike for every loss."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.model import masked_mean
from wamrl_torchrl.modules.policy import FlowPolicy

#: Decisions that are looked at.
ROWS = 64


class PolicyChange:
    """Remembers the policy on some decisions, and tells how far it is from there later.

    Args:
        policy: the policy.
        records: macro-steps [M]; :data:`ROWS` of them, evenly spaced, are looked at.
    """

    @torch.no_grad()
    def __init__(self, policy: FlowPolicy, records: TensorDictBase) -> None:
        rows = torch.linspace(0, len(records) - 1, min(ROWS, len(records))).round().long()
        keys = (*policy.replay_keys, ("next", schema.EXECUTED_MASK))
        self._policy = policy
        self._records = records.select(*keys)[rows].to(policy.device)
        self._velocity = policy.transitions(self._records).velocity

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """Measure against the present weights.

        Returns:
            ``kl``, the mean Kullback-Leibler divergence between the Gaussian steps of then and now, summed over the
            executed actions of a decision, per stochastic step; and ``velocity_change``, root mean square.
        """
        moves = self._policy.transitions(self._records)
        mask = self._records.get(("next", schema.EXECUTED_MASK))[:, None]
        square = (moves.velocity - self._velocity).square()
        # KL(N(m, s) || N(m', s)) = (m - m')^2 / 2 s^2, and the means move by c_k s per velocity.
        divergence = 0.5 * moves.gain.square() * (square.sum(-1) * mask).sum(-1)
        mean = masked_mean(square.mean(-1), ~mask)
        kl, change = torch.stack((divergence.mean(), mean.mean().sqrt())).tolist()
        return {"kl": kl, "velocity_change": change}
