"""Rows copied whole are the rows that indexing gives."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from wamrl_torchrl.data.rows import put, take, take_rows

PICTURES = torch.randint(256, (6, 3, 4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([4, 0, 0, 5]),
        torch.tensor([[1, 2, 3], [5, 5, 0]]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([True, False, False, True, True, False]),
        torch.zeros(6, dtype=torch.bool),
    ],
    ids=["repeated", "two-dimensional", "none", "mask", "empty-mask"],
)
@pytest.mark.parametrize("source", [PICTURES, PICTURES[:, :, ::2], PICTURES.double()], ids=["bytes", "strided", "f64"])
def test_take_is_indexing(source, rows):
    found = take(source, rows)
    assert torch.equal(found, source[rows])
    assert found.data_ptr() != source.data_ptr()


@pytest.mark.parametrize("rows", [torch.tensor([5, 1]), torch.tensor([True, False, True, False, False, False])])
def test_take_rows_is_indexing_every_leaf(rows):
    td = TensorDict({"a": PICTURES, "next": {"done": torch.arange(6)[:, None] > 2, "image": PICTURES + 1}}, [6])
    found = take_rows(td, rows)
    assert found.batch_size == td[rows].batch_size
    assert (found == td[rows]).all()


@pytest.mark.parametrize("rows", [torch.tensor([4, 0]), torch.tensor([], dtype=torch.int64)])
def test_put_is_assignment(rows):
    found, want = PICTURES.clone(), PICTURES.clone()
    values = (PICTURES[1:3] + 7)[: len(rows)]
    put(found, rows, values)
    want[rows] = values
    assert torch.equal(found, want)
