"""A sparse matrix in CSR form: the structure of one aggregation, without its values.

Rows are destinations, columns are sources, so one row lists the in-edges of one node. Values (edge weights) are passed
beside the matrix, since they may need gradients and differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.native import NativeCsr

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class CSR:
    """The non-zero entries of a matrix, row by row.

    Attributes:
        indptr: Row ``i`` has the entries ``indptr[i]`` to ``indptr[i + 1] - 1``; int64.
        index: The column of each entry; int32 or int64. int32 is faster, as half as many bytes are read. uint16 occurs
            only in the matrices of :func:`~pygdist.kernels.chunked.column_blocks`.
        num_cols: Number of columns.
        perm: The position of each entry in the caller's order of edges; int32 or int64. ``None`` means the same order.
            Kernels apply only the ``perm`` of an argument ``transposed``: their values of edges, in arguments and
            results, are in the order of ``index``.

    Shapes:
        ``indptr`` is :math:`(N + 1)`, ``index`` and ``perm`` are :math:`(E)`.

    Raises:
        ValueError: If a tensor has the wrong shape, dtype or device. The values are checked by :meth:`validate` only,
            which takes a pass over the entries.
    """

    indptr: Tensor
    index: Tensor
    num_cols: int
    perm: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and devices."""
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
            raise ValueError(f"indptr is on {self.indptr.device}: move index and perm there too")

    def native(self, **fields: int | None) -> tuple[NativeCsr, list[Tensor | None]]:
        """Describe a matrix on the CPU to the native library, with further ``fields``.

        Returns:
            The structure, and the tensors to which the structure points. Keep the tensors as long as the structure.
        """
        tensors = [None if part is None else part.contiguous() for part in (self.indptr, self.index, self.perm)]
        indptr, index, perm = (None if part is None else part.data_ptr() for part in tensors)
        matrix = NativeCsr(
            num_rows=self.num_rows,
            num_cols=self.num_cols,
            indptr=indptr,
            index=index,
            perm=perm,
            index_bits=8 * self.index.element_size(),
            perm_bits=0 if self.perm is None else 8 * self.perm.element_size(),
            **fields,
        )
        return matrix, tensors

    def unpermuted(self) -> CSR:
        """Return the same matrix with ``perm=None``."""
        return CSR(self.indptr, self.index, self.num_cols)

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, *, num_rows: int, num_cols: int) -> CSR:
        """Make a matrix from unsorted entries; entries of the same row keep their order.

        Args:
            row: Row (destination) of each entry, :math:`(E)`.
            col: Column (source) of each entry, :math:`(E)`.
            num_rows: Number of rows.
            num_cols: Number of columns.

        Returns:
            The matrix. Its ``perm`` is the position of each entry in ``row``. ``index`` and ``perm`` are int32 if int32
            is large enough.
        """
        perm = torch.argsort(row, stable=True).to(narrowest(row.numel()))
        return cls(pointers(row, num_rows), col.to(narrowest(num_cols)).index_select(0, perm), num_cols, perm)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.indptr.numel() - 1

    @property
    def num_entries(self) -> int:
        """Number of entries (edges)."""
        return self.index.numel()

    def row_index(self) -> Tensor:
        """Return the row of each entry, of shape :math:`(E)` and with the dtype of ``index``."""
        rows = torch.arange(self.num_rows, device=self.indptr.device, dtype=self.index.dtype)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_entries)

    def validate(self) -> CSR:
        """Check the values of ``indptr`` and ``index`` in one pass; kernels do not check them.

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
    """Return ``indptr``, ``(num_rows + 1,)`` int64, from the row of each entry."""
    return pointers_of(counts(row, num_rows))


def counts(row: Tensor, num_rows: int) -> Tensor:
    """Count the entries of each row, ``(num_rows,)`` int64; the host does not wait for a GPU, as in ``bincount``."""
    if row.is_cuda:
        return row.new_zeros(num_rows, dtype=torch.int64).index_add_(0, row, torch.ones_like(row, dtype=torch.int64))
    return torch.bincount(row, minlength=num_rows)


def pointers_of(lengths: Tensor) -> Tensor:
    """Return ``indptr``, ``(num_rows + 1,)`` int64, from the number of entries of each row."""
    indptr = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, dim=0, out=indptr[1:])
    return indptr


def row_blocks(indptr: Tensor, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive rows and their entries, at most ``most`` of these at a time but all of one row at least."""
    num_rows, first = indptr.numel() - 1, 0
    while first < num_rows:
        start = int(indptr[first])
        last = max(int(torch.searchsorted(indptr, start + most, right=True)) - 1, first + 1)
        yield slice(first, last), slice(start, int(indptr[last]))
        first = last


def narrowest(count: int) -> torch.dtype:
    """Return the smallest integer dtype for ids below ``count``: int32 or int64."""
    return torch.int32 if count <= _INT32_MAX else torch.int64


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
