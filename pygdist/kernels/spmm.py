"""The sparse-dense product of message passing, ``out[i] = reduce over edges (j -> i) of w_ij * x[j]``, and the reverse.

This is the door: it checks arguments, brings features and weights to one dtype and shape, and calls the torch operators
of :mod:`pygdist.kernels._spmm_ops`, which know the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pygdist.kernels._spmm_ops import sddmm_op, spmm_op
from pygdist.kernels.csr import CSR

__all__ = ["EdgeOp", "Reduce", "Transposed", "resolve_transposed", "sddmm", "spmm"]

Reduce: TypeAlias = Literal["sum", "mean", "max", "min"]
EdgeOp: TypeAlias = Literal["mul", "add", "sub", "div"]
Transposed: TypeAlias = CSR | Callable[[], CSR] | None


def spmm(
    csr: CSR,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
    *,
    op: EdgeOp = "mul",
    transposed: Transposed = None,
    transposed_weight: Tensor | Callable[[], Tensor] | None = None,
) -> Tensor:
    r"""Aggregate the rows of ``x`` along the entries of a sparse matrix.

    .. math::
        \mathbf{y}_i = \mathrm{reduce}_{e = (i, j)} \; \mathbf{x}_j \otimes w_e

    with :math:`\otimes` one of ``x * w``, ``x + w``, ``x - w``, ``x / w``, or ``x`` alone without weights: the binary
    and reduction operators that GNN layers use (DistGNN, Table 1). A row without entries is 0, whatever the reduction,
    and ``"mean"`` divides by the number of entries, not by the sum of weights, both as in PyG. Values and gradients are
    those of PyG's ``scatter``: the gradient of ``"max"`` and ``"min"`` is shared evenly among the entries that attain
    the extremum, and an extremum of exactly 0 has one share more that goes nowhere (``torch.scatter_reduce`` counts the
    zero it starts from). On the CPU the result is the same bit for bit for any number of threads.

    Sums and means can be differentiated twice; the gradient of ``"max"`` and ``"min"`` cannot be.

    Memory: the result and, for gradients, the transposed structure; with the native library nothing of size
    :math:`E \times F`.

    Args:
        csr: Structure of the matrix. Its columns must be in range (:meth:`CSR.validate`); this is not checked here.
        x: Features of the sources, of any floating dtype. bfloat16 is stored as such and summed in float32; float16,
            and maxima and minima of bfloat16, are computed in float32.
        weight: Value of each entry, in the order of ``csr``, or one for each head; ``None`` stands for ``x`` alone.
        reduce: How the messages of one row are combined.
        op: How a value meets a row.
        transposed: ``transpose(csr)``, or a function that returns it and is called only if ``x`` needs a gradient.
            Give it where the structure is used again; without it, each backward pass makes its own.
        transposed_weight: ``weight[transposed.perm]``, or a function that returns it, where the weights stay the same:
            the backward pass then need not look them up one by one.

    Shapes:
        ``x`` is :math:`(M)` or :math:`(M, *)`, ``weight`` :math:`(E)`, the result :math:`(N)` or :math:`(N, *)`. With
        :math:`H` heads ``x`` is :math:`(M, H, *)`, ``weight`` :math:`(E, H)` and the result :math:`(N, H, *)`.

    Returns:
        The aggregated rows, in the dtype that ``weight * x`` has.

    Raises:
        ValueError: If a shape, dtype, device, ``reduce`` or ``op`` does not fit.
    """
    _check(csr, x, weight, reduce, op)
    out_dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    half = out_dtype == torch.bfloat16 and reduce in ("sum", "mean")
    work_dtype = out_dtype if half else torch.promote_types(out_dtype, torch.float32)
    backward, backward_weight = resolve_transposed(csr, transposed, x), None
    if weight is not None:
        weight = weight.to(torch.promote_types(work_dtype, torch.float32))
        weight = weight.unsqueeze(1) if weight.dim() == 1 else weight
        if backward is not None and op == "mul" and transposed_weight is not None:
            backward_weight = transposed_weight() if callable(transposed_weight) else transposed_weight
            backward_weight = backward_weight.to(weight.dtype).view(weight.shape)
        weight = {"sub": torch.neg, "div": torch.reciprocal}.get(op, lambda values: values)(weight)
    out: Tensor = spmm_op(
        csr.indptr,
        csr.index,
        x.reshape(csr.num_cols, x.shape[1:].numel()).to(work_dtype),
        weight,
        None,
        "copy" if weight is None else {"sub": "add", "div": "mul"}.get(op, op),
        reduce,
        *((None, None, None) if backward is None else (backward.indptr, backward.index, backward.perm)),
        backward_weight,
    )
    return out.reshape(csr.num_rows, *x.shape[1:]).to(out_dtype)


def sddmm(csr: CSR, x: Tensor, y: Tensor, *, transposed: Transposed = None) -> Tensor:
    r"""Dot products of source and destination rows along the entries of a sparse matrix.

    .. math::
        s_{e,h} = \langle \mathbf{x}_{j,h}, \mathbf{y}_{i,h} \rangle \quad \text{for each entry } e = (i, j)

    Args:
        csr: Structure of the matrix.
        x: Features of the sources.
        y: Features of the destinations, in the dtype of ``x``.
        transposed: As for :func:`spmm`; used for the gradient of ``x``.

    Shapes:
        ``x`` is :math:`(M, H, C)`, ``y`` :math:`(N, H, C)`, the result :math:`(E, H)`.

    Returns:
        One value for each entry and head, in the dtype of ``x``; sums are kept in float32 at least.

    Raises:
        ValueError: If a shape, dtype or device does not fit.
    """
    if x.dim() != 3 or y.dim() != 3 or x.shape[1:] != y.shape[1:]:
        raise ValueError(f"x and y must be (rows, heads, channels), got {tuple(x.shape)} and {tuple(y.shape)}")
    if x.shape[0] != csr.num_cols or y.shape[0] != csr.num_rows:
        raise ValueError(
            f"x and y must have one row per column ({csr.num_cols}) and per row ({csr.num_rows}) of the matrix, "
            f"got {x.shape[0]} and {y.shape[0]}"
        )
    if not x.is_floating_point() or x.dtype != y.dtype:
        raise ValueError(f"x and y must be of one floating-point dtype, got {x.dtype} and {y.dtype}")
    if x.device != csr.indptr.device or y.device != csr.indptr.device:
        raise ValueError(f"x is on {x.device}, y on {y.device}, the matrix on {csr.indptr.device}: move them to one")
    backward = resolve_transposed(csr, transposed, x)
    dtype = x.dtype if x.dtype == torch.bfloat16 else torch.promote_types(x.dtype, torch.float32)
    out: Tensor = sddmm_op(
        csr.indptr,
        csr.index,
        x.flatten(1).to(dtype),
        y.flatten(1).to(dtype),
        None,
        x.shape[1],
        *((None, None, None) if backward is None else (backward.indptr, backward.index, backward.perm)),
    )
    return out.to(x.dtype)


def resolve_transposed(csr: CSR, transposed: Transposed, *inputs: Tensor | None) -> CSR | None:
    """The transposed matrix, if one of ``inputs`` needs a gradient and it was given."""
    if not torch.is_grad_enabled() or not any(value is not None and value.requires_grad for value in inputs):
        return None
    found = transposed() if callable(transposed) else transposed
    if found is not None:
        expected = (csr.num_cols, csr.num_rows, csr.num_entries)
        shape = (found.num_rows, found.num_cols, found.num_entries)
        if expected != shape:
            raise ValueError(f"transposed must have (rows, columns, edges) = {expected}, got {shape}")
    return found


def _check(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str, op: str) -> None:
    if reduce not in get_args(Reduce):
        raise ValueError(f"reduce must be one of {', '.join(get_args(Reduce))}, got {reduce!r}")
    if op not in get_args(EdgeOp):
        raise ValueError(f"op must be one of {', '.join(get_args(EdgeOp))}, got {op!r}")
    if x.dim() == 0 or x.shape[0] != csr.num_cols:
        raise ValueError(f"x must have one row per column of the matrix ({csr.num_cols}), got shape {tuple(x.shape)}")
    if weight is not None and weight.dim() == 2:
        if x.dim() < 2 or weight.shape[0] != csr.num_entries or weight.shape[1] != x.shape[1]:
            raise ValueError(
                f"weight of {csr.num_entries} edges by heads needs x of shape (rows, heads, ...), "
                f"got weight {tuple(weight.shape)} and x {tuple(x.shape)}"
            )
    elif weight is not None and weight.shape != csr.index.shape:
        raise ValueError(f"weight must have shape {tuple(csr.index.shape)}, got {tuple(weight.shape)}")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be a floating-point tensor, got {tensor.dtype}")
        if tensor is not None and tensor.device != csr.indptr.device:
            raise ValueError(f"{name} is on {tensor.device}, the matrix on {csr.indptr.device}: move one of them")
