"""The slow, obvious twins of the kernels, and small matrices to try both on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pygdist.kernels import CSR, spmm
from pygdist.native import load

__all__ = [
    "assert_matches_oracle", "needs_library", "random_csr", "scatter_oracle", "softmax_oracle", "values_and_gradients",
    "with_int64",
]  # fmt: skip

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # sums of a few dozen values in another order

needs_library = pytest.mark.skipif(load() is None, reason="the native library was not built here")

_OPS = {"mul": torch.mul, "add": torch.add, "sub": torch.sub, "div": torch.div}


def scatter_oracle(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str, op: str = "mul") -> Tensor:
    """What PyG does: one row per edge, then ``scatter``."""
    messages = x[csr.index.long()]
    if weight is not None:
        messages = _OPS[op](messages, weight.view(*weight.shape, *[1] * (x.dim() - weight.dim())))
    row = csr.row_index().long()
    out = messages.new_zeros(csr.num_rows, *x.shape[1:])
    if reduce in ("max", "min"):
        target = row.view(-1, *[1] * (x.dim() - 1)).expand_as(messages)
        return out.scatter_reduce(0, target, messages, f"a{reduce}", include_self=False)
    out = out.index_add(0, row, messages)
    if reduce == "mean":
        out = out / csr.indptr.diff().clamp(min=1).view(-1, *[1] * (x.dim() - 1))
    return out


def softmax_oracle(csr: CSR, scores: Tensor) -> Tensor:
    """Row by row, by torch's own softmax."""
    rows = scores.split(csr.indptr.diff().tolist())
    return torch.cat([row.softmax(dim=0) for row in rows]) if rows else scores


def random_csr(num_rows: int = 40, num_cols: int = 30, num_entries: int = 400, *, seed: int = 0) -> CSR:
    """A directed, rectangular matrix with skewed rows, repeated entries, and empty rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    row = (torch.rand(num_entries, generator=generator) ** 3 * num_rows * 0.9).long()
    col = (torch.rand(num_entries, generator=generator) * num_cols * 0.9).long()
    return CSR.from_coo(row, col, num_rows=num_rows, num_cols=num_cols)


def with_int64(csr: CSR) -> CSR:
    return CSR(csr.indptr, csr.index.long(), csr.num_cols, csr.perm)


def values_and_gradients(
    product: Callable[..., Tensor], csr: CSR, x: Tensor, weight: Tensor | None, reduce: str, **options: Any
) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight) if tensor is not None]
    out = product(csr, leaves[0], leaves[1] if weight is not None else None, reduce, **options)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_matches_oracle(csr: CSR, x: Tensor, weight: Tensor | None, reduce: str, op: str = "mul") -> None:
    found = values_and_gradients(spmm, csr, x, weight, reduce, op=op)
    expected = values_and_gradients(scatter_oracle, csr, x, weight, reduce, op=op)
    for name, a, b in zip(("out", "grad_x", "grad_weight"), found, expected, strict=False):
        tolerance = TOLERANCE[a.dtype] * max(1.0, float(b.abs().max()) if b.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")
