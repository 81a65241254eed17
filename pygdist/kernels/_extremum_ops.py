"""The torch operators of maxima and minima, behind :func:`pygdist.kernels.spmm`.

Conventions are those of :mod:`pygdist.kernels._spmm_ops`.

================================  ==============================  ===========================
operator                          result                          gradient
================================  ==============================  ===========================
``pygdist::extremum``             ``(N, F)`` and places           by the operators below
``pygdist::extremum_scatter``     ``(M, F)``, gradient of ``x``   none
``pygdist::share_ties``           ``(N, F)``                      none
``pygdist::extremum_grad``        ``(M, F)``, gradient of ``x``   none
``pygdist::extremum_value_grad``  ``(E, H)``, of edge values      none
================================  ==============================  ===========================

The gradient of ``x`` takes one of two ways. Where rows have many entries, the forward pass keeps the place of each
extremum (int32, see ``pygdist_native.h``), and the backward pass adds each gradient to the row at its place. Otherwise,
and where more than two entries attain many of the extrema, the backward pass compares all messages with the extrema
again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.kernels._operator import MATRIX, TRANSPOSED, kernels_for, operator
from pygdist.kernels._spmm_ops import back_to_columns
from pygdist.kernels.csr import CSR

SEVERAL = -2
"""The place of an extremum that more than two entries attain."""

_MANY_TIES = 64
"""Ties are looked for one by one if they are at most one in so many extrema."""

_INPUTS = "Tensor x, Tensor? weight, Tensor? perm, str op"
_EXTREMA = f"{_INPUTS}, Tensor out, Tensor grad"


def _places(indptr: Tensor, index: Tensor, x: Tensor, graded: bool) -> Tensor:
    keeps = graded and kernels_for(x).keeps_places(indptr.shape[0] - 1, x.shape[0], index.shape[0])
    return x.new_empty((indptr.shape[0] - 1, x.shape[1]) if keeps else (0, 0), dtype=torch.int32)


# only the gradient of x uses the transpose, and makes it if it is not given
extremum_op = operator(
    f"extremum({MATRIX}, {_INPUTS}, str reduce, bool graded, {TRANSPOSED}, Tensor? transposed_weight=None)"
    " -> (Tensor, Tensor)",
    lambda indptr, index, x, weight, perm, op, reduce, graded, *_: kernels_for(x).extremum(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, reduce, _places(indptr, index, x, graded)
    ),
    fake=lambda indptr, index, x, weight, perm, op, reduce, graded, *_: (
        x.new_empty(indptr.shape[0] - 1, x.shape[1]),
        _places(indptr, index, x, graded),
    ),
)

extremum_scatter_op = operator(
    f"extremum_scatter({MATRIX}, {_INPUTS}, Tensor out, Tensor places, Tensor grad) -> Tensor",
    lambda indptr, index, x, weight, perm, op, out, places, grad: kernels_for(x).extremum_scatter(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, out, places, grad
    ),
    fake=lambda indptr, index, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)

share_ties_op = operator(
    f"share_ties({MATRIX}, {_EXTREMA}) -> Tensor",
    lambda indptr, index, x, weight, perm, op, out, grad: kernels_for(x).share_ties(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, out, grad
    ),
    fake=lambda *args: torch.empty_like(args[-1], memory_format=torch.contiguous_format),
)

# the matrix is the transpose
extremum_grad_op = operator(
    f"extremum_grad({MATRIX}, {_EXTREMA}) -> Tensor",
    lambda indptr, index, x, weight, perm, op, out, share: kernels_for(x).extremum_grad(
        CSR(indptr, index, out.shape[0], perm), x, weight, op, out, share
    ),
    fake=lambda indptr, index, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)

extremum_value_grad_op = operator(
    f"extremum_value_grad({MATRIX}, {_EXTREMA}) -> Tensor",
    lambda indptr, index, x, weight, perm, op, out, share: kernels_for(x).extremum_value_grad(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, out, share
    ),
    fake=lambda indptr, index, x, weight, *_: torch.empty_like(weight, memory_format=torch.contiguous_format),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    indptr, index, x, weight, perm, ctx.op, _, _, *transposed = inputs
    out, places = output
    ctx.mark_non_differentiable(places)
    ctx.save_for_backward(indptr, index, x, weight, perm, out, places, *transposed)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    indptr, index, x, weight, perm, out, places, *transposed = ctx.saved_tensors
    _, _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    forward = indptr, index, x, weight, perm, ctx.op, out
    grad_x = grad_weight = None
    if needs_x and not needs_weight and places.numel() and _few_ties(places):
        grad_x = extremum_scatter_op(*forward, places, grad)
    elif needs_x or needs_weight:
        share = share_ties_op(*forward, grad)
        if needs_weight:
            grad_weight = extremum_value_grad_op(*forward, share)
        if needs_x:
            back, values = back_to_columns(CSR(indptr, index, x.shape[0], perm), weight, transposed)
            grad_x = extremum_grad_op(back.indptr, back.index, x, values, back.perm, ctx.op, out, share)
    return None, None, grad_x, grad_weight, *[None] * 8


def _few_ties(places: Tensor) -> bool:
    return int((places == SEVERAL).sum()) * _MANY_TIES <= places.numel()


extremum_op.register_autograd(_backward, setup_context=_setup)
