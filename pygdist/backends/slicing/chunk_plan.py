"""How the edges of all ranks are cut into chunks, and what travels for each: the same on every rank.

The topology is cut logically (NeutronTP, Sec. 4.2.1): the *k*-th part of every rank's rows with all their in-edges is
chunk *k*, so that each rank sends and receives as much as any other in every chunk. What a chunk reads that an earlier
one read is there already and is not sent again: a row stands once in the work queue of its rank (Algorithm 1). In a
backward pass chunks run the other way round, so that the same queue tells when the gradient of a row is complete: after
the chunk that it was sent for, which is the last one to add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.kernels import CSR
from pygdist.kernels.chunked import column_blocks
from pygdist.memory.overflow import Overflow

__all__ = ["AHEAD", "Piece", "Queue", "Rows", "SliceChunk", "SlicePlan", "chunks_within", "known_plan", "length_of"]

AHEAD = 2  # pieces of sources, and of results, that are under way at once

Rows = slice | Tensor
"""Some rows of a rank, by where they stand among those of all ranks."""
Piece = tuple[Rows, ...]
"""What travels at a time: some rows of each rank."""
Queue = tuple[tuple[Piece, ...], ...]
"""What travels for each chunk: at least one piece, empty or not, so that its turn is the same on all ranks."""


@dataclass(frozen=True)
class SliceChunk:
    """Some rows of every rank and all edges into them.

    Attributes:
        spans: Of each rank, its rows in this chunk, among those of all ranks.
        sources: The rows that it reads, among those of all ranks, where these alone come to the device.
    """

    spans: tuple[slice, ...]
    sources: Tensor | None = None


class SlicePlan:
    """How a hop over the edges of all ranks is cut into chunks; the same on every rank.

    Args:
        csr: In-edges of the rows of all ranks, which stand one rank after the other. Chunks are views of it.
        counts: How many rows each rank has.
        num_chunks: How many chunks.
        overflow: Where edges and slices are but for those of one chunk; on the device by default.
        known: Where :attr:`blocks` are kept for other plans of the same edges, which this one may be given too.

    Attributes:
        csr: As given; with ``overflow`` columns count among the sources of the chunk.
        starts: The first row of each rank, and the number of all rows.
        chunks: In the order in which every rank runs them.
    """

    def __init__(
        self,
        csr: CSR,
        counts: Sequence[int],
        num_chunks: int = 1,
        *,
        overflow: Overflow | None = None,
        known: dict[int, tuple[CSR, ...]] | None = None,
    ) -> None:
        self.csr, self.overflow = csr, overflow
        self._known = {} if known is None else known
        self.starts = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
        num_chunks = max(1, min(num_chunks, max(counts, default=0)))
        spans = [_spans(self.starts, counts, number, num_chunks) for number in range(num_chunks)]
        self.chunks = [SliceChunk(one) for one in spans]
        self._unsent: dict[bool, list[list[Tensor]]] = {}  # of each chunk, by whether destinations are read too
        if overflow is None:
            return
        index = overflow.empty(tuple(csr.index.shape), csr.index.dtype)
        sizes = [int(self._read_by(chunk).sum()) for chunk in self.chunks]
        # one file for all chunks, of which there may be more than a process may map
        every = overflow.empty((sum(sizes),), index.dtype).split(sizes)
        for number, (chunk, sources) in enumerate(zip(self.chunks, every, strict=True)):
            read = self._read_by(chunk)
            sources.copy_(read.nonzero().squeeze(1))
            place = read.cumsum(0, dtype=index.dtype) - 1
            for span in chunk.spans:
                index[self.edges_of(span)] = place[csr.index[self.edges_of(span)].long()]
            self.chunks[number] = SliceChunk(chunk.spans, sources)
        self.csr = CSR(csr.indptr, index, csr.num_cols)

    @property
    def blocks(self) -> tuple[CSR, ...]:
        """The edges as sums without weights read them fastest; see :func:`~pygdist.kernels.chunked.column_blocks`."""
        if self.overflow is not None:
            return (self.csr,)
        edges = self.csr.index.data_ptr()  # an undirected graph has one index for both ways
        if edges not in self._known:
            with torch.inference_mode(False):
                self._known[edges] = column_blocks(self.csr)
        return self._known[edges]

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return self.starts[-1]

    @property
    def edge_starts(self) -> list[int]:
        """The first edge of each rank, and the number of all edges."""
        return [int(self.csr.indptr[row]) for row in self.starts]

    def edges_of(self, span: slice) -> slice:
        """The edges into some rows, one after the other."""
        return slice(int(self.csr.indptr[span.start]), int(self.csr.indptr[span.stop]))

    def joined(self, chunk: SliceChunk) -> tuple[slice, ...]:
        """The rows of a chunk, for which all ranks' stand one after the other if it is the only one."""
        return (slice(0, self.num_rows),) if len(self.chunks) == 1 else chunk.spans

    def sources_of(self, chunk: SliceChunk, slices: Tensor) -> Tensor:
        """The rows that a chunk reads, on the device."""
        if self.overflow is None or chunk.sources is None:
            return slices
        return slices.index_select(0, chunk.sources).to(self.overflow.device)

    # -- what travels -------------------------------------------------------------------------------------------------

    def queue(self, *, source: bool = True, target: bool = False, most_rows: int | None = None) -> Queue:
        """For each chunk the rows that it reads and no chunk before it; those that nobody reads go with the last one.

        Args:
            source: A chunk reads the sources of its edges.
            target: It reads its destinations.
            most_rows: The most rows of a rank that travel at a time.
        """
        if len(self.chunks) == 1:
            return (_cut([slice(*one) for one in pairwise(self.starts)], most_rows),)
        if not source:
            return tuple(_cut(chunk.spans, most_rows) for chunk in self.chunks)
        if target not in self._unsent:
            with torch.inference_mode(False):  # training uses what evaluation may ask for first
                self._unsent[target] = self._fresh(target)
        return tuple(_cut(fresh, most_rows) for fresh in self._unsent[target])

    def edge_queue(self, *, most_rows: int | None = None) -> Queue:
        """For each chunk its edges, each of which one chunk reads."""
        return tuple(_cut([self.edges_of(span) for span in chunk.spans], most_rows) for chunk in self.chunks)

    def result_queue(self, *, most_rows: int | None = None) -> Queue:
        """For each chunk its destinations, whose results it makes."""
        return self.queue(source=False, target=True, most_rows=most_rows)

    def _fresh(self, target: bool) -> list[list[Tensor]]:
        """Of each chunk and rank, the rows that no chunk before it reads."""
        found, unread = [], torch.ones(self.num_rows, dtype=torch.bool, device=self.csr.index.device)
        every = None if self.overflow is None else self.overflow.empty((self.num_rows,), self.csr.index.dtype)
        taken = 0
        for chunk in self.chunks:
            read = self._read_by(chunk)
            for span in chunk.spans if target else ():
                read[span] = True
            rows = (unread if chunk is self.chunks[-1] else unread & read).nonzero().squeeze(1)
            unread[rows] = False
            bounds = torch.searchsorted(rows, torch.tensor(self.starts, device=rows.device)).tolist()
            kept = rows if every is None else every[taken : taken + rows.numel()].copy_(rows)  # each row comes once
            taken += rows.numel()
            found.append([kept[start:end] for start, end in pairwise(bounds)])
        return found

    def _read_by(self, chunk: SliceChunk) -> Tensor:
        """Which rows of all ranks are sources of a chunk's edges."""
        read = torch.zeros(self.csr.num_cols, dtype=torch.bool, device=self.csr.index.device)
        if chunk.sources is not None:
            read[chunk.sources.long()] = True
            return read
        for span in chunk.spans:
            read[self.csr.index[self.edges_of(span)].long()] = True
        return read


_PLANS = Slot[dict[tuple[str, int], SlicePlan]]("plans by number of chunks")
_COLUMN_BLOCKS = Slot[dict[int, tuple[CSR, ...]]]("column blocks")


def known_plan(
    edges: Adjacency,
    way: str,
    csr: Callable[[], CSR],
    counts: Sequence[int],
    num_chunks: int,
    *,
    overflow: Overflow | None = None,
) -> SlicePlan:
    """A plan for the edges of all ranks, by destination or by source; made once for a number of chunks."""
    known = edges.slot(_PLANS, dict)
    if (way, num_chunks) not in known:
        with torch.inference_mode(False):
            blocks = edges.slot(_COLUMN_BLOCKS, dict)
            known[way, num_chunks] = SlicePlan(csr(), counts, num_chunks, overflow=overflow, known=blocks)
    return known[way, num_chunks]


def chunks_within(
    budget: int,
    csr: CSR,
    counts: Sequence[int],
    width: int,
    value_bytes: int,
    weight_bytes: int,
    *,
    out_bytes: int | None = None,
) -> int:
    """In how many chunks edges and rows take no more bytes at a time; the same on every rank.

    Args:
        budget: Bytes on the device.
        csr: In-edges of the rows of all ranks.
        counts: How many rows each rank has.
        width: Columns of all ranks.
        value_bytes: Of a value in a row.
        weight_bytes: Of an edge's weight; 0 if edges have none.
        out_bytes: Of a row of the result on a rank; as many as of a row that is read by default.

    Raises:
        InputError: If the rows that one chunk reads do not fit, even if it has one row of each rank.
    """
    starts = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    held = -(-width // len(counts)) * value_bytes
    whole = width * value_bytes if out_bytes is None else out_bytes * len(counts)
    made = held if out_bytes is None else out_bytes
    largest, most = 0, max(counts, default=0)
    num_chunks = 1
    while True:
        num_chunks = min(num_chunks, max(most, 1))
        largest = 0
        for number in range(num_chunks):
            spans = _spans(starts, counts, number, num_chunks)
            edges = sum(int(csr.indptr[span.stop]) - int(csr.indptr[span.start]) for span in spans)
            rows = sum(length_of(span) for span in spans)
            own = max(length_of(span) for span in spans)
            travelling = AHEAD * (rows * made + own * whole)
            read = min(edges, csr.num_cols) * (held + csr.index.element_size())  # and which these are
            listed = edges * (csr.index.element_size() + weight_bytes) + rows * csr.indptr.element_size()
            largest = max(largest, listed + read + travelling)
        if largest <= budget:
            return num_chunks
        if num_chunks >= most:
            raise InputError(
                f"memory_gib: {budget / 2**30:.2g} GiB do not hold one row of each rank with its in-edges, which take "
                f"up to {largest / 2**30:.2g} GiB"
            )
        num_chunks *= 2


def _spans(starts: Sequence[int], counts: Sequence[int], number: int, num_chunks: int) -> tuple[slice, ...]:
    return tuple(
        slice(first + count * number // num_chunks, first + count * (number + 1) // num_chunks)
        for first, count in zip(starts, counts, strict=False)
    )


def _cut(ranks: Sequence[Rows], most_rows: int | None) -> tuple[Piece, ...]:
    """Rows of each rank in pieces of no more than so many of any rank."""
    longest = max(length_of(rows) for rows in ranks)
    size = max(longest if most_rows is None else min(most_rows, longest), 1)
    return tuple(tuple(_part(rows, first, size) for rows in ranks) for first in range(0, max(longest, 1), size))


def _part(rows: Rows, first: int, size: int) -> Rows:
    if isinstance(rows, Tensor):
        return rows[first : first + size]
    return slice(min(rows.start + first, rows.stop), min(rows.start + first + size, rows.stop))


def length_of(rows: Rows) -> int:
    """How many."""
    return rows.numel() if isinstance(rows, Tensor) else int(rows.stop - rows.start)
