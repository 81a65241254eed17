"""Any hop over slices within a budget: chunk by chunk, and once more in the backward pass.

A chunk is some destinations with all their in-edges (NeutronTP, Sec. 4.2.1), so whatever a layer makes of the messages
of one destination (softmax, maximum, deviation) is complete in it. To the layer it is a small bipartite graph. Rows,
edges and gradients of all ranks wait in an :class:`~pygdist.memory.overflow.Overflow`; a chunk takes what it reads to
the device, and what it computes there is dropped and computed again in the backward pass (activation checkpointing).

While a chunk is computed, what the next one reads and no chunk before it is on its way, and so are the results of the
one before (Sec. 4.2.2). The backward pass runs the chunks the other way round: the gradients of a chunk's results come
just before it, and a source's gradient goes home after the chunk that it was sent for, which is the last to add to it.
Every rank runs the same chunks in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pygdist.backends.slicing.chunk_plan import SliceChunk, SlicePlan, chunks_within, known_plan, length_of
from pygdist.backends.slicing.chunked_hop import ChunkedHop, ChunkRun, Ranks, Taken, Waiting, rows_of
from pygdist.backends.slicing.pipeline import Homeward, Outward, slices_of
from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency, Slot

__all__ = ["hop_in_chunks", "repeated"]

_PLANS = Slot[dict[tuple[int, ...], SlicePlan]]("plans of hops")
_EDGE_BYTES = 24  # of an edge in a chunk beside what waits for it: by source too, and which of these it is
_LIST_BYTES = 32  # of an edge where a layer's own messages read it, both ends, once more where they are looked up
_MESSAGES = 16  # of an edge there: its source's row and what softmax aggregation makes of it, forward and backward
_WEIGHTS = 6  # of an edge: scores, exponentials and their gradients, where no kernel of ours computes them as it sums
_GRADED = 2  # what is read has a gradient


def hop_in_chunks(
    run: ChunkRun,
    waiting: Sequence[Waiting],
    edges: Adjacency,
    ranks: Ranks,
    *,
    label: str,
    width: int | None,
    device: torch.device | None = None,
    others: Mapping[Tensor, Tensor] | None = None,
    messages: bool = False,
    weight_bytes: int = 0,
    fold: int = 1,
    all_edges: str = "",
) -> tuple[Tensor, ...]:
    r"""A hop over the edges of all ranks.

    Args:
        run: Computes a chunk; it is called again in the backward pass, and must give the same then.
        waiting: What it reads.
        edges: In-edges of all ranks' rows.
        ranks: Who runs it; each makes the call.
        label: Named when something goes wrong.
        width: How many columns all ranks have together of the result, of which each then gets its rows; ``None`` to
            leave every rank its columns of all rows, which wait.
        device: Of a rank's rows of the result; that of the first that waits by default.
        others: What else it may read that needs a gradient, such as parameters, with the leaf that ``run`` reads: the
            same, or one that stands for what was computed.
        messages: It makes a message for each edge, as wide as what it reads.
        weight_bytes: Of the weights that it makes for each edge.
        fold: So many times as wide as the rows that it reads is the result.
        all_edges: Why it does not get some rows right without the edges of others, if it does not.

    Returns:
        The result, then of all that is to be kept what arrived.

    Raises:
        InputError: If it needs all edges, which do not fit; on every rank.

    Shapes:
        The result is :math:`(n, *, C)`, or :math:`(N, *, c)` if it is left where it is.
    """
    size = ranks.communicator.world_size
    nodes = sum(one.row_bytes(size) for one in waiting if not one.of_edges)
    edge_bytes = (
        _EDGE_BYTES + _WEIGHTS * weight_bytes + _GRADED * sum(one.row_bytes(size) for one in waiting if one.of_edges)
    )
    if messages:
        edge_bytes += _LIST_BYTES + _MESSAGES * nodes
    made = fold * max(one.row_bytes(size) for one in waiting if not one.of_edges)
    plan = _plan(edges, ranks, _GRADED * nodes, edge_bytes, _GRADED * max(made, nodes))
    if all_edges and len(plan.chunks) > 1:
        raise InputError(
            f"{label}: {all_edges}, so it cannot run by chunks, and memory_gib asks for {len(plan.chunks)} of them; "
            "leave it out, or give more"
        )
    hop = ChunkedHop(
        run=run,
        # what travels need not be held for the backward pass beside what arrives
        waiting=tuple(replace(one, rows=torch.empty(0)) for one in waiting),
        plan=plan,
        ranks=ranks,
        label=label,
        width=width,
        device=device or waiting[0].rows.device,
        others=tuple((others or {}).values()),
    )
    out: tuple[Tensor, ...] = _Chunks.apply(  # type: ignore[no-untyped-call]
        hop, torch.is_grad_enabled(), *(one.rows for one in waiting), *(others or ())
    )
    return out


def repeated(x: Tensor, times: int) -> tuple[Tensor, ...]:
    """The same tensor for so many readers, whose gradients are added up in the memory of one of them."""
    return (x,) if times == 1 else tuple(_Repeated.apply(x, times))  # type: ignore[no-untyped-call]


def _plan(edges: Adjacency, ranks: Ranks, row_bytes: int, edge_bytes: int, out_bytes: int) -> SlicePlan:
    """Chunks that take no more than the budget; made once for what their rows and edges take."""
    known = edges.slot(_PLANS, dict)
    facts = row_bytes, edge_bytes, out_bytes
    if facts not in known:
        overflow, counts = ranks.overflow, ranks.counts
        width = row_bytes * len(counts)
        # the other half is for what travels
        num_chunks = chunks_within(
            overflow.budget // 2, edges.csr(), counts, width, 1, edge_bytes, out_bytes=out_bytes
        )  # fmt: skip
        known[facts] = known_plan(edges, "forward", edges.csr, counts, num_chunks, overflow=overflow)
    return known[facts]


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hop: ChunkedHop, graded: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        kind, plan = hop.ranks.overflow.device.type, hop.plan
        ctx.hop, ctx.autocast = hop, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.own = [(tuple(one.shape), one.dtype, one.device) for one in tensors[: len(hop.waiting)]]
        travelling = [number for number, one in enumerate(hop.waiting) if one.way != "here"]
        rows = list(tensors[: len(hop.waiting)])
        for number in travelling:
            rows[number] = hop.memory_for(number, rows[number])
        there = Outward(
            [hop.freight(number, tensors[number], rows[number], len(travelling)) for number in travelling],
            hop.ranks.communicator, ahead=hop.ahead,
        )  # fmt: skip
        if not hop.ranks.overlap:
            there.take(len(plan.chunks))
        results = _Results(hop)
        for number, chunk in enumerate(plan.chunks):
            there.take(number + 1)
            with hop.computing(number):
                taken = hop.take(chunk, rows)
                # the first one tells what else it is computed from
                with torch.set_grad_enabled(graded and number == 0):
                    found = hop.check(hop.run(hop.edges(chunk), taken)).detach()
            results.add(chunk, found)
        ctx.save_for_backward(*rows, *tensors[len(hop.waiting) :])
        return results.finish(), *(rows[number] for number in travelling if hop.waiting[number].kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_kept: Tensor) -> tuple[Tensor | None, ...]:
        hop, tensors = ctx.hop, ctx.saved_tensors
        rows = tensors[: len(hop.waiting)]
        gradients = _Gradients(hop, rows, ctx.own, ctx.needs_input_grad[2:], of_kept)
        of_others: list[Tensor | None] = [None] * len(hop.others)
        kind, dtype, enabled = ctx.autocast
        for number, chunk, given in _gradients_of_results(hop, grad):
            with hop.computing(number):
                taken = hop.take(chunk, rows)
                leaves = gradients.leaves(taken)
                with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                    out = hop.run(hop.edges(chunk), taken)
                wanted = [part for _, _, part in leaves]
                hop.check(out, wanted)
                # of a chunk without edges, say, nothing may need a gradient
                found = (
                    torch.autograd.grad(out, [*wanted, *hop.others], given.to(out.device), allow_unused=True)
                    if out.requires_grad
                    else (None,) * (len(wanted) + len(hop.others))
                )
                for (end, gradient, _), one in zip(leaves, found, strict=False):
                    if one is not None:
                        hop.add(chunk, end, gradient, one)
            for place, one in enumerate(found[len(wanted) :]):
                known = of_others[place]
                of_others[place] = known if one is None else one if known is None else known + one
            gradients.complete(number)
        return None, None, *gradients.finish(), *of_others


class _Results:
    """What chunks make: on its way to the rows' owners, or left where all ranks' rows wait."""

    def __init__(self, hop: ChunkedHop) -> None:
        self._hop = hop
        self._back: Homeward | None = None
        self._out: Tensor | None = None

    def add(self, chunk: SliceChunk, found: Tensor) -> None:
        """What a chunk made."""
        hop = self._hop
        parts = found.split([length_of(span) for span in chunk.spans])
        if self._out is None:
            self._begin(found)
        if self._back is None:
            assert self._out is not None
            for span, part in zip(chunk.spans, parts, strict=True):
                self._out[span] = part.to(self._out.device)
        else:
            self._back.send(chunk.spans, lambda rank: parts[rank].to(hop.device).contiguous())

    def _begin(self, like: Tensor) -> None:
        """Memory for what is like what the first chunk made."""
        hop, communicator = self._hop, self._hop.ranks.communicator
        if hop.width is None:
            self._out = hop.ranks.overflow.empty((hop.plan.num_rows, *like.shape[1:]), like.dtype)
            return
        shape = (hop.ranks.counts[communicator.rank], *like.shape[1:-1], hop.width)
        self._out = torch.empty(shape, dtype=like.dtype, device=hop.device)
        self._back = Homeward([hop.result(self._out, hop.plan.result_queue())], communicator, ahead=hop.ahead)

    def finish(self) -> Tensor:
        """All of it."""
        assert self._out is not None
        if self._back is not None:
            self._back.finish()
        return self._out


def _gradients_of_results(hop: ChunkedHop, grad: Tensor) -> Iterator[tuple[int, SliceChunk, Tensor]]:
    """Chunks, the last one first, with the gradients of what they made; those of the next are on their way."""
    plan, communicator, every, there = hop.plan, hop.ranks.communicator, grad, None
    if hop.width is not None:
        held = slices_of(hop.width, communicator.world_size)[communicator.rank]
        every = hop.ranks.overflow.empty((plan.num_rows, *grad.shape[1:-1], length_of(held)), grad.dtype)
        row_bytes = math.prod(grad.shape[1:]) * grad.element_size()
        queue = plan.result_queue(most_rows=hop.ranks.overflow.rows_at_a_time(row_bytes))
        there = Outward(
            [hop.result(grad, queue[::-1], every)], communicator, ahead=hop.ahead, what="backward of gather"
        )  # fmt: skip
        if not hop.ranks.overlap:
            there.take(len(plan.chunks))
    for turn, (number, chunk) in enumerate(reversed(list(enumerate(plan.chunks)))):
        if there is not None:
            there.take(turn + 1)
        yield number, chunk, rows_of(every, plan.joined(chunk))


class _Gradients:
    """Gradients of what a hop read: added up chunk by chunk, on their way home when they are complete.

    Args:
        hop: The hop.
        rows: What its chunks read.
        own: Shape, dtype and device of what it was given.
        needed: Whether a gradient of that is needed.
        of_kept: Gradients of what was kept for later hops, which are added to.
    """

    def __init__(
        self,
        hop: ChunkedHop,
        rows: Sequence[Tensor],
        own: Sequence[tuple[tuple[int, ...], torch.dtype, torch.device]],
        needed: Sequence[bool],
        of_kept: Sequence[Tensor],
    ) -> None:
        kept = iter(of_kept)
        known = [next(kept) if one.kept else None for one in hop.waiting]
        self._every = [
            (hop.ranks.overflow.empty(tuple(one.shape), one.dtype).zero_() if found is None else found)
            if want
            else None
            for one, found, want in zip(rows, known, needed, strict=False)
        ]
        self._found: list[Tensor | None] = list(self._every)
        freights: list[tuple[int, Tensor, Tensor]] = []
        for number, (one, every) in enumerate(zip(hop.waiting, self._every, strict=True)):
            if one.way != "here" and every is not None:
                shape, dtype, device = own[number]
                mine = self._found[number] = torch.empty(shape, dtype=dtype, device=device)
                freights.append((number, mine, every))
        self._back = Homeward(
            [hop.freight(*one, len(freights)) for one in freights], hop.ranks.communicator, ahead=hop.ahead,
            what="backward of split",
        )  # fmt: skip

    def leaves(self, taken: list[Taken]) -> list[tuple[str, Tensor, Tensor]]:
        """Let what a chunk takes have a gradient: which end of an edge, what to add it to, and the part itself."""
        found = []
        for number, every in enumerate(self._every):
            if every is not None:
                parts = {end: part.detach().requires_grad_() for end, part in taken[number]._asdict().items()
                         if part is not None}  # fmt: skip
                found += [(end, every, part) for end, part in parts.items()]
                taken[number] = Taken(**parts)
        return found

    def complete(self, chunk: int) -> None:
        """No chunk that is still to come reads what was sent for this one."""
        self._back.send_chunk(chunk)

    def finish(self) -> list[Tensor | None]:
        """The gradient of all that the hop was given."""
        self._back.finish()
        return self._found


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
