"""The kernels by the native library, for tensors on the CPU.

The functions are those of :mod:`pygdist.kernels._torch`, and are described there. Arguments are not checked again:
:mod:`pygdist.kernels.spmm` and :mod:`pygdist.kernels.attention` have done that. Dense tensors of one call are
two-dimensional and of one dtype. The library uses as many threads as torch does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygdist.kernels.csr import CSR
from pygdist.native import Status, library

_REDUCE_CODES = {"sum": 0, "mean": 1, "max": 2, "min": 3}
# Keeping the places of extrema pays from so many entries of a row on average, and of values in them: with 50 entries it
# took as long as comparing again, as gradients are added all over memory. The choice does not depend on the number of
# threads, as results must not.
_OFTEN, _MANY_VALUES = 128, 2048
_ONTO = 4
_OP_CODES = {"copy": 0, "mul": 1, "add": 2}


def spmm(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str) -> Tensor:
    out = x.new_empty(csr.num_rows, x.shape[1])
    _call("pygdist_spmm", csr, weight, x, _REDUCE_CODES[reduce], x, out, op=op)
    return out


def spmm_into(out: Tensor, csr: CSR, x: Tensor, weight: Tensor | None, *, onto: bool) -> None:
    op = "copy" if weight is None else "mul"
    _call("pygdist_spmm", csr, weight, x, _ONTO if onto else _REDUCE_CODES["sum"], x, out, op=op)


def keeps_places(num_rows: int, num_entries: int, x: Tensor) -> bool:
    worth = num_entries >= _OFTEN * num_rows and num_entries * x.shape[1] >= _MANY_VALUES * num_rows
    return worth and max(x.shape[0], num_entries) < 2**31  # a place is a column or a position in a row


def extremum(csr: CSR, x: Tensor, weight: Tensor | None, op: str, reduce: str, places: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(csr.num_rows, x.shape[1])
    _call("pygdist_extremum", csr, weight, x, _REDUCE_CODES[reduce], x, out, places if places.numel() else None, op=op)
    return out, places


def few_ties(csr: CSR, places: Tensor) -> bool:
    """Return true if looking for ties, entry by entry of their rows, is little work beside looking at all entries."""
    few = torch.empty(1, dtype=torch.int32)
    _call("pygdist_few_ties", csr, None, places, places, few)
    return bool(few)


def extremum_scatter(
    csr: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, places: Tensor, grad: Tensor
) -> Tensor:
    """Sum, for each source, the shares of the extrema that it attains, by the places that :func:`extremum` has kept."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("pygdist_extremum_scatter", csr, weight, x, x, out, places, grad, grad_x, op=op)
    return grad_x


def share_ties(csr: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, grad_out: Tensor) -> Tensor:
    share = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    _call("pygdist_share_ties", csr, weight, x, x, out, grad_out, share, op=op)
    return share


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, op: str, out: Tensor, share: Tensor) -> Tensor:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("pygdist_extremum_grad", transposed, weight, x, x, out, share, grad_x, op=op)
    return grad_x


def extremum_value_grad(csr: CSR, x: Tensor, weight: Tensor, op: str, out: Tensor, share: Tensor) -> Tensor:
    grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _call("pygdist_sddmm", csr, weight, x, x, share, out, grad_weight, op=op)
    return grad_weight


def sddmm(csr: CSR, x: Tensor, y: Tensor, heads: int) -> Tensor:
    out = x.new_empty(csr.num_entries, heads, dtype=torch.promote_types(x.dtype, torch.float32))
    _call("pygdist_sddmm", csr, None, x, x, y, None, out, heads=heads)
    return out


def edge_softmax(csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float) -> Tensor:
    like = next(part for part in (edge, source, target) if part is not None)
    alpha = like.new_empty(csr.num_entries, like.shape[1])
    _call("pygdist_edge_softmax", csr, None, like, source, target, edge, slope, alpha, heads=like.shape[1])
    return alpha


def edge_softmax_grad(
    csr: CSR, source: Tensor | None, target: Tensor | None, edge: Tensor | None, slope: float, out: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    gradients = torch.empty_like(out), out.new_empty(csr.num_rows, out.shape[1])
    parts = (source, target, edge, slope, out, grad, *gradients)
    _call("pygdist_edge_softmax_grad", csr, None, out, *parts, heads=out.shape[1])
    return gradients


def sum_edges(csr: CSR, values: Tensor) -> Tensor:
    out = values.new_empty(csr.num_rows, values.shape[1])
    _call("pygdist_sum_edges", csr, values, values, out)
    return out


def gatv2_scores(csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, heads: int) -> Tensor:
    scores = source.new_empty(csr.num_entries, heads)
    _call("pygdist_gatv2_scores", csr, None, source, source, target, attention, slope, scores, heads=heads)
    return scores


def gatv2_grad(
    csr: CSR, source: Tensor, target: Tensor, attention: Tensor, slope: float, grad_scores: Tensor, *, both: bool
) -> tuple[Tensor, Tensor]:
    grad_target = torch.empty_like(target, memory_format=torch.contiguous_format)
    grad_attention = target.new_empty(target.shape if both else (0, 0))
    parts = (source, target, attention, slope, grad_target, grad_attention if both else None)
    _call("pygdist_gatv2_grad", csr, grad_scores, source, *parts, op="mul")
    return grad_target, grad_attention


def gat(
    csr: CSR, x: Tensor, source: Tensor, target: Tensor, slope: float, graded: bool, onto: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    # ``onto`` is overwritten by the results
    rows, heads = target.shape
    out, above, facts = onto or (
        x.new_empty(rows, x.shape[1]),
        x.new_empty((rows, x.shape[1]) if graded else (0, 0)),
        x.new_zeros((rows, heads, 3) if graded else (0, 0, 0)),  # rows without channels are left as they are
    )
    rest = (above, facts) if graded else (None, None)
    _call("pygdist_gat", csr, None, x, x, source.t(), target, slope, out, *rest, int(bool(onto)), heads=heads)
    return out, above, facts


def gat_ends(
    target: Tensor, slope: float, out: Tensor, above: Tensor, facts: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    indptr = torch.zeros(target.shape[0] + 1, dtype=torch.int64)
    csr = CSR(indptr, indptr[:0], 0)  # passes the number of rows
    ends, grad_target = out.new_empty(target.shape[1], target.shape[0], 4), target.new_empty(target.shape)
    parts = (target, slope, out, above, facts, grad, ends, grad_target)
    _call("pygdist_gat_ends", csr, None, out, *parts, heads=target.shape[1])
    return ends, grad_target


def gat_grad(
    transposed: CSR, x: Tensor, source: Tensor, slope: float, ends: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    gradients = x.new_empty(x.shape), source.new_empty(source.shape)
    _call("pygdist_gat_grad", transposed, None, x, x, source, slope, ends, grad, *gradients, heads=source.shape[1])
    return gradients


def transpose(csr: CSR, memory: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None) -> CSR:
    """Transpose a matrix whose ids all fit int32."""
    indptr = csr.indptr.new_empty(csr.num_cols + 1)
    memory = memory or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
    index, perm = (memory((csr.num_entries,), csr.index.dtype) for _ in range(2))
    _call("pygdist_transpose", csr, None, csr.index.new_empty(0, 0), indptr, index, perm)
    return CSR(indptr, index, csr.num_rows, perm)


def _call(
    name: str, csr: CSR, values: Tensor | None, like: Tensor, *args: Any, op: str = "copy", heads: int = 1
) -> None:
    """Call a function of the library; ``like`` has the width and dtype of the dense tensors.

    A result among the arguments is contiguous already, so it is written in place; contiguous copies of the others live
    until the call returns. Edge values are ``(E, heads)``, at ``csr.perm`` if there is one.
    """
    values = None if values is None else values.contiguous()
    matrix, _held = csr.native(
        num_features=like.shape[1],
        num_heads=heads if values is None else values.shape[1],
        weight=None if values is None else values.data_ptr(),
        value_bits=8 * like.element_size(),
        op=_OP_CODES[op],
        num_threads=torch.get_num_threads(),
    )
    dense = [value.contiguous() if isinstance(value, Tensor) else value for value in args]
    pointers = [value.data_ptr() if isinstance(value, Tensor) else value for value in dense]
    status = getattr(library.require("this kernel"), name)(ctypes.byref(matrix), *pointers)
    if status == Status.NO_MEMORY:
        raise MemoryError(f"not enough memory for {name}")
    if status != Status.OK:
        raise RuntimeError(f"{name} refused its arguments: {Status(status).name}")
