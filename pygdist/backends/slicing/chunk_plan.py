"""The chunks of a hop over the edges of all ranks, and the rows that travel for each; the same on every rank.

The topology is divided logically (NeutronTP, Sec. 4.2.1): chunk *k* is the *k*-th part of every rank's rows with all
their in-edges, so that ranks with equally many rows send and
receive as many in every chunk. A row is sent once, for the
first chunk that reads the row, and appears once in the work queue of its rank (Algorithm 1). A backward pass runs the
chunks in reverse order. The gradient of a row is then complete after the chunk for which the row was sent, which is the
last chunk to add to this gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pygdist.backends.slicing.all_nodes import AHEAD, SliceLayout
from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.kernels import CSR
from pygdist.kernels.chunked import column_blocks
from pygdist.memory.overflow import Overflow
from pygdist.memory.ring import uploaded

Positions = slice | Tensor
"""Some rows of one rank, by their positions among the rows of all ranks."""
Piece = tuple[Positions, ...]
"""Rows that travel at a time: some of each rank."""
Queue = tuple[tuple[Piece, ...], ...]
"""The pieces that travel for each chunk: at least one, empty or not, so that all ranks take the same turns."""


@dataclass(frozen=True)
class Chunk:
    """Some rows of every rank and all edges into them.

    Attributes:
        spans: For each rank, its rows in this chunk, among those of all ranks.
        sources: The rows that the chunk reads, among those of all ranks; ``None`` if all rows are on the device.
    """

    spans: tuple[slice, ...]
    sources: Tensor | None = None


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes that a chunk takes on the device of the rank that holds the most columns.

    Attributes:
        read: For each row that it reads.
        edge: For each edge, beside the number of its source; 0 if edges carry nothing.
        made: For each row of the result, in the columns of one rank.
        whole: For each row of the result, in the columns of all ranks.
    """

    read: int
    edge: int
    made: int
    whole: int


class ChunkPlan:
    """The chunks of a hop over the edges of all ranks.

    Args:
        csr: In-edges of the rows of all ranks, which stand one rank's after the other. Chunks are views of it.
        counts: Number of rows of each rank.
        num_chunks: Number of chunks; at most as many as a rank has rows.
        overflow: Memory for edges and slices of all chunks but the one that runs; the device by default.
        blocks: Cache of :attr:`blocks`, which plans of the same edges share.

    Attributes:
        csr: As given; with ``overflow`` its columns count among the sources of the chunk.
        overflow: As given.
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
        blocks: dict[int, tuple[CSR, ...]] | None = None,
    ) -> None:
        self.csr, self.overflow = csr, overflow
        self._blocks = {} if blocks is None else blocks
        self.starts = list(accumulate(counts, initial=0))
        num_chunks = max(1, min(num_chunks, max(counts, default=0)))
        self.chunks = [Chunk(_spans(self.starts, counts, number, num_chunks)) for number in range(num_chunks)]
        self._unread: dict[bool, list[list[Tensor]]] = {}  # by whether chunks read their destinations too
        if overflow is not None:
            self._number_by_chunk(overflow)

    def _number_by_chunk(self, overflow: Overflow) -> None:
        """Number the sources of each chunk's edges among those of the chunk."""
        csr = self.csr
        index = overflow.empty(tuple(csr.index.shape), csr.index.dtype)
        sizes = [int(self._read_by(chunk).sum()) for chunk in self.chunks]
        # one file for all chunks, of which there may be more than a process may map
        memory = overflow.empty((sum(sizes),), index.dtype).split(sizes)
        for number, (chunk, sources) in enumerate(zip(self.chunks, memory, strict=True)):
            read = self._read_by(chunk)
            sources.copy_(read.nonzero().squeeze(1))
            number_in_chunk = read.cumsum(0, dtype=index.dtype) - 1
            for span in chunk.spans:
                index[self.edges_of(span)] = number_in_chunk[csr.index[self.edges_of(span)].long()]
            self.chunks[number] = Chunk(chunk.spans, sources)
        self.csr = CSR(csr.indptr, index, csr.num_cols)

    @property
    def blocks(self) -> tuple[CSR, ...]:
        """The edges as sums without weights read them fastest; see :func:`~pygdist.kernels.chunked.column_blocks`."""
        if self.overflow is not None:
            return (self.csr,)
        address = self.csr.index.data_ptr()  # an undirected graph has one index for both ways
        if address not in self._blocks:
            with torch.inference_mode(False):
                self._blocks[address] = column_blocks(self.csr)
        return self._blocks[address]

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return self.starts[-1]

    def edges_of(self, span: slice) -> slice:
        """Return the in-edges of consecutive rows, which are consecutive too."""
        return slice(int(self.csr.indptr[span.start]), int(self.csr.indptr[span.stop]))

    def joined(self, chunk: Chunk) -> tuple[slice, ...]:
        """Return the destinations of a chunk in as few spans as there can be: a single chunk has all rows."""
        return (slice(0, self.num_rows),) if len(self.chunks) == 1 else chunk.spans

    def sources_of(self, chunk: Chunk, rows: Tensor) -> Tensor:
        """Return those of all ranks' ``rows`` that a chunk reads, on the device."""
        if self.overflow is None or chunk.sources is None:
            return rows
        return uploaded(rows.index_select(0, chunk.sources), self.overflow.device)

    # -- queues: the rows that travel for each chunk ------------------------------------------------------------------

    def queue(self, *, source: bool = True, target: bool = False, most_rows: int | None = None) -> Queue:
        """Return for each chunk the rows that it reads and no chunk before it.

        Rows that no chunk reads go with the last one, so that each row travels once.

        Args:
            source: Chunks read the sources of their edges.
            target: Chunks read their destinations. Without ``source`` these are the rows of their results.
            most_rows: Most rows of a rank in a piece.
        """
        if len(self.chunks) == 1:
            return (_pieces([slice(*bounds) for bounds in pairwise(self.starts)], most_rows),)
        if not source:
            return tuple(_pieces(chunk.spans, most_rows) for chunk in self.chunks)
        if target not in self._unread:
            with torch.inference_mode(False):  # training uses the queues that evaluation asked for first
                self._unread[target] = self._find_unread(target)
        return tuple(_pieces(by_rank, most_rows) for by_rank in self._unread[target])

    def edge_queue(self, *, most_rows: int | None = None) -> Queue:
        """Return for each chunk its edges, which no other chunk reads."""
        return tuple(_pieces([self.edges_of(span) for span in chunk.spans], most_rows) for chunk in self.chunks)

    def _find_unread(self, target: bool) -> list[list[Tensor]]:
        """Return for each chunk and rank the rows that no chunk before it reads."""
        queues, unread = [], torch.ones(self.num_rows, dtype=torch.bool, device=self.csr.index.device)
        # each row comes once
        memory = None if self.overflow is None else self.overflow.empty((self.num_rows,), self.csr.index.dtype)
        num_filled = 0
        for chunk in self.chunks:
            read = self._read_by(chunk)
            for span in chunk.spans if target else ():
                read[span] = True
            rows = (unread if chunk is self.chunks[-1] else unread & read).nonzero().squeeze(1)
            unread[rows] = False
            bounds = torch.searchsorted(rows, torch.tensor(self.starts, device=rows.device)).tolist()
            if memory is not None:
                rows = memory[num_filled : num_filled + rows.numel()].copy_(rows)
                num_filled += rows.numel()
            queues.append([rows[start:end] for start, end in pairwise(bounds)])
        return queues

    def _read_by(self, chunk: Chunk) -> Tensor:
        """Return a mask over the rows of all ranks: the sources of a chunk's edges."""
        read = torch.zeros(self.csr.num_cols, dtype=torch.bool, device=self.csr.index.device)
        if chunk.sources is not None:
            read[chunk.sources.long()] = True
            return read
        for span in chunk.spans:
            read[self.csr.index[self.edges_of(span)].long()] = True
        return read


_PLANS = Slot[dict[tuple[str, int, ChunkBytes | None], ChunkPlan]]("plans of chunks")
_COLUMN_BLOCKS = Slot[dict[int, tuple[CSR, ...]]]("column blocks")


def plan_for(
    edges: Adjacency,
    way: str,
    csr: Callable[[], CSR],
    layout: SliceLayout,
    num_chunks: int = 1,
    needs: ChunkBytes | None = None,
) -> ChunkPlan:
    """Return a plan, made once.

    Args:
        edges: In-edges of the rows of all ranks; they keep the plan.
        way: A name for the order that ``csr`` has: ``forward`` by destination, ``backward`` by source.
        csr: Gives the edges in this order.
        layout: The rows of each rank.
        num_chunks: Number of chunks.
        needs: Make more chunks if these do not fit half of the memory budget. The other half is for rows that travel.
    """
    plans = edges.slot(_PLANS, dict)
    key = way, num_chunks, needs
    if key not in plans and needs is not None:
        fewest = chunks_within(layout.memory.budget // 2, csr(), layout.counts, needs)
        plans[key] = plan_for(edges, way, csr, layout, max(fewest, num_chunks))
    elif key not in plans:
        with torch.inference_mode(False):
            blocks = edges.slot(_COLUMN_BLOCKS, dict)
            plans[key] = ChunkPlan(csr(), layout.counts, num_chunks, overflow=layout.overflow, blocks=blocks)
    return plans[key]


def chunks_within(budget: int, csr: CSR, counts: Sequence[int], needs: ChunkBytes) -> int:
    """Return a number of chunks of which none takes more than the budget; the same on every rank.

    Args:
        budget: Bytes on the device.
        csr: In-edges of the rows of all ranks.
        counts: Number of rows of each rank.
        needs: Bytes that rows and edges take.

    Raises:
        InputError: If the rows that one chunk reads do not fit, even if it has one row of each rank.
    """
    starts, most_chunks = list(accumulate(counts, initial=0)), max(counts, default=0)
    num_chunks = 1
    while True:
        num_chunks = min(num_chunks, max(most_chunks, 1))
        largest = max(_bytes_of(_spans(starts, counts, number, num_chunks), csr, needs) for number in range(num_chunks))
        if largest <= budget:
            return num_chunks
        if num_chunks >= most_chunks:
            raise InputError(
                f"memory_gib: {budget / 2**30:.2g} GiB do not hold one row of each rank with its in-edges, which take "
                f"up to {largest / 2**30:.2g} GiB; give more, or run on more ranks"
            )
        num_chunks *= 2


def _bytes_of(spans: tuple[slice, ...], csr: CSR, needs: ChunkBytes) -> int:
    """Return the bytes that a chunk takes on the device: its edges, the rows that it reads, and results that travel."""
    edges = sum(int(csr.indptr[span.stop]) - int(csr.indptr[span.start]) for span in spans)
    rows = sum(length_of(span) for span in spans)
    rows_of_a_rank = max(length_of(span) for span in spans)
    index_bytes = csr.index.element_size()
    results = AHEAD * (rows * needs.made + rows_of_a_rank * needs.whole)
    sources = min(edges, csr.num_cols) * (needs.read + index_bytes)  # each with its number
    return edges * (index_bytes + needs.edge) + rows * csr.indptr.element_size() + sources + results


def _spans(starts: Sequence[int], counts: Sequence[int], number: int, num_chunks: int) -> tuple[slice, ...]:
    """Return the rows of each rank in one of ``num_chunks`` chunks."""
    return tuple(
        slice(first + count * number // num_chunks, first + count * (number + 1) // num_chunks)
        for first, count in zip(starts, counts, strict=False)
    )


def _pieces(by_rank: Sequence[Positions], most_rows: int | None) -> tuple[Piece, ...]:
    """Cut the rows of each rank into pieces with at most ``most_rows`` of any rank."""
    longest = max(length_of(rows) for rows in by_rank)
    size = max(longest if most_rows is None else min(most_rows, longest), 1)
    return tuple(tuple(_cut(rows, first, size) for rows in by_rank) for first in range(0, max(longest, 1), size))


def _cut(rows: Positions, first: int, size: int) -> Positions:
    """Return ``size`` of the rows, from number ``first`` on, or as many as are left."""
    if isinstance(rows, Tensor):
        return rows[first : first + size]
    return slice(min(rows.start + first, rows.stop), min(rows.start + first + size, rows.stop))


def length_of(rows: Positions) -> int:
    """Return the number of rows."""
    return rows.numel() if isinstance(rows, Tensor) else int(rows.stop - rows.start)
