"""Kernels on a GPU, against float64 on the host."""

from __future__ import annotations

import pytest
import torch

from pygdist.kernels import CSR, spmm
from tests.kernels.gpu_cases import GRAPHS, KERNELS, TOLERANCE, largest_error
from tests.kernels.oracle import random_csr

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_on_a_gpu(kernel: str, graph: str, dtype: torch.dtype, wide: bool) -> None:
    assert largest_error(kernel, graph, dtype, wide=wide) <= TOLERANCE[dtype]


def test_matrices_leave_no_memory_behind() -> None:
    def used() -> int:
        for _ in range(50):
            csr = random_csr()
            there = CSR(csr.indptr.cuda(), csr.index.cuda(), csr.num_cols)
            x = torch.rand(csr.num_cols, 8, device="cuda", requires_grad=True)
            spmm(there, x).sum().backward()
        return torch.cuda.memory_allocated()

    used()
    assert used() == used()
