"""The slow, obvious twins of the kernels, and small matrices to try both on."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.kernels import CSR

__all__ = ["random_csr", "scatter_oracle", "softmax_oracle"]

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
