"""The transpose of a sparse matrix: who sends to whom becomes who receives from whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from pygdist.kernels import _native
from pygdist.kernels.csr import CSR, narrowest
from pygdist.native import library

__all__ = ["transpose"]

Memory: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


def transpose(csr: CSR, memory: Memory | None = None) -> CSR:
    """Swap rows and columns.

    Args:
        csr: The matrix.
        memory: Gives memory of a shape and dtype for what is as long as there are entries.

    Returns:
        Its transpose. ``perm`` leads from the entries of the transpose to the entries of ``csr`` (not to the caller's
        order behind ``csr.perm``), so ``weight[perm]`` are the values of the transpose. The entries of a row keep the
        order of ``csr``.
    """
    small = {csr.index.dtype, narrowest(csr.num_rows), narrowest(csr.num_entries)} == {torch.int32}
    if small and csr.indptr.device.type == "cpu" and library.load() is not None:
        return _native.transpose(csr, memory)
    made = CSR.from_coo(csr.index, csr.row_index(), num_rows=csr.num_cols, num_cols=csr.num_rows)
    if memory is None or made.perm is None:
        return made
    index, perm = (memory(tuple(part.shape), part.dtype).copy_(part) for part in (made.index, made.perm))
    return CSR(made.indptr, index, made.num_cols, perm)
