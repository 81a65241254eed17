"""The torch operators of sums and means, behind :func:`pygdist.kernels.spmm` and :func:`pygdist.kernels.sddmm`.

Dense tensors are two-dimensional and edge values are ``(E, H)``; the callers see to that. A sparse matrix is passed as
its tensors, since operators take no objects; ``perm`` holds the position of each entry's value.

========================  ============================  ===========================================
operator                  result                        gradient
========================  ============================  ===========================================
``pygdist::spmm``         ``(N, F)``                    two ``pygdist::spmm``, ``pygdist::sddmm``
``pygdist::spmm_into``    none, writes into ``(N, F)``  none
``pygdist::sddmm``        ``(E, H)``                    two ``pygdist::spmm``
========================  ============================  ===========================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.kernels._operator import MATRIX, TRANSPOSED, kernels_for, operator
from pygdist.kernels.csr import CSR
from pygdist.kernels.transpose import transposed_from

# only the gradient of x uses the transpose, and makes it if it is not given
spmm_op = operator(
    f"spmm({MATRIX}, Tensor x, Tensor? weight, Tensor? perm, str op, str reduce, {TRANSPOSED}, "
    "Tensor? transposed_weight=None) -> Tensor",
    lambda indptr, index, x, weight, perm, op, reduce, *_: kernels_for(x).spmm(
        CSR(indptr, index, x.shape[0], perm), x, weight, op, reduce
    ),
    fake=lambda indptr, index, x, *_: x.new_empty(indptr.shape[0] - 1, x.shape[1]),
)

spmm_into_op = operator(
    f"spmm_into(Tensor(a!) out, {MATRIX}, Tensor x, Tensor? weight, bool onto) -> ()",
    lambda out, indptr, index, x, weight, onto: kernels_for(x).spmm_into(
        out, CSR(indptr, index, x.shape[0]), x, weight, onto=onto
    ),
)

sddmm_op = operator(
    f"sddmm({MATRIX}, Tensor x, Tensor y, Tensor? perm, SymInt heads, {TRANSPOSED}) -> Tensor",
    lambda indptr, index, x, y, perm, heads, *_: kernels_for(x).sddmm(
        CSR(indptr, index, x.shape[0], perm), x, y, heads
    ),
    fake=lambda indptr, index, x, y, perm, heads, *_: x.new_empty(
        index.shape[0], heads, dtype=torch.promote_types(x.dtype, torch.float32)
    ),
)


def _setup_spmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, index, x, weight, perm, ctx.op, ctx.reduce, *transposed = inputs
    # A plain sum of rows does not need the rows again: they may be freed.
    weight_needs_x = weight is not None and weight.requires_grad and ctx.op == "mul"
    ctx.save_for_backward(indptr, index, x if weight_needs_x else None, weight, perm, *transposed)
    ctx.num_cols = x.shape[0]


def _spmm_backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    indptr, index, x, weight, perm, *transposed = ctx.saved_tensors
    csr = CSR(indptr, index, ctx.num_cols, perm)
    _, _, needs_x, needs_weight, *_ = ctx.needs_input_grad
    if ctx.reduce == "mean":
        grad_out = grad_out / indptr.diff().clamp(min=1).unsqueeze(-1)
    grad_x = _grad_x(ctx.op, csr, weight, grad_out, transposed) if needs_x else None
    grad_weight = _grad_weight(ctx.op, csr, x, weight, grad_out) if needs_weight else None
    return None, None, grad_x, grad_weight, *[None] * 7


def _grad_x(op: str, csr: CSR, weight: Tensor | None, grad: Tensor, transposed: list[Any]) -> Tensor:
    """Carry the gradient of each row back to the columns that it was made of."""
    back, weight = back_to_columns(csr, weight, transposed)
    values = (weight, back.perm, op) if op == "mul" else (None, None, "copy")
    result: Tensor = spmm_op(back.indptr, back.index, grad, *values, "sum")
    return result


def back_to_columns(csr: CSR, weight: Tensor | None, transposed: list[Any]) -> tuple[CSR, Tensor | None]:
    """Return the transposed matrix and the edge values that its ``perm`` points into.

    Args:
        csr: The matrix.
        weight: Its edge values.
        transposed: Offsets, columns, positions and edge values of the transpose, each as far as it is known.
    """
    *tensors, permuted_weight = transposed
    back = transposed_from(csr, tensors)
    perm = back.perm
    if weight is not None and permuted_weight is not None:
        weight, perm = permuted_weight, None
    elif csr.perm is not None and perm is not None:
        perm = csr.perm.index_select(0, perm)
    return CSR(back.indptr, back.index, csr.num_rows, perm), weight


def _grad_weight(op: str, csr: CSR, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    if op == "mul":
        result: Tensor = sddmm_op(csr.indptr, csr.index, x, grad, csr.perm, weight.shape[1]).to(weight.dtype)
        return result
    by_row = grad.reshape(grad.shape[0], weight.shape[1], grad.shape[1] // weight.shape[1]).sum(dim=2)
    result = by_row.index_select(0, csr.row_index()).to(weight.dtype)
    return result if csr.perm is None else torch.empty_like(result).index_copy(0, csr.perm.long(), result)


def _setup_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indptr, index, x, y, perm, ctx.heads, *transposed = inputs
    ctx.save_for_backward(indptr, index, x, y, perm, *transposed)


def _sddmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, index, x, y, perm, *transposed = ctx.saved_tensors
    _, _, needs_x, needs_y, *_ = ctx.needs_input_grad
    grad_x = grad_y = None
    if needs_x:
        grad_x = _grad_x("mul", CSR(indptr, index, x.shape[0], perm), grad, y, [*transposed, None])
    if needs_y:
        grad_y = spmm_op(indptr, index, x, grad, perm, "mul", "sum")
    return None, None, grad_x, grad_y, *[None] * 5


spmm_op.register_autograd(_spmm_backward, setup_context=_setup_spmm)
sddmm_op.register_autograd(_sddmm_backward, setup_context=_setup_sddmm)
