"""The torch operators behind :mod:`pygdist.kernels.attention`; conventions as in :mod:`pygdist.kernels._spmm_ops`.

==============================  ====================================  ==========================
operator                        result                                gradient
==============================  ====================================  ==========================
``pygdist::edge_softmax``       ``(E, H)``                            the next two
``pygdist::edge_softmax_grad``  ``(E, H)`` and ``(N, H)``             none
``pygdist::sum_edges``          ``(N, H)``                            none
``pygdist::gatv2_scores``       ``(E, H)``                            ``pygdist::gatv2_grad``
``pygdist::gatv2_grad``         ``(N, H C)``, once or twice           none
==============================  ====================================  ==========================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.kernels._choose import kernels_for
from pygdist.kernels.csr import CSR
from pygdist.kernels.transpose import transposed_from

__all__ = ["edge_softmax_op", "gatv2_scores_op"]


@torch.library.custom_op("pygdist::edge_softmax", mutates_args=())
def edge_softmax_op(
    indptr: Tensor,
    index: Tensor,
    num_cols: int,
    source: Tensor | None,
    target: Tensor | None,
    edge: Tensor | None,
    slope: float,
    transposed_indptr: Tensor | None = None,
    transposed_index: Tensor | None = None,
    transposed_perm: Tensor | None = None,
) -> Tensor:
    """Compute, over the entries of each row, the softmax of the leaky ReLU of ``source[j] + target[i] + edge``."""
    return kernels_for(indptr).edge_softmax(CSR(indptr, index, num_cols), source, target, edge, slope)


@torch.library.custom_op("pygdist::edge_softmax_grad", mutates_args=())
def edge_softmax_grad_op(
    indptr: Tensor,
    index: Tensor,
    num_cols: int,
    source: Tensor | None,
    target: Tensor | None,
    edge: Tensor | None,
    slope: float,
    alpha: Tensor,
    grad_alpha: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the scores by entry, and summed by row."""
    csr = CSR(indptr, index, num_cols)
    return kernels_for(alpha).edge_softmax_grad(csr, source, target, edge, slope, alpha, grad_alpha)


@torch.library.custom_op("pygdist::sum_edges", mutates_args=())
def sum_edges_op(indptr: Tensor, index: Tensor, num_cols: int, perm: Tensor | None, values: Tensor) -> Tensor:
    """Sum the edge values of each row."""
    return kernels_for(values).sum_edges(CSR(indptr, index, num_cols, perm), values)


@torch.library.custom_op("pygdist::gatv2_scores", mutates_args=())
def gatv2_scores_op(
    indptr: Tensor,
    index: Tensor,
    source: Tensor,
    target: Tensor,
    attention: Tensor,
    slope: float,
    heads: int,
    transposed_indptr: Tensor | None = None,
    transposed_index: Tensor | None = None,
    transposed_perm: Tensor | None = None,
) -> Tensor:
    """Compute ``<attention, leaky_relu(source[j] + target[i])>`` for each entry and head."""
    csr = CSR(indptr, index, source.shape[0])
    return kernels_for(source).gatv2_scores(csr, source, target, attention, slope, heads)


@torch.library.custom_op("pygdist::gatv2_grad", mutates_args=())
def gatv2_grad_op(
    indptr: Tensor,
    index: Tensor,
    source: Tensor,
    target: Tensor,
    attention: Tensor,
    slope: float,
    perm: Tensor | None,
    grad_scores: Tensor,
    both: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the gradient of ``target`` and, with ``both``, each target's term of the gradient of ``attention``."""
    csr = CSR(indptr, index, source.shape[0], perm)
    return kernels_for(source).gatv2_grad(csr, source, target, attention, slope, grad_scores, both=both)


@edge_softmax_op.register_fake
def _(indptr: Tensor, index: Tensor, num_cols: int, source: Any, target: Any, edge: Any, *args: Any) -> Tensor:
    like: Tensor = next(part for part in (edge, source, target) if part is not None)
    return like.new_empty(index.shape[0], like.shape[1])


@edge_softmax_grad_op.register_fake
def _(
    indptr: Tensor,
    index: Tensor,
    num_cols: int,
    source: Any,
    target: Any,
    edge: Any,
    slope: float,
    alpha: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(alpha), alpha.new_empty(indptr.shape[0] - 1, alpha.shape[1])


@sum_edges_op.register_fake
def _(indptr: Tensor, index: Tensor, num_cols: int, perm: Any, values: Tensor) -> Tensor:
    return values.new_empty(indptr.shape[0] - 1, values.shape[1])


@gatv2_scores_op.register_fake
def _(
    indptr: Tensor, index: Tensor, source: Tensor, target: Tensor, attention: Tensor, slope: float, heads: int, *_: Any
) -> Tensor:
    return source.new_empty(index.shape[0], heads)


@gatv2_grad_op.register_fake
def _(
    indptr: Tensor,
    index: Tensor,
    source: Tensor,
    target: Tensor,
    attention: Tensor,
    slope: float,
    perm: Any,
    grad_scores: Tensor,
    both: bool,
) -> tuple[Tensor, Tensor]:
    return target.new_empty(target.shape), target.new_empty(target.shape if both else (0, 0))


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, index, ctx.num_cols, source, target, edge, ctx.slope, *transposed = inputs
    ctx.save_for_backward(indptr, index, source, target, edge, output, *transposed)


def _softmax_backward(ctx: Any, grad_alpha: Tensor) -> tuple[Tensor | None, ...]:
    indptr, index, source, target, edge, alpha, *transposed = ctx.saved_tensors
    csr = CSR(indptr, index, ctx.num_cols)
    parts = (indptr, index, ctx.num_cols, source, target, edge, ctx.slope, alpha, grad_alpha)
    grad_score, grad_target = edge_softmax_grad_op(*parts)
    _, _, _, needs_source, needs_target, needs_edge, *_ = ctx.needs_input_grad
    grad_source = None
    if needs_source:
        back = transposed_from(csr, transposed)
        grad_source = sum_edges_op(back.indptr, back.index, back.num_cols, back.perm, grad_score)
    wanted = (grad_source, grad_target if needs_target else None, grad_score if needs_edge else None)
    return None, None, None, *wanted, *[None] * 4


def _setup_gatv2(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, index, source, target, attention, ctx.slope, _, *transposed = inputs
    ctx.save_for_backward(indptr, index, source, target, attention, *transposed)


def _gatv2_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, index, source, target, attention, *transposed = ctx.saved_tensors
    grad = grad.contiguous()
    _, _, needs_source, needs_target, needs_attention, *_ = ctx.needs_input_grad
    grad_source = grad_target = grad_attention = None
    if needs_target or needs_attention:
        grad_target, by_row = gatv2_grad_op(indptr, index, source, target, attention, ctx.slope, None, grad, True)
        grad_attention = by_row.sum(dim=0)
    if needs_source:
        back = transposed_from(CSR(indptr, index, source.shape[0]), transposed)
        swapped = (target, source, attention, ctx.slope, back.perm, grad)
        grad_source, _ = gatv2_grad_op(back.indptr, back.index, *swapped, False)
    return None, None, grad_source, grad_target, grad_attention, *[None] * 5


edge_softmax_op.register_autograd(_softmax_backward, setup_context=_setup_softmax)
gatv2_scores_op.register_autograd(_gatv2_backward, setup_context=_setup_gatv2)
