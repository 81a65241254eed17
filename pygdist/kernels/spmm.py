r"""The sparse-dense product of message passing, ``out[i] = reduce over edges (j -> i) of w_ij * x[j]``, and its like.

The functions here check arguments, bring features and weights to one dtype and shape, and call the torch operators of
:mod:`pygdist.kernels._spmm_ops` and :mod:`pygdist.kernels._extremum_ops`, which know the gradients. Values and
gradients are those of PyG's ``scatter``:

- a row without entries is 0, whatever the reduction
- ``"mean"`` divides by the number of entries, not by the sum of weights
- the gradient of ``"max"`` and ``"min"`` is shared evenly among the entries that attain the extremum; at an extremum of
  exactly 0 one more share is lost (``torch.scatter_reduce`` counts the zero that it starts from)

On the CPU, results are the same bit for bit for any number of threads. Sums and means can be differentiated twice,
maxima and minima once. Memory: the result and, for gradients, the transposed structure; with the native library nothing
of size :math:`E \times F`. Maxima and minima over rows of many entries also keep an int32 for each value of the result,
for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from pygdist.kernels._extremum_ops import extremum_op
from pygdist.kernels._spmm_ops import sddmm_op, spmm_op
from pygdist.kernels.csr import CSR

Reduce: TypeAlias = Literal["sum", "mean", "max", "min"]
EdgeOp: TypeAlias = Literal["mul", "add", "sub", "div"]
Transposed: TypeAlias = CSR | Callable[[], CSR] | None
TransposedWeight: TypeAlias = Tensor | Callable[[], Tensor] | None


def spmm(
    csr: CSR,
    x: Tensor,
    weight: Tensor | None = None,
    reduce: Reduce = "sum",
    *,
    op: EdgeOp = "mul",
    transposed: Transposed = None,
    transposed_weight: TransposedWeight = None,
) -> Tensor:
    r"""Aggregate the rows of ``x`` along the entries of a sparse matrix.

    .. math::
        \mathbf{y}_i = \mathrm{reduce}_{e = (i, j)} \; \mathbf{x}_j \otimes w_e

    where :math:`\otimes` is one of ``x * w``, ``x + w``, ``x - w``, ``x / w``, or ``x`` alone if there are no weights.
    These are the operators that GNN layers use (DistGNN, Table 1).

    Args:
        csr: Structure of the matrix. Its columns must be in range; only :meth:`CSR.validate` checks that.
        x: Features of the sources, of any floating dtype. For sums and means, bfloat16, and on GPUs float16, are read
            as they are stored and summed in float32. Other rows of 16 bits are converted to float32 first.
        weight: Value of each entry, in the order of ``csr.index`` (``csr.perm`` is not applied); or a value for each
            entry and head. ``None`` for ``x`` alone.
        reduce: Reduction of the messages of one row.
        op: Operator between features and values.
        transposed: ``transpose(csr)``, or a function that returns the transpose and is called only if ``x`` needs a
            gradient. Give the transpose if the structure is used again: by default each backward pass makes a new one.
        transposed_weight: ``weight[transposed.perm]``, or a function that returns these values. Give the values for
            constant weights: the backward pass then reads weights in order instead of looking each weight up.

    Shapes:
        ``x`` is :math:`(M)` or :math:`(M, *)`, ``weight`` :math:`(E)`, the result :math:`(N)` or :math:`(N, *)`. With
        :math:`H` heads ``x`` is :math:`(M, H, *)`, ``weight`` :math:`(E, H)` and the result :math:`(N, H, *)`.

    Returns:
        The aggregated rows, in the dtype of ``weight * x``; 0 for a row without entries.

    Raises:
        ValueError: If a shape, dtype, device, ``reduce`` or ``op`` does not fit.
    """
    _check(csr, x, weight, reduce, op)
    out_dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    work_dtype = (
        _read_dtype(x, out_dtype) if reduce in ("sum", "mean") else torch.promote_types(out_dtype, torch.float32)
    )
    backward = transposed_tensors(csr, transposed, x)
    backward_weight = None if backward[0] is None else transposed_weight
    code, *values = _edge_values(weight, op, torch.promote_types(work_dtype, torch.float32), backward_weight)
    features = x.reshape(csr.num_cols, x.shape[1:].numel()).to(work_dtype)
    out: Tensor
    arguments = csr.indptr, csr.index, features, values[0], None, code, reduce
    if reduce in ("max", "min"):
        weight_graded = values[0] is not None and values[0].requires_grad
        graded = torch.is_grad_enabled() and features.requires_grad and not weight_graded
        out = extremum_op(*arguments, graded, *backward, values[1])[0]
    else:
        out = spmm_op(*arguments, *backward, values[1])
    return out.reshape(csr.num_rows, *x.shape[1:]).to(out_dtype)


def _read_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a kernel reads rows: as they are, or float32 for those that it does not know."""
    reads_halves = dtype == torch.bfloat16 or (dtype == torch.float16 and x.is_cuda)
    return dtype if reads_halves else torch.promote_types(dtype, torch.float32)


def _edge_values(
    weight: Tensor | None, op: EdgeOp, dtype: torch.dtype, transposed_weight: TransposedWeight
) -> tuple[str, Tensor | None, Tensor | None]:
    """Return the operator's own op (copy, mul or add), its values ``(E, H)``, and those of the transpose if given."""
    if weight is None:
        return "copy", None, None
    weight = weight.to(dtype)
    weight = weight.unsqueeze(1) if weight.dim() == 1 else weight
    if op == "sub":
        return "add", weight.neg(), None
    if op == "div":
        return "mul", weight.reciprocal(), None
    if op == "mul" and transposed_weight is not None:
        values = transposed_weight() if callable(transposed_weight) else transposed_weight
        return op, weight, values.to(dtype).view(weight.shape)
    return op, weight, None


def sddmm(csr: CSR, x: Tensor, y: Tensor, *, transposed: Transposed = None) -> Tensor:
    r"""Compute the dot product of the source row and the destination row of each entry of a sparse matrix.

    .. math::
        s_{e,h} = \langle \mathbf{x}_{j,h}, \mathbf{y}_{i,h} \rangle \quad \text{for each entry } e = (i, j)

    Args:
        csr: Structure of the matrix.
        x: Features of the sources.
        y: Features of the destinations, in the dtype of ``x``.
        transposed: As for :func:`spmm`; for the gradient of ``x``.

    Shapes:
        ``x`` is :math:`(M, H, C)`, ``y`` :math:`(N, H, C)`, the result :math:`(E, H)`, in the dtype of ``x`` and the
        order of ``csr.index`` (``csr.perm`` is not applied). Sums are taken in float32 or float64.

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
        raise ValueError(
            f"x is on {x.device}, y on {y.device}, the matrix on {csr.indptr.device}: move them to one device"
        )
    dtype = _read_dtype(x, x.dtype)
    source, target = x.flatten(1).to(dtype), y.flatten(1).to(dtype)
    backward = transposed_tensors(csr, transposed, x)
    out: Tensor = sddmm_op(csr.indptr, csr.index, source, target, None, x.shape[1], *backward)
    return out.to(x.dtype)


def transposed_tensors(
    csr: CSR, transposed: Transposed, *inputs: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return ``indptr``, ``index`` and ``perm`` of the transpose if it is given and one of ``inputs`` needs a gradient.

    A matrix that has not the shape of the transpose is refused.
    """
    if not torch.is_grad_enabled() or not any(value is not None and value.requires_grad for value in inputs):
        return None, None, None
    matrix = transposed() if callable(transposed) else transposed
    if matrix is None:
        return None, None, None
    expected = (csr.num_cols, csr.num_rows, csr.num_entries)
    shape = (matrix.num_rows, matrix.num_cols, matrix.num_entries)
    if expected != shape:
        raise ValueError(f"transposed must have (rows, columns, edges) = {expected}, got {shape}")
    return matrix.indptr, matrix.index, matrix.perm


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
