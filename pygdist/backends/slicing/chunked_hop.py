"""What a hop by chunks reads, how all ranks come by it, and what a chunk takes of it to the device.

To a layer a chunk is a small bipartite graph, from the rows that it reads to its destinations. What a rank has of its
own rows or edges is split or shared piece by piece, in the order in which chunks read it (NeutronTP, Sec. 4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pygdist.backends.slicing.chunk_plan import AHEAD, Queue, SliceChunk, SlicePlan, length_of
from pygdist.backends.slicing.pipeline import Freight, slices_of
from pygdist.comm import Communicator
from pygdist.comm.recorder import recorded
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.reads import leaves_of
from pygdist.kernels import CSR
from pygdist.memory.overflow import Overflow

__all__ = ["ChunkRun", "ChunkedHop", "Ranks", "Taken", "Waiting", "rows_of"]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who runs a hop, and within which memory.

    Attributes:
        communicator: The ranks.
        counts: How many rows each has.
        overflow: Where rows, edges and results wait.
        overlap: Rows travel while a chunk is computed; without, all before the first one, and results after each.
    """

    communicator: Communicator
    counts: tuple[int, ...]
    overflow: Overflow
    overlap: bool = True


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a hop reads of nodes or edges.

    Attributes:
        rows: One for each node; for each edge if neither end is read.
        name: Named when something goes wrong.
        source: A chunk reads those of its edges' sources.
        target: A chunk reads those of its destinations.
        way: How all ranks come by what they read: ``split``, each its columns, or ``share``, all whole rows, where
            ``rows`` are this rank's; or ``here``, where they are those of all ranks.
        most_columns: Of what is here, where each rank has some of the columns: the most that one has, as all must make
            the same chunks.
        kept: What arrives is given back by the hop, to be read by those after it.
    """

    rows: Tensor
    name: str = "rows"
    source: bool = False
    target: bool = False
    way: Literal["split", "share", "here"] = "here"
    most_columns: int | None = None
    kept: bool = False

    @property
    def of_edges(self) -> bool:
        """Whether there is one row for each edge."""
        return not (self.source or self.target)

    def row_bytes(self, world_size: int) -> int:
        """Bytes of a row as it is read, on the rank that has the most of it."""
        most = -(-self.rows.size(-1) // world_size) if self.way == "split" else self.most_columns
        shape = self.rows.shape[1:] if most is None else (*self.rows.shape[1:-1], most)
        return math.prod(shape) * self.rows.element_size()


class Taken(NamedTuple):
    """What a chunk gets of something that waits."""

    source: Tensor | None = None
    target: Tensor | None = None
    edge: Tensor | None = None


ChunkRun = Callable[[Adjacency, list[Taken]], Tensor]
"""Called with the edges of a chunk and what it gets of all that waits; gives one row for each of its destinations."""


@dataclass(frozen=True)
class ChunkedHop:
    """A hop, all of whose chunks are computed alike.

    Attributes:
        run: Computes a chunk.
        waiting: What it reads.
        plan: The chunks.
        ranks: Who runs it.
        label: Named when something goes wrong.
        width: How many columns all ranks have together of the result, of which each then gets its rows; ``None`` if
            every rank keeps its columns of all rows.
        device: Of a rank's rows of the result.
        others: Leaves that it may read beside what waits, such as parameters.
    """

    run: ChunkRun
    waiting: tuple[Waiting, ...]
    plan: SlicePlan
    ranks: Ranks
    label: str
    width: int | None
    device: torch.device
    others: tuple[Tensor, ...] = ()

    def check(self, out: Tensor, taken: Sequence[Tensor] = ()) -> Tensor:
        """Complain of what a chunk was computed from if that would not get its gradient; the same on every rank."""
        known = {id(one) for one in (*self.others, *taken)}
        for leaf in leaves_of(out):
            if id(leaf) not in known:
                raise InputError(
                    f"{self.label}: computes with a tensor of shape {tuple(leaf.shape)} that needs a gradient, and is "
                    "neither an argument of propagate nor known to be a parameter or an attribute that the layer's "
                    "hops read, so it would get none by chunks; make it one of these, or leave memory_gib out"
                )
        return out

    def edges(self, chunk: SliceChunk) -> Adjacency:
        """The edges of a chunk, from the rows that it reads to its destinations."""
        csr, device = self.plan.csr, self.ranks.overflow.device
        assert chunk.sources is not None
        spans = self.plan.joined(chunk)
        degrees = torch.cat([csr.indptr[span.start : span.stop + 1].diff() for span in spans])
        indptr = torch.zeros(degrees.numel() + 1, dtype=csr.indptr.dtype, device=degrees.device)
        torch.cumsum(degrees, 0, out=indptr[1:])
        index = rows_of(csr.index, [self.plan.edges_of(span) for span in spans])
        return Adjacency.from_csr(CSR(indptr.to(device), index.to(device), chunk.sources.numel()))

    def take(self, chunk: SliceChunk, tensors: Sequence[Tensor]) -> list[Taken]:
        """What a chunk reads, on the device."""
        spans, device = self.plan.joined(chunk), self.ranks.overflow.device
        among = [self.plan.edges_of(span) for span in spans]
        return [
            Taken(edge=rows_of(rows, among).to(device))
            if one.of_edges
            else Taken(
                source=self.plan.sources_of(chunk, rows) if one.source else None,
                target=rows_of(rows, spans).to(device) if one.target else None,
            )
            for one, rows in zip(self.waiting, tensors, strict=True)
        ]

    def add(self, chunk: SliceChunk, end: str, gradient: Tensor, found: Tensor) -> None:
        """Add what a chunk found to the gradient of something that waits."""
        found = found.to(gradient.device)
        if end == "source":
            assert chunk.sources is not None
            gradient.index_add_(0, chunk.sources, found)  # no row comes twice, so there is but one order
            return
        spans = [self.plan.edges_of(span) if end == "edge" else span for span in self.plan.joined(chunk)]
        for span, part in zip(spans, found.split([length_of(span) for span in spans]), strict=True):
            gradient[span] += part

    def computing(self, number: int) -> AbstractContextManager[None]:
        """Notes the time of a chunk."""
        return recorded(self.ranks.communicator.recorder, "aggregate", f"chunk {number}")

    # -- what travels -------------------------------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """Pieces of a tensor that are under way at once."""
        return AHEAD if self.ranks.overlap else 1

    def memory_for(self, number: int, own: Tensor) -> Tensor:
        """Where something that travels waits when it is here."""
        one, communicator = self.waiting[number], self.ranks.communicator
        num_rows = int(self.plan.csr.indptr[-1]) if one.of_edges else self.plan.num_rows
        shape = own.shape[1:]
        if one.way == "split":
            held = slices_of(own.size(-1), communicator.world_size)[communicator.rank]
            shape = torch.Size([*own.shape[1:-1], length_of(held)])
        return self.ranks.overflow.empty((num_rows, *shape), own.dtype)

    def freight(self, number: int, own: Tensor, every: Tensor, num_tensors: int) -> Freight:
        """Something that waits, to travel there or back."""
        one, plan, size = self.waiting[number], self.plan, self.ranks.communicator.world_size
        columns = slices_of(own.size(-1), size) if one.way == "split" else None
        row_bytes = math.prod(own.shape[1:]) * own.element_size() * (1 if columns is not None else size)
        most_rows = self.ranks.overflow.rows_at_a_time(row_bytes, num_tensors)
        starts = plan.edge_starts if one.of_edges else plan.starts
        queue = (
            plan.edge_queue(most_rows=most_rows)
            if one.of_edges
            else plan.queue(source=one.source, target=one.target, most_rows=most_rows)
        )
        return Freight(
            own=own, every=every, columns=columns, start=starts[self.ranks.communicator.rank], queue=queue,
            label=f"{self.label}, {one.name}",
        )  # fmt: skip

    def result(self, own: Tensor, queue: Queue, every: Tensor | None = None) -> Freight:
        """This rank's rows of the result, or of its gradient."""
        communicator = self.ranks.communicator
        return Freight(
            own=own, every=every, columns=slices_of(own.size(-1), communicator.world_size),
            start=self.plan.starts[communicator.rank], queue=queue, label=f"{self.label}, result",
        )  # fmt: skip


def rows_of(rows: Tensor, spans: Sequence[slice]) -> Tensor:
    """Some rows one after the other, which are not copied if they are so anyway."""
    return rows[spans[0]] if len(spans) == 1 else torch.cat([rows[span] for span in spans])
