"""The torch operators behind :mod:`pygdist.kernels.attention`; conventions as in :mod:`pygdist.kernels._spmm_ops`.

==============================  ==================================================  ==========================
operator                        result                                              gradient
==============================  ==================================================  ==========================
``pygdist::edge_softmax``       ``(E, H)``                                          the next two
``pygdist::edge_softmax_grad``  ``(E, H)`` by entry and ``(N, H)`` summed by row    none
``pygdist::sum_edges``          ``(N, H)``                                          none
``pygdist::gatv2_scores``       ``(E, H)``                                          ``pygdist::gatv2_grad``
``pygdist::gatv2_grad``         ``(N, H C)``, once or twice                         none
``pygdist::gat``                ``(N, H C)``, and two inputs of the gradient        ``pygdist::gat_grad``
``pygdist::gat_grad``           ``(M, H C)``, ``(M, H)`` and ``(N, H)``             none
==============================  ==================================================  ==========================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.kernels._operator import MATRIX, TRANSPOSED, kernels_for, operator
from pygdist.kernels.csr import CSR
from pygdist.kernels.transpose import transposed_from

_TERMS = "Tensor? source, Tensor? target, Tensor? edge, float slope"
_GATV2 = "Tensor source, Tensor target, Tensor attention, float slope"
_GAT = "Tensor x, Tensor source, Tensor target, float slope"


def _fake_softmax(indptr: Tensor, index: Tensor, num_cols: int, *terms: Any) -> Tensor:
    like: Tensor = next(term for term in terms if term is not None)
    return like.new_empty(index.shape[0], like.shape[1])


edge_softmax_op = operator(
    f"edge_softmax({MATRIX}, SymInt num_cols, {_TERMS}, {TRANSPOSED}) -> Tensor",
    lambda indptr, index, num_cols, source, target, edge, slope, *_: kernels_for(indptr).edge_softmax(
        CSR(indptr, index, num_cols), source, target, edge, slope
    ),
    fake=_fake_softmax,
)

edge_softmax_grad_op = operator(
    f"edge_softmax_grad({MATRIX}, SymInt num_cols, {_TERMS}, Tensor alpha, Tensor grad_alpha) -> (Tensor, Tensor)",
    lambda indptr, index, num_cols, *args: kernels_for(indptr).edge_softmax_grad(CSR(indptr, index, num_cols), *args),
    fake=lambda indptr, *args: (torch.empty_like(args[-2]), args[-2].new_empty(indptr.shape[0] - 1, args[-2].shape[1])),
)

sum_edges_op = operator(
    f"sum_edges({MATRIX}, SymInt num_cols, Tensor? perm, Tensor values) -> Tensor",
    lambda indptr, index, num_cols, perm, values: kernels_for(values).sum_edges(
        CSR(indptr, index, num_cols, perm), values
    ),
    fake=lambda indptr, index, num_cols, perm, values: values.new_empty(indptr.shape[0] - 1, values.shape[1]),
)

gatv2_scores_op = operator(
    f"gatv2_scores({MATRIX}, {_GATV2}, SymInt heads, {TRANSPOSED}) -> Tensor",
    lambda indptr, index, source, target, attention, slope, heads, *_: kernels_for(source).gatv2_scores(
        CSR(indptr, index, source.shape[0]), source, target, attention, slope, heads
    ),
    fake=lambda indptr, index, source, target, attention, slope, heads, *_: source.new_empty(index.shape[0], heads),
)

# with ``both`` also the term of each target in the gradient of ``attention``
gatv2_grad_op = operator(
    f"gatv2_grad({MATRIX}, {_GATV2}, Tensor? perm, Tensor grad_scores, bool both) -> (Tensor, Tensor)",
    lambda indptr, index, source, target, attention, slope, perm, grad, both: kernels_for(source).gatv2_grad(
        CSR(indptr, index, source.shape[0], perm), source, target, attention, slope, grad, both=both
    ),
    fake=lambda indptr, index, source, target, *args: (
        target.new_empty(target.shape),
        target.new_empty(target.shape if args[-1] else (0, 0)),
    ),
)


def _fake_gat(
    indptr: Tensor, index: Tensor, x: Tensor, source: Tensor, target: Tensor, slope: float, graded: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads = target.shape
    above = (rows, x.shape[1]) if graded else (0, 0)
    return x.new_empty(rows, x.shape[1]), x.new_empty(above), x.new_empty((rows, heads, 3) if graded else (0, 0, 0))


# with ``graded`` also the sums over positive scores, and three numbers by row and head
gat_op = operator(
    f"gat({MATRIX}, {_GAT}, bool graded, Tensor? transposed_indptr=None, Tensor? transposed_index=None)"
    " -> (Tensor, Tensor, Tensor)",
    lambda indptr, index, x, source, target, slope, graded, *_: kernels_for(x).gat(
        CSR(indptr, index, x.shape[0]), x, source, target, slope, graded
    ),
    fake=_fake_gat,
)


def _gat_grad(
    indptr: Tensor, index: Tensor, x: Tensor, source: Tensor, target: Tensor, slope: float, *saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``x``, ``source`` and ``target``; the matrix is the transpose."""
    out, above, facts, grad = saved
    kernels, transposed = kernels_for(x), CSR(indptr, index, out.shape[0])
    ends, grad_target = kernels.gat_ends(target, slope, out, above, facts, grad)
    grad_x, grad_source = kernels.gat_grad(transposed, x, source, slope, ends, grad)
    return grad_x, grad_source, grad_target


gat_grad_op = operator(
    f"gat_grad({MATRIX}, {_GAT}, Tensor out, Tensor above, Tensor facts, Tensor grad) -> (Tensor, Tensor, Tensor)",
    _gat_grad,
    fake=lambda indptr, index, *args: tuple(part.new_empty(part.shape) for part in args[:3]),
)


def _setup_softmax(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, index, ctx.num_cols, source, target, edge, ctx.slope, *transposed = inputs
    ctx.save_for_backward(indptr, index, source, target, edge, output, *transposed)


def _softmax_backward(ctx: Any, grad_alpha: Tensor) -> tuple[Tensor | None, ...]:
    indptr, index, source, target, edge, alpha, *transposed = ctx.saved_tensors
    terms = (source, target, edge, ctx.slope)
    grad_score, grad_target = edge_softmax_grad_op(indptr, index, ctx.num_cols, *terms, alpha, grad_alpha)
    _, _, _, needs_source, needs_target, needs_edge, *_ = ctx.needs_input_grad
    grad_source = None
    if needs_source:
        back = transposed_from(CSR(indptr, index, ctx.num_cols), transposed)
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


def _setup_gat(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    indptr, index, x, source, target, ctx.slope, _, *transposed = inputs
    ctx.save_for_backward(indptr, index, x, source, target, *output, *transposed)


def _gat_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    indptr, index, x, source, target, *output, back_indptr, back_index = ctx.saved_tensors
    back = transposed_from(CSR(indptr, index, x.shape[0]), (back_indptr, back_index, None))
    gradients = gat_grad_op(back.indptr, back.index, x, source, target, ctx.slope, *output, grad)
    wanted = [one if needed else None for one, needed in zip(gradients, ctx.needs_input_grad[2:5], strict=True)]
    return None, None, *wanted, *[None] * 4


edge_softmax_op.register_autograd(_softmax_backward, setup_context=_setup_softmax)
gatv2_scores_op.register_autograd(_gatv2_backward, setup_context=_setup_gatv2)
gat_op.register_autograd(_gat_backward, setup_context=_setup_gat)
