"""Precision: of matrix products, and of buffers that keep theirs when the model around them is cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import Self


class FixedBuffers(nn.Module):
    """Module whose own buffers move with their owner but keep their dtype when that is cast.

    Rotation tables, codec bases and data statistics lose what they are for in bfloat16: its 8 significant bits put a
    bound off by up to 0.4 %.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(lambda buffer: buffer.to(fn(buffer).device), recurse)


@contextmanager
def tf32_products(enabled: bool) -> Iterator[None]:
    """While it lasts, float32 matrix products on a GPU read their factors as TF32 (10 bits of fraction), or do not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
