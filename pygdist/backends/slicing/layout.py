"""Rows of all ranks and columns of each rank: who holds what while a hop runs on slices (NeutronTP, Sec. 3).

Each rank owns some rows. During a hop each rank holds some columns of all rows, which stand one rank's after the other.
Of N rows a rank owns n, of C columns it holds c::

    split   (n, *, C) -> (N, *, c)   backward: gather; each row's owner gets all columns of its gradient
    gather  (N, *, c) -> (n, *, C)   backward: split; each rank gets its columns of all gradients
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, split_columns
from pygdist.memory.overflow import Overflow

__all__ = ["AHEAD", "SliceLayout"]

AHEAD = 2  # pieces of one tensor that are under way at once


@dataclass(frozen=True, kw_only=True)
class SliceLayout:
    """The rows that each rank owns, and the means by which a hop on slices runs; the same on every rank.

    Attributes:
        communicator: The ranks.
        counts: Number of rows that each rank owns.
        overflow: Memory for rows and edges of all ranks, if these do not stay on the device. A hop then runs chunk by
            chunk, and only the rows and edges of one chunk are on the device.
        overlap: Let rows travel while a chunk is computed. Without, all rows arrive before the first chunk, and the
            results of a chunk leave before the next one.
    """

    communicator: Communicator
    counts: tuple[int, ...]
    overflow: Overflow | None = None
    overlap: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return sum(self.counts)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def memory(self) -> Overflow:
        """The overflow of a hop that runs chunk by chunk, which always has one."""
        assert self.overflow is not None
        return self.overflow

    @property
    def ahead(self) -> int:
        """Pieces of one tensor that are under way at once; with one, nothing travels during a computation."""
        return AHEAD if self.overlap else 1

    def columns(self, width: int) -> tuple[slice, ...]:
        """Columns that each rank holds of rows with ``width`` columns."""
        size = self.communicator.world_size
        return tuple(columns_of(width, rank, size) for rank in range(size))

    def held(self, width: int) -> int:
        """Number of columns that this rank holds of rows with ``width`` columns."""
        columns = self.columns(width)[self.rank]
        return int(columns.stop - columns.start)

    def split(self, x: Tensor, label: str) -> Tensor:
        """Turn all columns of this rank's rows into this rank's columns of all rows; ``label`` names them in errors."""
        return split_columns(x, self.counts, self.communicator, label=label)

    def gather(self, x: Tensor, width: int, label: str) -> Tensor:
        """Turn this rank's columns of all rows into all ``width`` columns of its rows; a phantom column is cut off."""
        return gather_columns(x[..., : self.held(width)], self.counts, width, self.communicator, label=label)
