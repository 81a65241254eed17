"""The kernels piece by piece, for a hop whose edges come in chunks; no gradients, for use inside autograd functions.

Matrices carry no permutation: edge values are in the order of the entries, ``(E, 1)``. Rows are contiguous and of one
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.kernels._choose import kernels_for
from pygdist.kernels._spmm_ops import spmm_into_op
from pygdist.kernels.csr import CSR
from pygdist.kernels.spmm import spmm
from pygdist.native import library

__all__ = [
    "BLOCK",
    "GatPart",
    "SoftmaxPart",
    "column_blocks",
    "extremum_grad",
    "gat_ends",
    "gat_grad",
    "gat_part",
    "merge_softmax",
    "softmax_part",
    "spmm_into",
    "tie_counts",
]

BLOCK = 1 << 16
"""Columns that 16 bits tell apart."""
_OFTEN = 16  # entries of a row in a block, on average
_AT_A_TIME = 1 << 18  # entries that are sorted into blocks

GatPart: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""The result for some edges of each row, its part with positive scores, and three numbers for each row and head."""

SoftmaxPart: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""For some edges of each row and each head: the sum with exponentials as weights, the largest score, their sum."""


def spmm_into(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None = None, *, onto: bool = False) -> None:
    r"""Write the weighted sum of each row's sources into ``out``, or add it to what is there (``onto``).

    Shapes:
        ``out`` is :math:`(N, F)`, ``x`` :math:`(M, F)`, ``weight`` :math:`(E, 1)`.
    """
    if not out.is_contiguous():
        raise ValueError("out must be contiguous: it is written in place")
    if out.shape != (csr.num_rows, x.shape[1]) or x.shape[0] != csr.num_cols or out.dtype != x.dtype:
        raise ValueError(
            f"a matrix of {csr.num_rows} by {csr.num_cols} takes x {tuple(x.shape)} {x.dtype} to "
            f"({csr.num_rows}, {x.shape[1]}), got out {tuple(out.shape)} {out.dtype}"
        )
    spmm_into_op(out, csr.indptr, csr.index, x, weight, onto)


def column_blocks(csr: CSR) -> tuple[CSR, ...]:
    r"""The same entries in blocks of 65,536 columns, each of which is told in 2 bytes: half as much to read.

    Block *b* multiplies the rows from :math:`65536 b` on. The blocks are for :func:`spmm_into` without weights alone,
    the first one to write sums and the others to add to them.

    Returns:
        The blocks, or the matrix as it is where they would not be faster: with rows of few entries in a block, each
        of which costs as much as several entries, or without the native library.
    """
    count = -(-csr.num_cols // BLOCK)
    few = csr.num_entries < _OFTEN * csr.num_rows * count or not csr.num_entries
    if csr.indptr.is_cuda or library.load() is None or few:
        return (csr,)
    if count == 1:
        return (CSR(csr.indptr, csr.index.to(torch.uint16), csr.num_cols),)
    indptr = csr.indptr.new_zeros(count, csr.num_rows + 1)
    pieces: list[list[Tensor]] = [[] for _ in range(count)]
    for first, last in _rows_at_a_time(csr):
        begin = csr.indptr[first]
        index = csr.index[begin : csr.indptr[last]]
        ends = csr.indptr[first + 1 : last + 1] - begin
        block, column = index // BLOCK, (index % BLOCK).to(torch.uint16)
        for number, found in enumerate(pieces):
            inside = block == number
            before = functional.pad(inside.cumsum(0), (1, 0))
            indptr[number, first + 1 : last + 1] = indptr[number, first] + before[ends]
            found.append(column[inside])
    widths = [min(BLOCK, csr.num_cols - first) for first in range(0, csr.num_cols, BLOCK)]
    return tuple(CSR(*block) for block in zip(indptr, map(torch.cat, pieces), widths, strict=True))


def _rows_at_a_time(csr: CSR) -> Iterator[tuple[int, int]]:
    """Rows of some hundred thousand entries, or one of more: what is made of them stays in the cache."""
    at = torch.arange(0, csr.num_entries, _AT_A_TIME, device=csr.indptr.device)
    bounds = {0, csr.num_rows, *torch.searchsorted(csr.indptr, at).tolist()}
    return pairwise(sorted(bounds))


def tie_counts(csr: CSR, x: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
    """How many entries of each row attain its maximum or minimum ``out``, value by value."""
    op = "copy" if weight is None else "mul"
    plain = csr.unpermuted()
    share = kernels_for(x).share_ties(plain, x, weight, op, out, torch.ones_like(out))
    # an extremum of 0 has one share more; where nothing attains it, 1 / 0
    return torch.where(share.isinf(), 0, (1 / share).round() - (out == 0).to(out.dtype))


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor) -> Tensor:
    """The gradient of ``x``, from the share that each entry gets which attains its row's extremum."""
    op = "copy" if weight is None else "mul"
    found: Tensor = kernels_for(x).extremum_grad(transposed, x, weight, op, out, share)
    return found


def gat_part(csr: CSR, x: Tensor, source: Tensor, target: Tensor, slope: float, onto: GatPart | None = None) -> GatPart:
    """What :func:`pygdist.kernels.gat` computes, for some of the edges, and what its gradient needs.

    With ``onto`` the result for other edges of the same rows, which is given up for that over all, by the running
    maximum and sum of exponentials (softmax piece by piece).
    """
    found: GatPart = kernels_for(x).gat(csr.unpermuted(), x, source, target, slope, True, onto)
    return found


def gat_ends(target: Tensor, slope: float, found: GatPart, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`gat_grad` needs of each row, from the result over all its entries, and the gradient of ``target``."""
    ends: tuple[Tensor, Tensor] = kernels_for(grad).gat_ends(target, slope, *found, grad)
    return ends


def gat_grad(
    transposed: CSR, x: Tensor, source: Tensor, slope: float, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``source`` by the edges given."""
    found: tuple[Tensor, Tensor] = kernels_for(x).gat_grad(transposed, x, source, slope, ends, grad)
    return found


def softmax_part(csr: CSR, scores: Tensor, values: Tensor) -> SoftmaxPart:
    r"""The sum of the sources' rows by the exponentials of scores, less the largest of each row.

    Shapes:
        ``scores`` is :math:`(E, H)`, ``values`` :math:`(M, H, C)`, the results :math:`(N, H, C)`, :math:`(N, H)`, which
        is :math:`-\infty` for rows without edges, and :math:`(N, H)`.
    """
    most = torch.segment_reduce(scores, "max", offsets=csr.indptr, axis=0, initial=float("-inf"))
    weights = (scores - most[csr.row_index()]).exp()
    ones = values.new_ones(values.shape[0], values.shape[1], 1)
    return spmm(csr, values, weights), most, spmm(csr, ones, weights).squeeze(-1)


def merge_softmax(first: SoftmaxPart, second: SoftmaxPart) -> SoftmaxPart:
    """The same over the edges of both, by the running maximum and sum."""
    most = torch.maximum(first[1], second[1])
    # of a row without edges nothing is there to be scaled
    one, other = (torch.where(part[2] > 0, (part[1] - most).exp(), 0) for part in (first, second))
    out = first[0] * one.unsqueeze(-1) + second[0] * other.unsqueeze(-1)
    return out, most, first[2] * one + second[2] * other
