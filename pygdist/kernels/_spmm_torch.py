r"""The sparse product by torch's own operators: on CUDA, and on a CPU without the native library.

Sums and means are one CSR product. Maxima, minima and the gradients of weights lift rows to edges first and so hold
:math:`E \times F` values; the native library does not.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from pygdist.kernels.csr import CSR

__all__ = ["extremum_grad", "sddmm", "share_ties", "spmm"]

_INT32_MAX = 2**31 - 1


def spmm(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """Reduce ``weight_ij * x[j]`` over the entries of each row."""
    if reduce in ("max", "min"):
        out = x.new_zeros(csr.num_rows, x.shape[1])
        row = csr.row_index().long().unsqueeze(-1).expand(-1, x.shape[1])
        return out.scatter_reduce_(0, row, _messages(csr, x, weight), f"a{reduce}", include_self=False)
    out = _sparse_product(csr, x, weight)
    return out / csr.indptr.diff().clamp(min=1).unsqueeze(-1) if reduce == "mean" else out


def share_ties(csr: CSR, x: Tensor, weight: Tensor | None, out: Tensor, grad_out: Tensor) -> Tensor:
    """Divide the gradient of each extremum among the entries that attain it."""
    row = csr.row_index()
    attains = (_messages(csr, x, weight) == out.index_select(0, row)).to(x.dtype)
    # scatter_reduce starts from zeros and counts them as attaining an extremum of 0; PyG's gradients have that share.
    count = (out == 0).to(x.dtype).index_add_(0, row, attains)
    return grad_out / count


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor) -> Tensor:
    """Sum, for each source, the shares of the extrema that it attains."""
    source = transposed.row_index()
    message = _scale(x.index_select(0, source), weight)
    gradient = _scale(share.index_select(0, transposed.index), weight)
    attained = torch.where(message == out.index_select(0, transposed.index), gradient, 0)
    return torch.zeros_like(x, memory_format=torch.contiguous_format).index_add_(0, source, attained)


def sddmm(csr: CSR, x: Tensor, grad: Tensor, weight: Tensor | None, out: Tensor | None) -> Tensor:
    """Dot products of source and destination rows, entry by entry."""
    row = csr.row_index()
    source = x.index_select(0, csr.index)
    products = source * grad.index_select(0, row)
    if out is not None:
        products = torch.where(_scale(source, weight) == out.index_select(0, row), products, 0)
    return products.sum(dim=1)


def _messages(csr: CSR, x: Tensor, weight: Tensor | None) -> Tensor:
    return _scale(x.index_select(0, csr.index), weight)


def _scale(rows: Tensor, weight: Tensor | None) -> Tensor:
    return rows if weight is None else rows * weight.unsqueeze(-1)


def _sparse_product(csr: CSR, x: Tensor, weight: Tensor | None) -> Tensor:
    # torch wants one index dtype; the narrow one is faster and offsets are far fewer than columns. On the CPU it reads
    # strided tensors as if they were contiguous, and answers wrongly.
    dtype = csr.index.dtype if csr.num_entries <= _INT32_MAX else torch.int64
    values = x.new_ones(csr.num_entries) if weight is None else weight.contiguous()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        matrix = torch.sparse_csr_tensor(
            csr.indptr.to(dtype).contiguous(),
            csr.index.to(dtype).contiguous(),
            values,
            (csr.num_rows, csr.num_cols),
            check_invariants=False,
        )
    return matrix @ x.contiguous()
