"""The sparse product on the CPU by the native library: tensors become pointers here.

Nothing is checked beyond what :func:`pygdist.kernels.spmm` has checked. Dense tensors are two-dimensional and all of
one dtype, float32 or float64. The C++ side computes with as many threads as torch does.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pygdist.kernels.csr import CSR
from pygdist.native import NativeCsr, library

__all__ = ["extremum_grad", "sddmm", "share_ties", "spmm"]

_REDUCE_CODES = {"sum": 0, "mean": 1, "max": 2, "min": 3}


def spmm(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str) -> Tensor:
    """Reduce ``weight_ij * x[j]`` over the entries of each row."""
    out = x.new_empty(csr.num_rows, x.shape[1])
    _call("pygdist_spmm", csr, weight, out, _REDUCE_CODES[reduce], x, out)
    return out


def share_ties(csr: CSR, x: Tensor, weight: Tensor | None, out: Tensor, grad_out: Tensor) -> Tensor:
    """Divide the gradient of each extremum among the entries that attain it."""
    share = torch.empty_like(grad_out, memory_format=torch.contiguous_format)
    _call("pygdist_share_ties", csr, weight, share, x, out, grad_out, share)
    return share


def extremum_grad(transposed: CSR, x: Tensor, weight: Tensor | None, out: Tensor, share: Tensor) -> Tensor:
    """Sum, for each source, the shares of the extrema that it attains."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    _call("pygdist_extremum_grad", transposed, weight, grad_x, x, out, share, grad_x)
    return grad_x


def sddmm(csr: CSR, x: Tensor, grad: Tensor, weight: Tensor | None, out: Tensor | None) -> Tensor:
    """Dot products of source and destination rows, entry by entry."""
    grad_weight = x.new_empty(csr.num_entries)
    _call("pygdist_sddmm", csr, weight, x, x, grad, out, grad_weight)
    return grad_weight


def _call(name: str, csr: CSR, weight: Tensor | None, like: Tensor, *arguments: Tensor | int | None) -> None:
    """Call a function of the library; ``like`` tells width and dtype of the dense tensors.

    The contiguous copies live until the call returns. A result among the arguments is contiguous already, so it is
    written in place.
    """
    native = library.load()
    assert native is not None, "the caller has looked"
    indptr, index = csr.indptr.contiguous(), csr.index.contiguous()
    weight = None if weight is None else weight.contiguous()
    matrix = NativeCsr(
        num_rows=csr.num_rows,
        num_features=like.shape[1],
        indptr=indptr.data_ptr(),
        index=index.data_ptr(),
        weight=None if weight is None else weight.data_ptr(),
        index_bits=8 * index.element_size(),
        value_bits=8 * like.element_size(),
        num_threads=torch.get_num_threads(),
    )
    held = [argument.contiguous() if isinstance(argument, Tensor) else argument for argument in arguments]
    pointers = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in held]
    status = getattr(native, name)(ctypes.byref(matrix), *pointers)
    assert status == 0, f"{name} refused its arguments with status {status}"
