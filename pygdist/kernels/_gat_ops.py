"""The torch operators behind :func:`pygdist.kernels.gat`; conventions as in :mod:`pygdist.kernels._spmm_ops`.

=====================  ===================================================  =======================
operator               result                                               gradient
=====================  ===================================================  =======================
``pygdist::gat``       ``(N, H C)``, and two inputs of the gradient         ``pygdist::gat_grad``
``pygdist::gat_grad``  ``(M, H C)``, ``(M, H)`` and ``(N, H)``              none
=====================  ===================================================  =======================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.kernels._choose import kernels_for
from pygdist.kernels.csr import CSR
from pygdist.kernels.transpose import transposed_from

__all__ = ["gat_op"]


@torch.library.custom_op("pygdist::gat", mutates_args=())
def gat_op(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    graded: bool,
    transposed_indptr: Tensor | None = None,
    transposed_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weighted sums; with ``graded`` also those over positive scores, and three numbers by row and head."""
    csr = CSR(indptr, index, x.shape[0])
    out: tuple[Tensor, Tensor, Tensor] = kernels_for(x).gat(csr, x, source, target, slope, graded)
    return out


@torch.library.custom_op("pygdist::gat_grad", mutates_args=())
def gat_grad_op(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    source: Tensor,
    target: Tensor,
    slope: float,
    out: Tensor,
    above: Tensor,
    facts: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``x``, ``source`` and ``target``; the matrix is the transpose."""
    kernels, transposed = kernels_for(x), CSR(indptr, index, out.shape[0])
    ends, grad_target = kernels.gat_ends(target, slope, out, above, facts, grad)
    grad_x, grad_source = kernels.gat_grad(transposed, x, source, slope, ends, grad)
    return grad_x, grad_source, grad_target


@gat_op.register_fake
def _(
    indptr: Tensor, index: Tensor, x: Tensor, source: Tensor, target: Tensor, slope: float, graded: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads = target.shape
    above = (rows, x.shape[1]) if graded else (0, 0)
    return x.new_empty(rows, x.shape[1]), x.new_empty(above), x.new_empty((rows, heads, 3) if graded else (0, 0, 0))


@gat_grad_op.register_fake
def _(
    indptr: Tensor, index: Tensor, x: Tensor, source: Tensor, target: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), source.new_empty(source.shape), target.new_empty(target.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    indptr, index, x, source, target, ctx.slope, _, *transposed = inputs
    ctx.save_for_backward(indptr, index, x, source, target, *output, *transposed)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    indptr, index, x, source, target, *output, back_indptr, back_index = ctx.saved_tensors
    back = transposed_from(CSR(indptr, index, x.shape[0]), (back_indptr, back_index, None))
    gradients = gat_grad_op(back.indptr, back.index, x, source, target, ctx.slope, *output, grad)
    wanted = [one if needed else None for one, needed in zip(gradients, ctx.needs_input_grad[2:5], strict=True)]
    return None, None, *wanted, *[None] * 4


gat_op.register_autograd(_backward, setup_context=_setup)
