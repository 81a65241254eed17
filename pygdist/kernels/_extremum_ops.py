"""The torch operators of maxima and minima, behind :func:`pygdist.kernels.spmm`.

Conventions are those of :mod:`pygdist.kernels._spmm_ops`.

================================  ==============================  ===========================
operator                          result                          gradient
================================  ==============================  ===========================
``pygdist::extremum``             ``(N, F)`` and places           by the operators below
``pygdist::share_ties``           ``(N, F)``, of each edge        none
``pygdist::extremum_x_grad``      ``(M, F)``, gradient of ``x``   none
``pygdist::extremum_value_grad``  ``(E, H)``, of edge values      none
================================  ==============================  ===========================

The gradient of ``x`` takes one of two ways. Where rows have many entries and edge values need no gradient, the forward
pass keeps the place of each extremum (int32, see ``pygdist_native.h``), and the backward pass adds each gradient to the
row at its place. Otherwise, and where several entries attain many of the extrema, the backward pass compares all
messages with the extrema again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.kernels._operator import MATRIX, TRANSPOSED, kernels_for, operator
from pygdist.kernels._spmm_ops import back_to_columns
from pygdist.kernels.csr import CSR

_INPUTS = "Tensor x, Tensor? weight, Tensor? perm, str op"


def _places(indptr: Tensor, index: Tensor, x: Tensor, graded: bool) -> Tensor:
    keeps = graded and x.device.type == "cpu" and kernels_for(x).keeps_places(indptr.shape[0] - 1, index.shape[0], x)
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

share_ties_op = operator(
    f"share_ties({MATRIX}, {_INPUTS}, Tensor out, Tensor grad) -> Tensor",
    lambda indptr, index, x, weight, perm, op, out, grad: kernels_for(x).share_ties(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, out, grad
    ),
    fake=lambda indptr, index, x, weight, perm, op, out, grad: torch.empty_like(
        grad, memory_format=torch.contiguous_format
    ),
)

extremum_x_grad_op = operator(
    f"extremum_x_grad({MATRIX}, {_INPUTS}, Tensor out, Tensor places, Tensor grad, Tensor? share, {TRANSPOSED}, "
    "Tensor? transposed_weight=None) -> Tensor",
    lambda *arguments: _gradient_of_x(*arguments),
    fake=lambda indptr, index, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)

extremum_value_grad_op = operator(
    f"extremum_value_grad({MATRIX}, {_INPUTS}, Tensor out, Tensor share) -> Tensor",
    lambda indptr, index, x, weight, perm, op, out, share: kernels_for(x).extremum_value_grad(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, out, share
    ),
    fake=lambda indptr, index, x, weight, *_: torch.empty_like(weight, memory_format=torch.contiguous_format),
)


def _gradient_of_x(
    indptr: Tensor,
    index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    perm: Tensor | None,
    op: str,
    out: Tensor,
    places: Tensor,
    grad: Tensor,
    share: Tensor | None,
    *transposed: Tensor | None,
) -> Tensor:
    # one operator, as the choice depends on values: torch.compile must not trace it
    csr, kernels = CSR(indptr, index, x.shape[0], perm), kernels_for(x)
    if places.numel() and kernels.few_ties(csr, places):
        result: Tensor = kernels.extremum_scatter(csr, x, weight, op, out, places, grad)
        return result
    # torch leaves out last arguments that are the schema's defaults
    all_transposed = [*transposed, *[None] * (4 - len(transposed))]
    back, values = back_to_columns(csr, weight, all_transposed)
    share = kernels.share_ties(csr, x, weight, op, out, grad) if share is None else share
    result = kernels.extremum_grad(back, x, values, op, out, share)
    return result


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    indptr, index, x, weight, perm, ctx.op, _, _, *transposed = inputs
    out, places = output
    ctx.mark_non_differentiable(places)
    ctx.set_materialize_grads(False)  # places would get one
    ctx.save_for_backward(indptr, index, x, weight, perm, out, places, *transposed)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    indptr, index, x, weight, perm, out, places, *transposed = ctx.saved_tensors
    _, _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    if grad is None:
        return (None,) * 12
    forward = indptr, index, x, weight, perm, ctx.op, out
    share = share_ties_op(*forward, grad) if needs_weight else None
    grad_x = extremum_x_grad_op(*forward, places, grad, share, *transposed) if needs_x else None
    grad_weight = extremum_value_grad_op(*forward, share) if needs_weight else None
    return None, None, grad_x, grad_weight, *[None] * 8


extremum_op.register_autograd(_backward, setup_context=_setup)
