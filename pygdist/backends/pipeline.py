"""Sums over slices chunk by chunk: a chunk's sources are split just before it, its sums gathered just after.

The topology is cut logically into chunks (NeutronTP, Sec. 4.2.1): the *k*-th part of every rank's rows with all their
in-edges is chunk *k*, so that each sends and receives as much as any other in every chunk. While a chunk is aggregated
the sources of the next one travel, and the sums of the one before (Sec. 4.2.2); what an earlier chunk read is there
already and is not sent again (Algorithm 1). With an :class:`~pygdist.backends.overflow.Overflow` nothing but the chunk
that runs is on the device: its edges, the rows that it reads, its sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pygdist.backends.overflow import Overflow
from pygdist.comm import Communicator, Transfer, describe_rows
from pygdist.comm.recorder import recorded
from pygdist.comm.slices import columns_of
from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.kernels.chunked import spmm_into

__all__ = ["SliceChunk", "SlicePlan", "aggregate_slices", "chunks_within"]

_AHEAD = 2  # pieces of sources, and chunks of sums, that are under way at once


@dataclass(frozen=True)
class SliceChunk:
    """Some rows of every rank and all edges into them.

    Attributes:
        spans: Of each rank, its rows in this chunk, among those of all ranks.
        pieces: What is split for this chunk: of each rank, rows that it reads and no chunk before it; piece by piece,
            so that no more travels at a time than there is memory for. ``None`` for all rows.
        sources: The rows that it reads, among those of all ranks, where these alone come to the device.
    """

    spans: tuple[slice, ...]
    pieces: tuple[tuple[Tensor, ...] | None, ...]
    sources: Tensor | None = None


class SlicePlan:
    """How a sum over the edges of all ranks is cut into chunks; the same on every rank.

    Args:
        csr: In-edges of the rows of all ranks, which stand one rank after the other. Chunks are views of it.
        counts: How many rows each rank has.
        num_chunks: How many chunks.
        overflow: Where edges and slices are but for those of one chunk; on the device by default.
        most_rows: The most rows of a rank that are split at a time.

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
        most_rows: int | None = None,
    ) -> None:
        self.csr, self.overflow = csr, overflow
        self.starts = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
        num_chunks = max(1, min(num_chunks, max(counts, default=0)))
        self.chunks: list[SliceChunk] = []
        unread = torch.ones(csr.num_cols, dtype=torch.bool, device=csr.index.device)
        index = csr.index if overflow is None else overflow.empty(tuple(csr.index.shape), csr.index.dtype)
        for number in range(num_chunks):
            spans = _spans(self.starts, counts, number, num_chunks)
            if num_chunks == 1 and overflow is None:
                self.chunks.append(SliceChunk(spans, (None,)))
                continue
            read = torch.zeros_like(unread)
            for span in spans:
                read[csr.index[self.edges_of(span)].long()] = True
            # rows that nobody reads go with the last chunk
            fresh = (unread if number == num_chunks - 1 else unread & read).nonzero().squeeze(1)
            unread[fresh] = False
            sources = None
            if overflow is not None:
                read_rows = read.nonzero().squeeze(1)
                sources = overflow.empty(tuple(read_rows.shape), index.dtype)
                sources.copy_(read_rows)
                place = read.cumsum(0, dtype=index.dtype) - 1
                for span in spans:
                    index[self.edges_of(span)] = place[csr.index[self.edges_of(span)].long()]
            self.chunks.append(SliceChunk(spans, self._pieces(fresh, most_rows), sources))
        self.csr = CSR(csr.indptr, index, csr.num_cols)

    def _pieces(self, fresh: Tensor, most_rows: int | None) -> tuple[tuple[Tensor, ...], ...]:
        bounds = torch.searchsorted(fresh, torch.tensor(self.starts, device=fresh.device)).tolist()
        ranks = [fresh[start:end] for start, end in pairwise(bounds)]
        longest = max(rows.numel() for rows in ranks)
        size = max(longest if most_rows is None else min(most_rows, longest), 1)
        # at least one, empty or not: every chunk's turn is the same on all ranks
        return tuple(tuple(rows[start : start + size] for rows in ranks) for start in range(0, max(longest, 1), size))

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return self.starts[-1]

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

    def add_up(self, span: slice, out: Tensor, *, x: Tensor, value: Tensor | None, scale: Tensor | None) -> None:
        """Write the sums of some rows, one after the other, into ``out``.

        Args:
            span: The rows.
            out: On any device.
            x: What their chunk reads.
            value: The weight of each edge.
            scale: Each sum is multiplied by its row of this.
        """
        if out.numel() == 0:
            return
        edges, device = self.edges_of(span), x.device
        indptr = self.csr.indptr[span.start : span.stop + 1] - edges.start
        block = CSR(indptr.to(device), self.csr.index[edges].to(device), x.size(0))
        sums = out if out.device == device else torch.empty_like(out, device=device)
        spmm_into(sums, block, x, None if value is None else value[edges].to(device))
        if scale is not None:
            sums *= scale[span].to(device)
        if sums is not out:
            out.copy_(sums)


def chunks_within(budget: int, csr: CSR, counts: Sequence[int], width: int, value_bytes: int, weight_bytes: int) -> int:
    """In how many chunks edges and rows take no more bytes at a time; the same on every rank.

    Args:
        budget: Bytes on the device.
        csr: In-edges of the rows of all ranks.
        counts: How many rows each rank has.
        width: Columns of all ranks.
        value_bytes: Of a value in a row.
        weight_bytes: Of an edge's weight; 0 if edges have none.

    Raises:
        InputError: If the rows that one chunk reads do not fit, even if it has one row of each rank.
    """
    starts = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    held = -(-width // len(counts)) * value_bytes
    largest, most = 0, max(counts, default=0)
    num_chunks = 1
    while True:
        num_chunks = min(num_chunks, max(most, 1))
        largest = 0
        for number in range(num_chunks):
            spans = _spans(starts, counts, number, num_chunks)
            edges = sum(int(csr.indptr[span.stop]) - int(csr.indptr[span.start]) for span in spans)
            rows = sum(_width(span) for span in spans)
            own = max(_width(span) for span in spans)
            travelling = _AHEAD * (rows * held + own * width * value_bytes)
            read = min(edges, csr.num_cols) * held
            largest = max(largest, edges * (csr.index.element_size() + weight_bytes) + read + travelling)
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


def aggregate_slices(
    x: Tensor,
    plan: SlicePlan,
    communicator: Communicator,
    *,
    label: str,
    value: Tensor | None = None,
    rounds: int = 1,
    before: Tensor | None = None,
    after: Tensor | None = None,
    overlap: bool = True,
) -> Tensor:
    r"""Sum the rows of sources so many times, each rank some of the columns; no gradient.

    Args:
        x: This rank's rows.
        plan: The edges.
        communicator: The ranks; each makes the call, with the same arguments but for ``x``.
        label: Named when something goes wrong.
        value: The weight of each edge.
        rounds: How many times.
        before: Each row is multiplied by this before every round.
        after: And by this after it.
        overlap: Aggregate while rows and sums travel; without, all rows first, and each chunk's sums before the next.

    Shapes:
        ``x`` and the result are :math:`(n, C)`, ``value`` is :math:`(E, 1)` and ``before`` and ``after`` are
        :math:`(N, 1)`, where N and E count the rows and edges of all ranks.
    """
    travels = _Travels(x, plan, communicator, label, ahead=_AHEAD if overlap else 1)
    if before is not None:
        travels.x = x * before[travels.own].to(x.device)
    between = after if before is None else before if after is None else before * after
    rows = travels.slices
    sums = torch.empty(0) if rounds == 1 else travels.memory()
    if not overlap:
        travels.take_sources(len(plan.chunks))
    for number in range(rounds):
        last = number == rounds - 1
        for turn, chunk in enumerate(plan.chunks):
            if number == 0:
                travels.take_sources(turn + 1)
            read = plan.sources_of(chunk, rows)
            if last:
                travels.gather(chunk, partial(plan.add_up, x=read, value=value, scale=after))
                continue
            for span in plan.joined(chunk):
                with travels.aggregating(span):
                    plan.add_up(span, sums[span], x=read, value=value, scale=between)
        rows, sums = sums, rows
    return travels.finish()


class _Travels:
    """Rows of this rank on their way to slices of all, and slices of sums on their way back, chunk by chunk.

    Attributes:
        x: This rank's rows.
        own: Where they stand among those of all.
        slices: This rank's columns of all rows, as far as they are here.
    """

    def __init__(self, x: Tensor, plan: SlicePlan, communicator: Communicator, label: str, *, ahead: int) -> None:
        self.x, self._plan, self._communicator, self._ahead = x, plan, communicator, ahead
        rank, size = communicator.rank, communicator.world_size
        self.own = slice(plan.starts[rank], plan.starts[rank + 1])
        self._columns = [columns_of(x.size(1), peer, size) for peer in range(size)]
        self.slices = self.memory()
        self._out = torch.empty_like(x)
        self._label = f"{label}, {describe_rows(x)}"
        # what is to be split, and after how much of it each chunk has all that it reads
        self._pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
        self._needed = [0]
        for chunk in plan.chunks:
            self._needed.append(self._needed[-1] + len(chunk.pieces))
        self._splits: deque[Transfer] = deque()
        self._begun = self._taken = 0
        self._gathers: deque[tuple[Transfer, list[Tensor], SliceChunk]] = deque()
        self._gathered = 0

    def memory(self) -> Tensor:
        """For this rank's columns of all rows."""
        shape = (self._plan.num_rows, _width(self._columns[self._communicator.rank]))
        overflow = self._plan.overflow
        return self.x.new_empty(shape) if overflow is None else overflow.empty(shape, self.x.dtype)

    def take_sources(self, num_chunks: int) -> None:
        """Wait for all that the first so many chunks read; what is next is on its way then."""
        while self._taken < self._needed[num_chunks]:
            while self._begun < min(self._taken + self._ahead, len(self._pieces)):
                self._splits.append(self._split(self._begun))
                self._begun += 1
            self._take_split(self._splits.popleft(), self._pieces[self._taken])
            self._taken += 1

    def _take_split(self, transfer: Transfer, fresh: tuple[Tensor, ...] | None) -> None:
        rank, host = self._communicator.rank, self.slices.device
        mine = self.x[:, self._columns[rank]]
        if fresh is None:
            self.slices[self.own] = mine
        else:
            own = mine.index_select(0, (fresh[rank] - self.own.start).to(mine.device))
            self.slices.index_copy_(0, fresh[rank], own.to(host))
        for leg in transfer.sources:
            rows = transfer.take(leg)
            if fresh is not None:  # otherwise they are in their place
                self.slices.index_copy_(0, fresh[leg.rank], rows.to(host))
        transfer.finish()

    def _split(self, number: int) -> Transfer:
        fresh, memory = self._pieces[number], self._communicator.buffers
        starts, rank = self._plan.starts, self._communicator.rank
        turn = number % self._ahead
        if fresh is None:
            incoming = [self.slices[start:end] for start, end in pairwise(starts)]
            index = None
        else:
            counts = [rows.numel() for rows in fresh]
            mine = self.x[:, self._columns[rank]]
            incoming = list(memory.get(f"slices received, {turn}", sum(counts), mine).split(counts))
            index = (fresh[rank] - self.own.start).to(self.x.device)
        transfer = Transfer(self._communicator, incoming, f"{self._label}, split {number}", further=number > 0)
        num_rows = self.x.size(0) if index is None else index.numel()
        for leg in transfer.targets:
            columns = self.x[:, self._columns[leg.rank]]
            buffer = memory.get(f"slices sent to {leg.rank}, {turn}", num_rows, columns)
            with recorded(self._communicator.recorder, "pack", self._label):
                transfer.give(
                    leg, buffer.copy_(columns) if index is None else torch.index_select(columns, 0, index, out=buffer)
                )
        return transfer

    def gather(self, chunk: SliceChunk, add_up: Callable[[slice, Tensor], None]) -> None:
        """Sum a chunk, for each rank its rows, and let them go there."""
        if len(self._gathers) == self._ahead:  # its memory is used again
            self._take_sums()
        memory, rank, turn = self._communicator.buffers, self._communicator.rank, self._gathered % self._ahead
        count = _width(chunk.spans[rank])
        incoming = [
            memory.get(f"sums of rank {peer}, {turn}", count, self.x[:, columns])
            for peer, columns in enumerate(self._columns)
        ]
        number = self._gathered
        transfer = Transfer(self._communicator, incoming, f"{self._label}, gather {number}", further=number > 0)
        for leg in transfer.targets:
            span = chunk.spans[leg.rank]
            sums = memory.get(f"sums for rank {leg.rank}, {turn}", _width(span), incoming[rank])
            with self.aggregating(span):
                add_up(span, sums)
            transfer.give(leg, sums)
        with self.aggregating(chunk.spans[rank]):
            add_up(chunk.spans[rank], incoming[rank])
        self._gathers.append((transfer, incoming, chunk))
        self._gathered += 1
        if self._ahead == 1:
            self._take_sums()

    def _take_sums(self) -> None:
        """Wait for the sums of the chunk that was gathered first."""
        transfer, incoming, chunk = self._gathers.popleft()
        rank = self._communicator.rank
        span = chunk.spans[rank]
        here = self._out[span.start - self.own.start : span.stop - self.own.start]
        here[:, self._columns[rank]] = incoming[rank]
        for leg in transfer.sources:
            here[:, self._columns[leg.rank]] = transfer.take(leg)
        transfer.finish()

    def aggregating(self, span: slice) -> AbstractContextManager[None]:
        """Notes the time."""
        return recorded(self._communicator.recorder, "aggregate", f"rows {span.start} to {span.stop}")

    def finish(self) -> Tensor:
        """This rank's sums, all columns."""
        while self._gathers:
            self._take_sums()
        return self._out


def _width(part: slice) -> int:
    return int(part.stop - part.start)
