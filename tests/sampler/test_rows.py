"""Rows copied by the native library are those that indexing gives."""

from __future__ import annotations

import pytest
import torch

from pygdist.sampler._native import copy_rows
from tests.kernels.oracle import needs_library

pytestmark = needs_library


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)], ids=str)
def test_copies_are_those_of_indexing(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = (
        torch.arange(40 * max(1, torch.Size(shape).numel()))
        .to(dtype)[: 40 * torch.Size(shape).numel()]
        .view(40, *shape)
    )
    source, target = torch.tensor([7, 0, 39, 7]), torch.tensor([5, 1, 0, 3])
    out = torch.zeros(6, *shape, dtype=dtype)
    expected = out.clone()
    expected[target] = rows[source]
    copy_rows(rows, source, out, target)
    assert torch.equal(out, expected)
    some = torch.empty(4, *shape, dtype=dtype)
    copy_rows(rows, source, some, None)
    assert torch.equal(some, rows[source])
    copy_rows(some, None, out, target)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("source", "target"), [([40], [0]), ([-1], [0]), ([0], [6]), ([0], [-1])])
def test_rows_out_of_range_are_refused(source: list[int], target: list[int]) -> None:
    with pytest.raises(IndexError, match="a row is not among the 40 rows that are copied, or the 6 of the copy"):
        copy_rows(torch.zeros(40, 2), torch.tensor(source), torch.zeros(6, 2), torch.tensor(target))


def test_rows_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        copy_rows(torch.zeros(4, 2), None, torch.zeros(4, 3), None)
