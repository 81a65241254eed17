"""The CSR holder: how it is made, turned, and refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pygdist.kernels import CSR, transpose
from tests.kernels.oracle import random_csr


def test_from_coo_sorts_by_row_and_keeps_the_order_within() -> None:
    row, col = torch.tensor([2, 0, 2, 0]), torch.tensor([4, 3, 1, 3])
    csr = CSR.from_coo(row, col, num_rows=4, num_cols=5).validate()
    assert csr.indptr.tolist() == [0, 2, 2, 4, 4]
    assert csr.index.dtype == torch.int32
    assert csr.index.tolist() == [3, 3, 4, 1]
    assert csr.row_index().tolist() == [0, 0, 2, 2]
    assert csr.perm is not None
    assert csr.perm.tolist() == [1, 3, 0, 2]
    assert (csr.num_rows, csr.num_cols, csr.num_entries) == (4, 5, 4)


def test_from_coo_keeps_int64_where_int32_does_not_fit() -> None:
    edge = torch.tensor([2**31])
    assert CSR.from_coo(torch.tensor([0]), edge, num_rows=1, num_cols=2**31 + 1).index.dtype == torch.int64


def test_transpose_twice_is_the_matrix() -> None:
    csr = random_csr()
    back = transpose(csr)
    again = transpose(back)
    assert back.perm is not None
    assert again.perm is not None
    assert (back.num_rows, back.num_cols) == (csr.num_cols, csr.num_rows)
    assert torch.equal(back.index.long(), csr.row_index().long()[back.perm])
    assert torch.equal(again.indptr, csr.indptr)
    assert torch.equal(csr.row_index(), again.row_index())
    assert torch.equal(back.perm[again.perm].sort().values, torch.arange(csr.num_entries))


@pytest.mark.parametrize(
    ("indptr", "index", "perm", "match"),
    [
        pytest.param(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0]), None, "indptr must be", id="indptr"),
        pytest.param(torch.empty(0, dtype=torch.int64), torch.tensor([0]), None, "indptr must be", id="no-indptr"),
        pytest.param(torch.tensor([0, 1]), torch.tensor([0.0]), None, "index must be", id="index"),
        pytest.param(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([0, 1]), "perm must be", id="perm"),
        pytest.param(torch.tensor([0, 1]), torch.tensor([0], device="meta"), None, "index and perm there", id="device"),
    ],
)
def test_malformed_matrix_is_refused(indptr: Tensor, index: Tensor, perm: Tensor | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CSR(indptr, index, 2, perm)


@pytest.mark.parametrize(
    ("indptr", "index", "match"),
    [
        pytest.param([0, 1], [0, 1], "rise from 0 to 2", id="short"),
        pytest.param([0, 3, 2], [0, 1], "rise from 0", id="falls"),
        pytest.param([0, 2], [0, 2], r"index must be in 0..1, it has 2", id="too-large"),
        pytest.param([0, 2], [-1, 0], r"it has -1", id="negative"),
    ],
)
def test_validate_finds_wrong_contents(indptr: list[int], index: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CSR(torch.tensor(indptr), torch.tensor(index), 2).validate()


def test_negative_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="num_cols must not be negative"):
        CSR(torch.tensor([0]), torch.empty(0, dtype=torch.int64), -1)
