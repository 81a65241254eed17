"""A sparse matrix in CSR form: the structure of one aggregation, apart from its values.

Rows are destinations, columns are sources, so one row lists the in-edges of one node. Values (edge weights) travel
beside it, since they may need gradients and differ from layer to layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CSR", "narrowest"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class CSR:
    """The non-zero entries of a matrix, row by row.

    Attributes:
        indptr: Row ``i`` has the entries ``indptr[i]`` to ``indptr[i + 1]``; int64.
        index: The column of each entry; int32 or int64. int32 is faster, being half as much to read. uint16 only in
            what :func:`~pygdist.kernels.chunked.column_blocks` makes.
        num_cols: Number of columns.
        perm: For each entry its id in the caller's own order of edges; int32 or int64. ``None`` means the same order.

    Shapes:
        ``indptr`` is :math:`(N + 1)`, ``index`` and ``perm`` are :math:`(E)`.

    Raises:
        ValueError: If a tensor has the wrong shape, dtype or device. What they hold is checked by :meth:`validate`
            only, as that costs a pass over the entries.
    """

    indptr: Tensor
    index: Tensor
    num_cols: int
    perm: Tensor | None = None

    def __post_init__(self) -> None:
        """Check all that costs nothing."""
        if self.indptr.dim() != 1 or self.indptr.numel() == 0 or self.indptr.dtype != torch.int64:
            raise ValueError(f"indptr must be int64 of shape (rows + 1,), got {_describe(self.indptr)}")
        if self.index.dim() != 1 or self.index.dtype not in (torch.int32, torch.int64, torch.uint16):
            raise ValueError(f"index must be int32 or int64 of shape (edges,), got {_describe(self.index)}")
        perm = self.perm
        if perm is not None and (perm.shape != self.index.shape or perm.dtype not in (torch.int32, torch.int64)):
            raise ValueError(f"perm must be int32 or int64 of shape {tuple(self.index.shape)}, got {_describe(perm)}")
        if self.num_cols < 0:
            raise ValueError(f"num_cols must not be negative, got {self.num_cols}")
        if any(tensor.device != self.indptr.device for tensor in (self.index, self.perm) if tensor is not None):
            raise ValueError(f"indptr is on {self.indptr.device}, index and perm must be too")

    def unpermuted(self) -> CSR:
        """The same entries, whose values come in their own order."""
        return CSR(self.indptr, self.index, self.num_cols)

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, *, num_rows: int, num_cols: int) -> CSR:
        """Sort entries by row; entries of one row keep their order.

        Args:
            row: Row (destination) of each entry.
            col: Column (source) of each entry.
            num_rows: Number of rows.
            num_cols: Number of columns.

        Shapes:
            ``row`` and ``col`` are :math:`(E)`.

        Returns:
            The matrix, with ``perm``, the position of each entry in ``row``; both int32 where they fit.
        """
        perm = torch.argsort(row, stable=True)
        perm = perm.to(narrowest(row.numel()))
        indptr = pointers(row, num_rows)
        return cls(indptr, col.to(narrowest(num_cols)).index_select(0, perm), num_cols, perm)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.indptr.numel() - 1

    @property
    def num_entries(self) -> int:
        """Number of entries (edges)."""
        return self.index.numel()

    def row_index(self) -> Tensor:
        """Row of each entry, of shape :math:`(E)` and with the dtype of ``index``."""
        rows = torch.arange(self.num_rows, device=self.indptr.device, dtype=self.index.dtype)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_entries)

    def validate(self) -> CSR:
        """Check what ``indptr`` and ``index`` hold, in one pass; the kernels trust it.

        Returns:
            The matrix itself.

        Raises:
            ValueError: If ``indptr`` does not rise from 0 to the number of entries or a column is out of range.
        """
        ends = [int(self.indptr[0]), int(self.indptr[-1])]
        if ends != [0, self.num_entries] or bool((self.indptr.diff() < 0).any()):
            raise ValueError(
                f"indptr must rise from 0 to {self.num_entries} edges, it goes from {ends[0]} to {ends[1]}"
            )
        if self.num_entries:
            low, high = (int(bound) for bound in self.index.aminmax())
            if low < 0 or high >= self.num_cols:
                raise ValueError(f"index must be in 0..{self.num_cols - 1}, it has {low if low < 0 else high}")
        return self


def pointers(row: Tensor, num_rows: int) -> Tensor:
    """Where the entries of each row begin, from the row of each entry; ``(num_rows + 1,)`` int64."""
    indptr = torch.zeros(num_rows + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=num_rows), dim=0, out=indptr[1:])
    return indptr


def narrowest(count: int) -> torch.dtype:
    """The integer type for ids below ``count``: int32 is half as much to read."""
    return torch.int32 if count <= _INT32_MAX else torch.int64


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
