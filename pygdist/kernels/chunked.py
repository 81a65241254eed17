"""Kernels for some of the edges at a time, and the rules that merge their results; for use inside autograd functions.

Nothing here has gradients. ``perm`` is not used: edge values are in the order of the entries, ``(E, 1)`` or ``(E, H)``.
Rows are contiguous and of one dtype.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.kernels._operator import kernels_for
from pygdist.kernels._spmm_ops import spmm_into_op
from pygdist.kernels.csr import CSR, row_blocks
from pygdist.kernels.spmm import spmm
from pygdist.native import library

BLOCK = 1 << 16
"""Columns that 16 bits can number."""
_OFTEN = 16  # entries of a row in a block, on average, from which blocks are worth it
_AT_A_TIME = 1 << 18  # entries sorted into blocks at a time, so that results fit the cache

GatPart: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""For some edges of each row: the result, the same over positive scores only, and by head the largest score, one over
the sum of exponentials, and the weight of positive scores."""

SoftmaxPart: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""For some edges of each row, by head: the sum weighted by exponentials, the largest score, the sum of exponentials."""


def spmm_into(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None = None, *, onto: bool = False) -> None:
    r"""Write the weighted sum of each row's sources into ``out``, or add it to ``out`` (``onto``).

    Shapes:
        ``out`` is :math:`(N, F)`, ``x`` :math:`(M, F)`, ``weight`` :math:`(E, 1)`.
    """
    if not out.is_contiguous():
        raise ValueError("out must be contiguous: it is written in place")
    if out.shape != (csr.num_rows, x.shape[1]) or x.shape[0] != csr.num_cols or out.dtype != x.dtype:
        raise ValueError(
            f"x must have {csr.num_cols} rows, and out the shape ({csr.num_rows}, {x.shape[1]}) and the dtype of x; "
            f"got x {tuple(x.shape)} {x.dtype}, out {tuple(out.shape)} {out.dtype}"
        )
    spmm_into_op(out, csr.indptr, csr.index, x, weight, onto)


def column_blocks(csr: CSR) -> tuple[CSR, ...]:
    r"""Split a matrix into blocks of 65,536 columns, whose column numbers take 2 bytes each: half as much to read.

    Block *b* multiplies the rows of ``x`` from :math:`65536 b` on. Use the blocks only with :func:`spmm_into` without
    weights: the first one writes the sums and the others add to them.

    Returns:
        The blocks, or the matrix itself if they would not be faster: without the native library, or if rows have few
        entries in a block (a row costs as much as several entries).
    """
    count = -(-csr.num_cols // BLOCK)
    few = csr.num_entries < _OFTEN * csr.num_rows * count or not csr.num_entries
    if csr.indptr.is_cuda or library.load() is None or few:
        return (csr,)
    if count == 1:
        return (CSR(csr.indptr, csr.index.to(torch.uint16), csr.num_cols),)
    indptr = csr.indptr.new_zeros(count, csr.num_rows + 1)
    columns: list[list[Tensor]] = [[] for _ in range(count)]
    for rows, entries in row_blocks(csr.indptr, _AT_A_TIME):
        index, after = csr.index[entries], slice(rows.start + 1, rows.stop + 1)
        ends = csr.indptr[after] - entries.start
        block, column = index // BLOCK, (index % BLOCK).to(torch.uint16)
        for number in range(count):
            inside = block == number
            before = functional.pad(inside.cumsum(0), (1, 0))
            indptr[number, after] = indptr[number, rows.start] + before[ends]
            columns[number].append(column[inside])
    widths = [min(BLOCK, csr.num_cols - first) for first in range(0, csr.num_cols, BLOCK)]
    return tuple(CSR(*block) for block in zip(indptr, map(torch.cat, columns), widths, strict=True))


def tie_counts(csr: CSR, x: Tensor, weight: Tensor | None, out: Tensor) -> Tensor:
    """Count, for each value of ``out`` (extrema of rows, ``(N, F)``), the entries of its row that attain it."""
    op = "copy" if weight is None else "mul"
    share = kernels_for(x).share_ties(csr.unpermuted(), x, weight, op, out, torch.ones_like(out))
    # share_ties counts one entry more where out is 0, and gives 1 / 0 where no entry attains out
    return torch.where(share.isinf(), 0, (1 / share).round() - (out == 0).to(out.dtype))


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor) -> Tensor:
    """Return the gradient of ``x``, from the gradient that each entry gets if it attains its row's extremum."""
    op = "copy" if weight is None else "mul"
    grad_x: Tensor = kernels_for(x).extremum_grad(transposed, x, weight, op, out, share)
    return grad_x


def gat_part(csr: CSR, x: Tensor, source: Tensor, target: Tensor, slope: float, onto: GatPart | None = None) -> GatPart:
    """Compute :func:`pygdist.kernels.gat` over some of the edges, and the values that its gradient needs.

    With ``onto``, the result over other edges of the same rows, both are merged into the result over all, by the
    running maximum and sum of exponentials; ``onto`` may be overwritten.
    """
    part: GatPart = kernels_for(x).gat(csr.unpermuted(), x, source, target, slope, True, onto or ())
    return part


def gat_ends(target: Tensor, slope: float, whole: GatPart, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the row values that :func:`gat_grad` reads, and the gradient of ``target``, from that of the result."""
    ends: tuple[Tensor, Tensor] = kernels_for(grad).gat_ends(target, slope, *whole, grad)
    return ends


def gat_grad(
    transposed: CSR, x: Tensor, source: Tensor, slope: float, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the terms of the gradients of ``x`` and ``source`` that come from the edges given."""
    gradients: tuple[Tensor, Tensor] = kernels_for(x).gat_grad(transposed, x, source, slope, ends, grad)
    return gradients


def softmax_part(csr: CSR, scores: Tensor, values: Tensor) -> SoftmaxPart:
    r"""Sum the sources' rows, weighted by the exponentials of the scores less the largest score of each row.

    Shapes:
        ``scores`` is :math:`(E, H)`, ``values`` :math:`(M, H, C)`. The results are :math:`(N, H, C)`, :math:`(N, H)`
        (:math:`-\infty` for rows without edges) and :math:`(N, H)`.
    """
    most = torch.segment_reduce(scores, "max", offsets=csr.indptr, axis=0, initial=float("-inf"))
    weights = (scores - most[csr.row_index()]).exp()
    ones = values.new_ones(values.shape[0], values.shape[1], 1)
    return spmm(csr, values, weights), most, spmm(csr, ones, weights).squeeze(-1)


def merge_softmax(first: SoftmaxPart, second: SoftmaxPart) -> SoftmaxPart:
    """Merge the results over two sets of edges into the result over both, by the running maximum and sum."""
    most = torch.maximum(first[1], second[1])
    # a row without edges has nothing to scale
    one, other = (torch.where(part[2] > 0, (part[1] - most).exp(), 0) for part in (first, second))
    out = first[0] * one.unsqueeze(-1) + second[0] * other.unsqueeze(-1)
    return out, most, first[2] * one + second[2] * other
