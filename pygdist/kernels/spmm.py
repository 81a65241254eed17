"""The sparse-dense product of message passing, ``out[i] = reduce over edges (j -> i) of w_ij * x[j]``.

This is the door: it checks arguments, brings features and weights to one dtype and shape, and calls the torch operator
``pygdist::spmm`` of :mod:`pygdist.kernels._spmm_ops`, which knows the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pygdist.kernels._spmm_ops import spmm_op
from pygdist.kernels.csr import CSR

__all__ = ["Reduce", "spmm"]

Reduce: TypeAlias = Literal["sum", "mean", "max", "min"]


def spmm(
    csr: CSR,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
    *,
    transposed: CSR | Callable[[], CSR] | None = None,
) -> Tensor:
    r"""Aggregate the rows of ``x`` along the entries of a sparse matrix.

    .. math::
        \mathbf{y}_i = \mathrm{reduce}_{e = (i, j)} \; w_e \, \mathbf{x}_j

    A row without entries is 0, whatever the reduction, and ``"mean"`` divides by the number of entries, not by the sum
    of weights, both as in PyG. Values and gradients are those of PyG's ``scatter``: the gradient of ``"max"`` and
    ``"min"`` is shared evenly among the entries that attain the extremum, and an extremum of exactly 0 has one share
    more that goes nowhere (``torch.scatter_reduce`` counts the zero it starts from). On the CPU the result is the same
    bit for bit for any number of threads.

    Memory: the result and, for gradients, the transposed structure; with the native library nothing of size
    :math:`E \times F`.

    Args:
        csr: Structure of the matrix. Its columns must be in range (:meth:`CSR.validate`); this is not checked here.
        x: Features of the sources, of any floating dtype; float16 and bfloat16 are computed in float32.
        weight: Value of each entry, in the order of ``csr``; ``None`` stands for ones.
        reduce: How the messages of one row are combined.
        transposed: ``transpose(csr)``, or a function that returns it and is called only if ``x`` needs a gradient.
            Give it where the structure is used again; without it, each backward pass makes its own.

    Shapes:
        ``x`` is :math:`(M)` or :math:`(M, *)`, ``weight`` :math:`(E)`, the result :math:`(N)` or :math:`(N, *)`.

    Returns:
        The aggregated rows, in the dtype that ``weight * x`` has.

    Raises:
        ValueError: If a shape, dtype, device or ``reduce`` does not fit.
    """
    _check(csr, x, weight, reduce)
    out_dtype = x.dtype if weight is None else torch.result_type(x, weight)
    work_dtype = torch.promote_types(out_dtype, torch.float32)
    backward: CSR | None = None
    if x.requires_grad and torch.is_grad_enabled():
        backward = transposed() if callable(transposed) else transposed
        if backward is not None:
            _check_transposed(csr, backward)
    out: Tensor = spmm_op(
        csr.indptr,
        csr.index,
        x.reshape(csr.num_cols, x.shape[1:].numel()).to(work_dtype),
        None if weight is None else weight.to(work_dtype),
        reduce,
        *((None, None, None) if backward is None else (backward.indptr, backward.index, backward.perm)),
    )
    return out.reshape(csr.num_rows, *x.shape[1:]).to(out_dtype)


def _check(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str) -> None:
    if reduce not in get_args(Reduce):
        raise ValueError(f"reduce must be one of {', '.join(get_args(Reduce))}, got {reduce!r}")
    if x.dim() == 0 or x.shape[0] != csr.num_cols:
        raise ValueError(f"x must have one row per column of the matrix ({csr.num_cols}), got shape {tuple(x.shape)}")
    if weight is not None and weight.shape != csr.index.shape:
        raise ValueError(f"weight must have shape {tuple(csr.index.shape)}, got {tuple(weight.shape)}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
        if tensor is not None and tensor.device != csr.indptr.device:
            raise ValueError(f"{name} is on {tensor.device}, the matrix on {csr.indptr.device}: move one of them")


def _check_transposed(csr: CSR, transposed: CSR) -> None:
    expected = (csr.num_cols, csr.num_rows, csr.num_entries)
    found = (transposed.num_rows, transposed.num_cols, transposed.num_entries)
    if expected != found:
        raise ValueError(f"transposed must have (rows, columns, edges) = {expected}, got {found}")
