"""Self-loops in a sparse matrix: taken out of it and put into it, row by row, without sorting the edges again."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.kernels import CSR

__all__ = ["insert_self_loops", "is_self_loop", "keep_entries"]


def is_self_loop(csr: CSR) -> Tensor:
    """Which entries lead from a row to itself, ``(E,)`` bool."""
    return csr.index == csr.row_index()


def keep_entries(csr: CSR, keep: Tensor) -> CSR:
    """The entries where ``keep``, ``(E,)`` bool, is true."""
    kept_before = torch.zeros(csr.num_entries + 1, dtype=torch.int64, device=keep.device)
    torch.cumsum(keep, dim=0, out=kept_before[1:])
    return CSR(kept_before.index_select(0, csr.indptr), csr.index[keep], csr.num_cols)


def insert_self_loops(csr: CSR, num_nodes: int) -> tuple[CSR, Tensor]:
    """One more entry at the end of each of the first ``num_nodes`` rows, which leads to the row itself.

    Args:
        csr: The matrix.
        num_nodes: Rows that get a loop.

    Returns:
        The matrix with loops, and which of its entries they are, ``(E + num_nodes,)`` bool; the others keep their
        order.
    """
    device = csr.indptr.device
    nodes = torch.arange(csr.num_rows + 1, device=device).clamp_(max=num_nodes)
    indptr = csr.indptr + nodes
    is_loop = torch.zeros(csr.num_entries + num_nodes, dtype=torch.bool, device=device)
    is_loop[indptr[1 : num_nodes + 1] - 1] = True
    index = csr.index.new_empty(is_loop.numel())
    index.masked_scatter_(~is_loop, csr.index)
    index.masked_scatter_(is_loop, torch.arange(num_nodes, dtype=index.dtype, device=device))
    return CSR(indptr, index, csr.num_cols), is_loop
