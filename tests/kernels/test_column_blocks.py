"""Columns in blocks of 16 bits: the same sums, of every width, by every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pygdist.kernels import CSR, chunked
from pygdist.kernels.chunked import BLOCK, column_blocks, spmm_into
from pygdist.native import Isa, library, load, set_isa

pytestmark = pytest.mark.skipif(load() is None, reason="the native library was not built here")


@pytest.fixture(params=[Isa.PORTABLE, Isa.AVX2, Isa.AVX512], ids=lambda level: level.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    if set_isa(request.param) != request.param:
        pytest.skip(f"this machine lacks {request.param.name}")
    yield request.param
    set_isa(Isa.BEST)


def _csr(num_rows: int, num_cols: int, num_entries: int) -> CSR:
    generator = torch.Generator().manual_seed(num_cols)
    col = torch.randint(0, num_cols, (num_entries,), generator=generator)
    col[:3] = torch.tensor([0, num_cols - 1, min(BLOCK, num_cols) - 1])  # the ends of blocks
    row = torch.randint(0, num_rows - 1, (num_entries,), generator=generator)  # the last row has no entry
    row[row == 7] = 8  # nor has this
    row[: num_entries // 4] = 20  # a hub
    return CSR.from_coo(row, col, num_rows=num_rows, num_cols=num_cols)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("num_cols", "expected"), [(40, 1), (BLOCK, 1), (BLOCK + 1, 2), (3 * BLOCK - 5, 3)])
@pytest.mark.usefixtures("isa")
def test_sums_are_those_of_the_whole(
    num_cols: int, expected: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "_AT_A_TIME", 100)  # fewer than the hub has
    csr = _csr(50, num_cols, 50 * 16 * expected)
    blocks = column_blocks(csr)
    assert [block.num_cols for block in blocks] == [min(BLOCK, num_cols - first) for first in range(0, num_cols, BLOCK)]
    assert all(block.index.dtype == torch.uint16 for block in blocks)
    assert sum(block.num_entries for block in blocks) == csr.num_entries
    torch.manual_seed(0)
    for width in (1, 2, 3, 5, 8, 10, 11, 16, 20, 33, 64):
        x = torch.randn(num_cols, width, dtype=dtype)
        whole = torch.zeros(csr.num_rows, width, dtype=torch.float64)
        whole.index_add_(0, csr.row_index(), x.double().index_select(0, csr.index))
        found = torch.full((csr.num_rows, width), torch.nan, dtype=dtype)
        for number, (block, rows) in enumerate(zip(blocks, x.split(BLOCK), strict=True)):
            spmm_into(found, block, rows, onto=number > 0)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found.double(), whole, rtol=0, atol=tolerance)


def test_rows_of_few_entries_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few = _csr(50, BLOCK + 1, 50 * 16 * 2 - 1)
    assert column_blocks(few) == (few,)
    monkeypatch.setattr(library, "load", lambda: None)
    many = _csr(50, 40, 4000)
    assert column_blocks(many) == (many,)


def test_none_and_wide_indices() -> None:
    none = CSR(torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 2 * BLOCK)
    assert column_blocks(none) == (none,)
    csr = _csr(50, 2 * BLOCK, 4000)
    wide = CSR(csr.indptr, csr.index.long(), csr.num_cols)
    for one, other in zip(column_blocks(csr), column_blocks(wide), strict=True):
        assert torch.equal(one.indptr, other.indptr)
        assert torch.equal(one.index.int(), other.index.int())


def test_weights_are_refused() -> None:
    (block,) = column_blocks(_csr(50, 40, 4000))
    with pytest.raises(RuntimeError, match="pygdist_spmm refused"):
        spmm_into(torch.empty(50, 3), block, torch.randn(40, 3), torch.ones(4000, 1))
