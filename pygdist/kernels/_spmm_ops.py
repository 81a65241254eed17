"""The torch operators behind :func:`pygdist.kernels.spmm`: shapes, gradients, and the choice of who computes.

Registered as custom operators so that autograd, ``torch.compile`` and the profiler see one opaque step each. Dense
tensors are two-dimensional and float32 or float64; :func:`pygdist.kernels.spmm` sees to that. A sparse matrix arrives
as its tensors, since operators take no objects.

============================  ==============================================  =======================
operator                      result                                          gradient
============================  ==============================================  =======================
``pygdist::spmm``             ``(N, F)``                                      the three below
``pygdist::share_ties``       ``(N, F)``, max and min only                    none
``pygdist::extremum_grad``    ``(M, F)``, gradient of ``x`` for max and min   none
``pygdist::sddmm``            ``(E)``, gradient of the weights                none
============================  ==============================================  =======================
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from pygdist.kernels import _spmm_native, _spmm_torch
from pygdist.kernels.csr import CSR, transpose
from pygdist.native import library

__all__ = ["spmm_op"]


class _Kernels(Protocol):
    """What :mod:`_spmm_native` and :mod:`_spmm_torch` both offer."""

    def spmm(self, csr: CSR, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor: ...
    def share_ties(self, csr: CSR, x: Tensor, weight: Tensor | None, out: Tensor, grad_out: Tensor) -> Tensor: ...
    def extremum_grad(
        self, transposed: CSR, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor
    ) -> Tensor: ...
    def sddmm(self, csr: CSR, x: Tensor, grad: Tensor, weight: Tensor | None, out: Tensor | None) -> Tensor: ...


def _kernels(x: Tensor) -> _Kernels:
    return _spmm_native if x.device.type == "cpu" and library.load() is not None else _spmm_torch


@torch.library.custom_op("pygdist::spmm", mutates_args=())
def spmm_op(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    transposed_indptr: Tensor | None = None,
    transposed_index: Tensor | None = None,
    transposed_perm: Tensor | None = None,
) -> Tensor:
    """Multiply; the transposed structure is only for the gradient of ``x``, which makes its own if it is missing."""
    return _kernels(x).spmm(CSR(indptr, index, x.shape[0]), x, weight, reduce)


@torch.library.custom_op("pygdist::share_ties", mutates_args=())
def share_ties_op(
    indptr: Tensor, index: Tensor, x: Tensor, weight: Tensor | None, out: Tensor, grad_out: Tensor
) -> Tensor:
    """Divide the gradient of each maximum or minimum by the number of entries that attain it."""
    return _kernels(x).share_ties(CSR(indptr, index, x.shape[0]), x, weight, out, grad_out)


@torch.library.custom_op("pygdist::extremum_grad", mutates_args=())
def extremum_grad_op(
    transposed_indptr: Tensor, transposed_index: Tensor, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor
) -> Tensor:
    """Give each source the shares of the maxima or minima that it attains; ``weight`` is in transposed order."""
    transposed = CSR(transposed_indptr, transposed_index, out.shape[0])
    return _kernels(x).extremum_grad(transposed, x, weight, out, share)


@torch.library.custom_op("pygdist::sddmm", mutates_args=())
def sddmm_op(
    indptr: Tensor, index: Tensor, x: Tensor, grad: Tensor, weight: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Dot products ``<x[j], grad[i]>`` for each entry; with ``out``, over the features whose extremum it attains."""
    return _kernels(x).sddmm(CSR(indptr, index, x.shape[0]), x, grad, weight, out)


@spmm_op.register_fake
def _(indptr: Tensor, index: Tensor, x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(indptr.shape[0] - 1, x.shape[1])


@share_ties_op.register_fake
def _(indptr: Tensor, index: Tensor, x: Tensor, weight: Tensor | None, out: Tensor, grad_out: Tensor) -> Tensor:
    return torch.empty_like(grad_out, memory_format=torch.contiguous_format)


@extremum_grad_op.register_fake
def _(indptr: Tensor, index: Tensor, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@sddmm_op.register_fake
def _(indptr: Tensor, index: Tensor, x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(index.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, index, x, weight, reduce, *transposed = inputs
    extremum = reduce in ("max", "min")
    # A plain sum of rows does not need the rows again: they may be freed.
    keep_x = extremum or (weight is not None and weight.requires_grad)
    ctx.save_for_backward(indptr, index, x if keep_x else None, weight, output if extremum else None, *transposed)
    ctx.reduce = reduce
    ctx.num_cols = x.shape[0]


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    indptr, index, x, weight, out, *transposed = ctx.saved_tensors
    csr = CSR(indptr, index, ctx.num_cols)
    _, _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    if ctx.reduce == "mean":
        grad_out = grad_out / indptr.diff().clamp(min=1).unsqueeze(-1)
    elif out is not None:
        grad_out = share_ties_op(indptr, index, x, weight, out, grad_out)
    grad_x = _grad_x(csr, x, weight, out, grad_out, transposed) if needs_x else None
    grad_weight = sddmm_op(indptr, index, x, grad_out, weight, out) if needs_weight else None
    return None, None, grad_x, grad_weight, None, None, None, None


def _grad_x(
    csr: CSR, x: Tensor | None, weight: Tensor | None, out: Tensor | None, grad: Tensor, given: list[Tensor | None]
) -> Tensor:
    """Carry the gradient of each row back to the columns that it was made of."""
    indptr, index, perm = given
    if indptr is None:
        made = transpose(csr)
        indptr, index, perm = made.indptr, made.index, made.perm
    if weight is not None and perm is not None:
        weight = weight.index_select(0, perm)
    if out is None:
        result: Tensor = spmm_op(indptr, index, grad, weight, "sum")
    else:
        result = extremum_grad_op(indptr, index, x, weight, out, grad)
    return result


spmm_op.register_autograd(_backward, setup_context=_setup_context)
