"""Self-loops removed from a sparse matrix or inserted into it, without sorting the edges again."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.graph.adjacency import Slot
from pygdist.kernels import CSR

#: Set with edges of which the host has seen that they have no self-loop, so that nobody waits for a GPU to find out.
NO_LOOPS = Slot[bool]("no self-loops")


def is_self_loop(csr: CSR) -> Tensor:
    """Return a mask of the entries that lead from a row to itself, ``(E,)`` bool."""
    return csr.index == csr.row_index()


def keep_entries(csr: CSR, keep: Tensor) -> CSR:
    """Return the entries where ``keep``, ``(E,)`` bool, is true."""
    kept_before = torch.zeros(csr.num_entries + 1, dtype=torch.int64, device=keep.device)
    torch.cumsum(keep, dim=0, out=kept_before[1:])
    return CSR(kept_before.index_select(0, csr.indptr), csr.index[keep], csr.num_cols)


def insert_self_loops(csr: CSR, num_nodes: int) -> tuple[CSR, Tensor]:
    """Insert a self-loop in each of the first ``num_nodes`` rows.

    The loop comes after as many entries as have a lower column, so sorted rows stay sorted, and a symmetric matrix
    stays its own transpose.

    Returns:
        The matrix with loops, and a mask of the new entries, ``(E + num_nodes,)`` bool; the others keep their order.
    """
    device = csr.indptr.device
    nodes = torch.arange(csr.num_rows + 1, device=device).clamp_(max=num_nodes)
    indptr = csr.indptr + nodes
    is_loop = torch.zeros(csr.num_entries + num_nodes, dtype=torch.bool, device=device)
    row = csr.row_index()
    lower = indptr.new_zeros(csr.num_rows).index_add_(0, row, (csr.index < row).long())
    is_loop.index_fill_(0, (indptr[:-1] + lower)[:num_nodes], True)
    index = csr.index.new_empty(is_loop.numel())
    index.masked_scatter_(~is_loop, csr.index)
    index.masked_scatter_(is_loop, torch.arange(num_nodes, dtype=index.dtype, device=device))
    return CSR(indptr, index, csr.num_cols), is_loop
