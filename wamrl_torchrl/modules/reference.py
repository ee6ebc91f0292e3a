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
    def _exchange(self) -> None:
        for index, parameter in enumerate(self._parameters):
            parameter.data, self._values[index] = self._values[index].to(parameter.device), parameter.data
