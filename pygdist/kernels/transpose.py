"""The transpose of a sparse matrix, with which gradients go back from destinations to sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pygdist.kernels import _native
from pygdist.kernels.csr import CSR, narrowest
from pygdist.native import library

Memory: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


def transpose(csr: CSR, memory: Memory | None = None) -> CSR:
    """Transpose a matrix.

    Args:
        csr: The matrix.
        memory: Allocates tensors of a shape and dtype; used for ``index`` and ``perm`` of the result.

    Returns:
        The transpose. Its ``perm`` holds positions among the entries of ``csr``, not in the caller's order of edges
        (``csr.perm``). So if ``weight`` holds the values of ``csr``, ``weight[perm]`` holds the values of the
        transpose. The entries of a row keep the order of ``csr``.
    """
    small = {csr.index.dtype, narrowest(csr.num_rows), narrowest(csr.num_entries)} == {torch.int32}
    if small and csr.indptr.device.type == "cpu" and library.load() is not None:
        return _native.transpose(csr, memory)
    transposed = CSR.from_coo(csr.index, csr.row_index(), num_rows=csr.num_cols, num_cols=csr.num_rows)
    if memory is None or transposed.perm is None:
        return transposed
    index, perm = (memory(tuple(part.shape), part.dtype).copy_(part) for part in (transposed.index, transposed.perm))
    return CSR(transposed.indptr, index, transposed.num_cols, perm)


def transposed_from(csr: CSR, tensors: Sequence[Tensor | None]) -> CSR:
    """Return the transpose of ``csr`` from its ``indptr``, ``index`` and ``perm``; make it if these are ``None``."""
    indptr, index, perm = tensors
    return transpose(csr) if indptr is None or index is None else CSR(indptr, index, csr.num_rows, perm)
