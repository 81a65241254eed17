"""Any hop over slices within a budget: chunk by chunk, and once more in the backward pass.

A chunk is some destinations with all their in-edges (NeutronTP, Sec. 4.2.1), so whatever a layer makes of the messages
of one destination (softmax, maximum, deviation) is complete in it. To the layer it is a small bipartite graph. Rows,
edges and gradients of all ranks wait in an :class:`~pygdist.backends.overflow.Overflow`; a chunk takes what it reads to
the device, and what it computes there is dropped and computed again in the backward pass (activation checkpointing).
Every rank runs the same chunks in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pygdist.backends.overflow import Overflow
from pygdist.backends.pipeline import SliceChunk, SlicePlan, chunks_within
from pygdist.graph import Adjacency
from pygdist.kernels import CSR

__all__ = ["ChunkRun", "Taken", "Waiting", "hop_in_chunks", "repeated"]

_EDGE_BYTES = 24  # of an edge in a chunk beside what waits for it: by source too, and which of these it is
_LIST_BYTES = 32  # of an edge where a layer's own messages read it, both ends, once more where they are looked up
_MESSAGES = 16  # of an edge there: its source's row and what softmax aggregation makes of it, forward and backward
_WEIGHTS = 6  # of an edge: scores, exponentials and their gradients, where no kernel of ours computes them as it sums
_GRADED = 2  # what is read has a gradient


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What a hop reads of all ranks' nodes or edges.

    Attributes:
        rows: One for each node; for each edge if neither end is read.
        source: A chunk reads those of its edges' sources.
        target: A chunk reads those of its destinations.
        most_columns: Where each rank has some of the columns, the most that one has: all must make the same chunks.
    """

    rows: Tensor
    source: bool = False
    target: bool = False
    most_columns: int | None = None

    @property
    def of_edges(self) -> bool:
        """Whether there is one row for each edge."""
        return not (self.source or self.target)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, on the rank that has the most of it."""
        shape = self.rows.shape[1:] if self.most_columns is None else (*self.rows.shape[1:-1], self.most_columns)
        return math.prod(shape) * self.rows.element_size()


class Taken(NamedTuple):
    """What a chunk gets of something that waits."""

    source: Tensor | None = None
    target: Tensor | None = None
    edge: Tensor | None = None


ChunkRun = Callable[[Adjacency, list[Taken]], Tensor]
"""Called with the edges of a chunk and what it gets of all that waits; gives one row for each of its destinations."""


def hop_in_chunks(
    run: ChunkRun,
    waiting: Sequence[Waiting],
    edges: Adjacency,
    overflow: Overflow,
    *,
    others: Iterable[Tensor] = (),
    messages: bool = False,
    weight_bytes: int = 0,
) -> Tensor:
    r"""A hop over the edges of all ranks.

    Args:
        run: Computes a chunk; it is called again in the backward pass, and must give the same then.
        waiting: What it reads.
        edges: In-edges of all ranks' rows.
        overflow: Where rows, edges and results wait.
        others: What else it may read that needs a gradient, such as parameters.
        messages: It makes a message for each edge, as wide as what it reads.
        weight_bytes: Of the weights that it makes for each edge.

    Shapes:
        The result is :math:`(N, *)`; it waits too.
    """
    nodes = sum(one.row_bytes for one in waiting if not one.of_edges)
    edge_bytes = _EDGE_BYTES + _WEIGHTS * weight_bytes + _GRADED * sum(one.row_bytes for one in waiting if one.of_edges)
    if messages:
        edge_bytes += _LIST_BYTES + _MESSAGES * nodes
    hop = _Hop(run, tuple(waiting), _plan(edges, overflow, _GRADED * nodes, edge_bytes), overflow)
    graded = [one for one in others if one.requires_grad]
    out: Tensor = _Chunks.apply(hop, *(one.rows for one in waiting), *graded)  # type: ignore[no-untyped-call]
    return out


def repeated(x: Tensor, times: int) -> tuple[Tensor, ...]:
    """The same tensor for so many readers, whose gradients are added up in the memory of one of them."""
    return (x,) if times == 1 else tuple(_Repeated.apply(x, times))  # type: ignore[no-untyped-call]


def _plan(edges: Adjacency, overflow: Overflow, row_bytes: int, edge_bytes: int) -> SlicePlan:
    """Chunks of consecutive rows; made once for what these take."""
    known: dict[tuple[object, ...], SlicePlan] = edges.derived.setdefault("plans", {})
    facts = "chunks", row_bytes, edge_bytes
    if facts not in known:
        csr, counts = edges.csr(), (edges.num_dst,)
        # the other half is for what travels
        num_chunks = chunks_within(overflow.budget // 2, csr, counts, row_bytes, 1, edge_bytes)
        cut = "chunks", num_chunks
        if cut not in known:
            with torch.inference_mode(False):
                known[cut] = SlicePlan(csr, counts, num_chunks, overflow=overflow)
        known[facts] = known[cut]
    return known[facts]


@dataclass(frozen=True)
class _Hop:
    run: ChunkRun
    waiting: tuple[Waiting, ...]
    plan: SlicePlan
    overflow: Overflow

    def edges(self, chunk: SliceChunk) -> Adjacency:
        """The edges of a chunk, from the rows that it reads to its destinations."""
        (span,) = chunk.spans
        csr, device, among = self.plan.csr, self.overflow.device, self.plan.edges_of(span)
        indptr = csr.indptr[span.start : span.stop + 1] - among.start
        assert chunk.sources is not None
        return Adjacency.from_csr(CSR(indptr.to(device), csr.index[among].to(device), chunk.sources.numel()))

    def take(self, chunk: SliceChunk, tensors: Sequence[Tensor]) -> list[Taken]:
        """What a chunk reads, on the device."""
        (span,), device = chunk.spans, self.overflow.device
        return [
            Taken(edge=rows[self.plan.edges_of(span)].to(device))
            if one.of_edges
            else Taken(
                source=self.plan.sources_of(chunk, rows) if one.source else None,
                target=rows[span].to(device) if one.target else None,
            )
            for one, rows in zip(self.waiting, tensors, strict=True)
        ]

    def add(self, chunk: SliceChunk, end: str, gradient: Tensor, found: Tensor) -> None:
        """Add what a chunk found to the gradient of something that waits."""
        (span,), found = chunk.spans, found.to(gradient.device)
        if end == "source":
            assert chunk.sources is not None
            gradient.index_add_(0, chunk.sources, found)  # no row comes twice, so there is but one order
        else:
            gradient[self.plan.edges_of(span) if end == "edge" else span] += found


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hop: _Hop, *tensors: Tensor) -> Tensor:
        kind = hop.overflow.device.type
        ctx.hop, ctx.autocast = hop, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(*tensors)
        rows, out = tensors[: len(hop.waiting)], None
        for chunk in hop.plan.chunks:
            found = hop.run(hop.edges(chunk), hop.take(chunk, rows))
            if out is None:
                out = hop.overflow.empty((hop.plan.num_rows, *found.shape[1:]), found.dtype)
            out[chunk.spans[0]] = found.to(out.device)
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hop, tensors = ctx.hop, ctx.saved_tensors
        rows, others = tensors[: len(hop.waiting)], tensors[len(hop.waiting) :]
        gradients = [
            hop.overflow.empty(tuple(one.shape), one.dtype).zero_() if needed else None
            for one, needed in zip(rows, ctx.needs_input_grad[1:], strict=False)
        ]
        of_others: list[Tensor | None] = [None] * len(others)
        kind, dtype, enabled = ctx.autocast
        for chunk in hop.plan.chunks:
            taken = hop.take(chunk, rows)
            wanted: list[tuple[str, Tensor, Tensor]] = []
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    parts = {end: part.detach().requires_grad_() for end, part in taken[number]._asdict().items()
                             if part is not None}  # fmt: skip
                    wanted += [(end, gradient, part) for end, part in parts.items()]
                    taken[number] = Taken(**parts)
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                out = hop.run(hop.edges(chunk), taken)
            if not out.requires_grad:  # of a chunk without edges, say
                continue
            leaves = [part for _, _, part in wanted] + list(others)
            given = grad[chunk.spans[0]].to(out.device)
            found = torch.autograd.grad(out, leaves, given, allow_unused=True)
            for (end, gradient, _), one in zip(wanted, found, strict=False):
                if one is not None:
                    hop.add(chunk, end, gradient, one)
            for number, one in enumerate(found[len(wanted) :]):
                known = of_others[number]
                of_others[number] = known if one is None else one if known is None else known + one
        return None, *gradients, *of_others


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(times))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total, *rest = grads
        for one in rest:
            total += one  # made for this reader alone
        return total, None
