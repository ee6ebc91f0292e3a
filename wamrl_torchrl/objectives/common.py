"""What the losses of this package share."""

from __future__ import annotations

import abc

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.objectives.common import LossModule


class CriticFreeLoss(LossModule):
    """A loss without value network whose input keys follow from its configurable keys.

    Networks are plain submodules, not functionalised: hooks, DDP, FSDP and compile then behave as usual, and a 5B model
    is not copied into parameter tensordicts.
    """

    @abc.abstractmethod
    def _in_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` reads."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that ``forward`` reads; change them with ``set_keys``."""
        return self._in_keys()

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        raise RuntimeError(f"in_keys of {type(self).__name__} follow from set_keys(...), got {values}")

    def _forward_value_estimator_keys(self, **kwargs) -> None:
        """There is no value network to forward keys to."""


class ActorLoss(CriticFreeLoss):
    """A loss of the actor on macro-steps with advantages, exchangeable in :class:`wamrl_torchrl.learner.ActorUpdate`.

    ``forward`` writes ``loss_objective`` and detached diagnostics: scalars, or vectors with an entry per sampling step.
    """

    def prepare(self, records: TensorDictBase, *, batch_size: int) -> None:
        """Write into the records of an update what the loss needs of the policy as it is before the first step.

        Args:
            records: the update's macro-steps [M], changed in place.

        Keyword Args:
            batch_size: records per pass.
        """

    def _advantage(self, tensordict: TensorDictBase) -> Tensor:
        """Advantages [B,1] of macro-steps [B]."""
        key, expected = self.tensor_keys.advantage, (*tensordict.batch_size, 1)
        advantage = tensordict.get(key)
        if advantage.shape != expected:
            raise ValueError(f"{key!r} must be of shape {expected}, found {tuple(advantage.shape)}")
        return advantage
