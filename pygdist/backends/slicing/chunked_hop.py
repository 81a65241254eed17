"""One hop chunk by chunk: its inputs, their exchange, and the rows that a chunk reads on the device.

A layer sees a chunk as a small bipartite graph, from source rows to destinations. The rows or edges that a rank owns
are split or shared in pieces, in the order in which chunks read them (NeutronTP, Sec. 4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pygdist.backends.slicing.all_nodes import SliceLayout
from pygdist.backends.slicing.chunk_plan import Chunk, ChunkPlan, Queue, length_of
from pygdist.backends.slicing.pipeline import Shipment
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.reads import leaves_of
from pygdist.kernels import CSR
from pygdist.memory.ring import uploaded


@dataclass(frozen=True, kw_only=True)
class ChunkInput:
    """A tensor of nodes or edges that a hop reads.

    Attributes:
        rows: One for each node; for each edge if neither end is read.
        name: Names the tensor in errors.
        source: Chunks read the rows of their edges' sources.
        target: Chunks read the rows of their destinations.
        way: How all ranks obtain the rows they read. ``split``: ``rows`` are the owned ones, each rank gets its
            columns. ``share``: ``rows`` are the owned ones, each rank gets all columns. ``here``: ``rows`` are those of
            all ranks.
        most_columns: With ``here``, if each rank has some of the columns: the most that one has. All ranks must make
            the same chunks.
        returned: The hop returns the rows that arrived too, to be read by later hops.
    """

    rows: Tensor
    name: str = "rows"
    source: bool = False
    target: bool = False
    way: Literal["split", "share", "here"] = "here"
    most_columns: int | None = None
    returned: bool = False

    @property
    def of_edges(self) -> bool:
        """True if there is one row for each edge."""
        return not (self.source or self.target)

    def row_bytes(self, world_size: int) -> int:
        """Return the bytes of a row as it is read, on the rank that reads the most of it."""
        most = -(-self.rows.size(-1) // world_size) if self.way == "split" else self.most_columns
        shape = self.rows.shape[1:] if most is None else (*self.rows.shape[1:-1], most)
        return math.prod(shape) * self.rows.element_size()


class ChunkRows(NamedTuple):
    """The rows of one input that a chunk reads: at the sources of its edges, at its destinations, or of the edges."""

    source: Tensor | None = None
    target: Tensor | None = None
    edge: Tensor | None = None


ChunkFunction = Callable[[Adjacency, list[ChunkRows]], Tensor]
"""Computes a chunk from its edges and its rows of each input; returns one row for each of its destinations."""


@dataclass(frozen=True)
class ChunkedRun:
    """A hop that runs chunk by chunk: its chunks, and what :func:`~.chunked_autograd.hop_in_chunks` was given.

    It holds no rows and nothing that was computed. ``leaves`` are those that :attr:`compute` reads.
    """

    compute: ChunkFunction
    inputs: tuple[ChunkInput, ...]
    plan: ChunkPlan
    layout: SliceLayout
    label: str
    width: int | None
    device: torch.device
    leaves: tuple[Tensor, ...] = ()

    def check(self, out: Tensor, rows: Sequence[Tensor] = ()) -> Tensor:
        """Return the result of a chunk; refuse one computed from a tensor that would not get its gradient.

        Every rank reads the same tensors, so all of them refuse.
        """
        expected = {id(one) for one in (*self.leaves, *rows)}
        for leaf in leaves_of(out):
            if id(leaf) not in expected:
                raise InputError(
                    f"{self.label}: the hop computes with a tensor of shape {tuple(leaf.shape)} that needs a gradient, "
                    "and that is neither an argument of propagate nor a parameter or attribute which the layer's hops "
                    "are known to read. A hop that runs in chunks would give it no gradient: pass the tensor to "
                    "propagate, make it an attribute of the layer, or leave memory_gib out"
                )
        return out

    def edges(self, chunk: Chunk) -> Adjacency:
        """Return the edges of a chunk, from the rows that it reads to its destinations."""
        csr, device = self.plan.csr, self.layout.memory.device
        assert chunk.sources is not None
        spans = self.plan.joined(chunk)
        degrees = torch.cat([csr.indptr[span.start : span.stop + 1].diff() for span in spans])
        indptr = torch.zeros(degrees.numel() + 1, dtype=csr.indptr.dtype, device=degrees.device)
        torch.cumsum(degrees, 0, out=indptr[1:])
        index = rows_of(csr.index, [self.plan.edges_of(span) for span in spans])
        return Adjacency.from_csr(CSR(uploaded(indptr, device), uploaded(index, device), chunk.sources.numel()))

    def rows(self, chunk: Chunk, tensors: Sequence[Tensor]) -> list[ChunkRows]:
        """Return the rows that a chunk reads of each input, on the device; ``tensors`` hold the rows of all ranks."""
        spans, device = self.plan.joined(chunk), self.layout.memory.device
        edges = [self.plan.edges_of(span) for span in spans]
        return [
            ChunkRows(edge=uploaded(rows_of(tensor, edges), device))
            if one.of_edges
            else ChunkRows(
                source=self.plan.sources_of(chunk, tensor) if one.source else None,
                target=uploaded(rows_of(tensor, spans), device) if one.target else None,
            )
            for one, tensor in zip(self.inputs, tensors, strict=True)
        ]

    def add_gradient(self, chunk: Chunk, end: str, total: Tensor, part: Tensor) -> None:
        """Add the gradient of a chunk's rows to that of all rows."""
        part = part.to(total.device)
        if end == "source":
            assert chunk.sources is not None
            total.index_add_(0, chunk.sources, part)  # no row comes twice, so there is but one order
            return
        spans = [self.plan.edges_of(span) if end == "edge" else span for span in self.plan.joined(chunk)]
        for span, rows in zip(spans, part.split([length_of(span) for span in spans]), strict=True):
            total[span] += rows

    # -- shipments: the tensors that travel ---------------------------------------------------------------------------

    def memory_for(self, number: int, owned: Tensor) -> Tensor:
        """Return memory for the rows of all ranks of an input that travels."""
        one = self.inputs[number]
        num_rows = int(self.plan.csr.indptr[-1]) if one.of_edges else self.plan.num_rows
        shape = list(owned.shape[1:])
        if one.way == "split":
            shape[-1] = self.layout.held(owned.size(-1))
        return self.layout.memory.empty((num_rows, *shape), owned.dtype)

    def shipment(self, number: int, owned: Tensor, rows: Tensor, num_tensors: int) -> Shipment:
        """Return an input, or its gradient, as one of ``num_tensors`` that travel side by side."""
        one, plan, layout = self.inputs[number], self.plan, self.layout
        columns = layout.columns(owned.size(-1)) if one.way == "split" else None
        copies = 1 if columns is not None else layout.communicator.world_size
        row_bytes = math.prod(owned.shape[1:]) * owned.element_size() * copies
        most_rows, start = layout.memory.rows_at_a_time(row_bytes, num_tensors), plan.starts[layout.rank]
        if one.of_edges:
            start, queue = int(plan.csr.indptr[start]), plan.edge_queue(most_rows=most_rows)
        else:
            queue = plan.queue(source=one.source, target=one.target, most_rows=most_rows)
        label = f"{self.label}, {one.name}"
        return Shipment(owned=owned, rows=rows, columns=columns, start=start, queue=queue, label=label)

    def result(self, owned: Tensor, queue: Queue, rows: Tensor | None = None) -> Shipment:
        """Return the result, or its gradient, as a tensor that travels."""
        columns, start = self.layout.columns(owned.size(-1)), self.plan.starts[self.layout.rank]
        label = f"{self.label}, result"
        return Shipment(owned=owned, rows=rows, columns=columns, start=start, queue=queue, label=label)


def rows_of(rows: Tensor, spans: Sequence[slice]) -> Tensor:
    """Return the rows of all spans, one span after the other; a view if there is one span."""
    return rows[spans[0]] if len(spans) == 1 else torch.cat([rows[span] for span in spans])
