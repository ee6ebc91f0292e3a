"""A policy as it was, without a second model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class ReferenceActor:
    """The values that trained parameters have now, to be looked at again later.

    Only what is trained is copied: the adapters of a LoRA actor, not the expert below them. The copies stay where they
    are until :meth:`applied` exchanges them with the parameters' own storage, which copies nothing.

    Args:
        parameters: the parameters that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._values: list[Tensor] = [parameter.detach().clone() for parameter in parameters]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters have the reference's values inside; do not train there."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move the reference towards the parameters as they are: it keeps a share ``decay`` of itself."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            value.lerp_(parameter.detach().to(value.device), 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The reference's values, by their place in the list of parameters."""
        return {str(index): value for index, value in enumerate(self._values)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`state_dict`."""
        for index, value in enumerate(self._values):
            value.copy_(state[str(index)])

    @torch.no_grad()
    def _exchange(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.data, self._values[index] = self._values[index].to(parameter.device), parameter.data
