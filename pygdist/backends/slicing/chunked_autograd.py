"""Any hop on slices within a memory budget: chunk by chunk, and once more in the backward pass.

A chunk is some destinations with all their in-edges (NeutronTP, Sec. 4.2.1), so a chunk has all messages that an
aggregation of one destination (softmax, maximum, deviation) needs. Rows, edges and gradients of all ranks stay in an
:class:`~pygdist.memory.overflow.Overflow`. A chunk copies its inputs to the device; what it computes there, except its
results, is dropped, and computed again in the backward pass (activation checkpointing).

While a chunk is computed, new rows for the next chunk and the results of the previous chunk are under way (Sec. 4.2.2).
The backward pass runs the chunks in reverse order: the gradients of a chunk's results arrive just before the chunk
runs. The gradient of a row leaves for its owner after the chunk for which the row was sent, which is the last chunk to
add to this gradient. Every rank runs the same chunks in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.slicing.all_nodes import SliceLayout
from pygdist.backends.slicing.chunk_plan import Chunk, ChunkBytes, length_of, plan_for
from pygdist.backends.slicing.chunked_hop import ChunkedRun, ChunkFunction, ChunkInput, ChunkRows, rows_of
from pygdist.backends.slicing.pipeline import GatherPipeline, SplitPipeline
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.recorder import recorded
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.memory.ring import uploaded

_EDGE_BYTES = 24  # of an edge in a chunk beside its rows of inputs: by source too, and its number
_LIST_BYTES = 32  # of an edge that a layer's own messages read: both ends, once more where they are looked up
_MESSAGES = 16  # copies of a row for each edge there: its source's, and those of softmax aggregation, both ways
_WEIGHTS = 6  # copies of an edge's weight: scores, exponentials and their gradients, where torch computes them
_GRADED = 2  # copies of a row that is read: it has a gradient


@dataclass(frozen=True)
class ChunkCost:
    """Memory that a chunk takes while it is computed, beside its inputs.

    Attributes:
        messages: True if the chunk makes a message for each edge, as wide as the source rows.
        weight_bytes: Bytes of the weights that the chunk makes for each edge.
        fold: Width of the result, as a multiple of the width of the source rows.
        needs_all_edges: Reason why a destination's row depends on the edges into other nodes; empty if it does not.
    """

    messages: bool = False
    weight_bytes: int = 0
    fold: int = 1
    needs_all_edges: str = ""

    def bytes_of(self, inputs: Sequence[ChunkInput], world_size: int) -> ChunkBytes:
        """Return the bytes that rows and edges of a chunk take."""
        of_nodes = [one.row_bytes(world_size) for one in inputs if not one.of_edges]
        of_edges = sum(one.row_bytes(world_size) for one in inputs if one.of_edges)
        edge = _EDGE_BYTES + _WEIGHTS * self.weight_bytes + _GRADED * of_edges
        if self.messages:
            edge += _LIST_BYTES + _MESSAGES * sum(of_nodes)
        made = _GRADED * max(self.fold * max(of_nodes), sum(of_nodes))
        return ChunkBytes(read=_GRADED * sum(of_nodes), edge=edge, made=made, whole=made * world_size)


def hop_in_chunks(
    compute: ChunkFunction,
    inputs: Sequence[ChunkInput],
    edges: Adjacency,
    layout: SliceLayout,
    *,
    label: str,
    width: int | None,
    device: torch.device | None = None,
    leaves: Mapping[Tensor, Tensor] | None = None,
    cost: ChunkCost = ChunkCost(),
) -> tuple[Tensor, ...]:
    r"""Run a hop over the edges of all ranks; every rank makes the call.

    Args:
        compute: Computes a chunk. It is called again in the backward pass, and must give the same result then.
        inputs: The tensors that it reads.
        edges: In-edges of all ranks' rows.
        layout: The ranks, and memory for the rows of all of them.
        label: Names the hop in errors.
        width: Number of columns of the result on all ranks together, if each rank then gets all columns of its own
            rows; ``None`` to leave every rank its columns of all rows.
        device: Device of the rank's rows of the result; that of the first input by default.
        leaves: Other tensors that need a gradient and that ``compute`` depends on, such as parameters, each with the
            leaf that it reads: the same tensor, or a leaf that stands for a computed one.
        cost: Memory that a chunk takes beside its inputs.

    Returns:
        The result, :math:`(n, *, C)`, or :math:`(N, *, c)` without ``width``; then, for each input that is
        ``returned``, the rows that arrived.

    Raises:
        InputError: If the hop needs all edges at once and these do not fit; on every rank.
    """
    needs = cost.bytes_of(inputs, layout.communicator.world_size)
    plan = plan_for(edges, "forward", edges.csr, layout, needs=needs)
    if cost.needs_all_edges and len(plan.chunks) > 1:
        raise InputError(
            f"{label}: {cost.needs_all_edges}, so it cannot run in chunks, and memory_gib asks for {len(plan.chunks)} "
            "of them; leave memory_gib out, or give more"
        )
    run = ChunkedRun(
        compute=compute,
        # the backward pass needs the rows that arrive; it must not hold those that were sent as well
        inputs=tuple(replace(one, rows=torch.empty(0)) for one in inputs),
        plan=plan,
        layout=layout,
        label=label,
        width=width,
        device=device or inputs[0].rows.device,
        leaves=tuple((leaves or {}).values()),
    )
    out: tuple[Tensor, ...] = _ChunkedHop.apply(  # type: ignore[no-untyped-call]
        run, torch.is_grad_enabled(), *(one.rows for one in inputs), *(leaves or ())
    )
    return out


def repeated(x: Tensor, times: int) -> tuple[Tensor, ...]:
    """Return the same tensor for ``times`` readers, whose gradients are added up in the memory of one of them."""
    return (x,) if times == 1 else tuple(_Repeat.apply(x, times))  # type: ignore[no-untyped-call]


class _ChunkedHop(torch.autograd.Function):
    r"""Splits inputs, computes chunks and gathers their results.

    Rows go :math:`(n, *, C) \to (N, *, c)`, results :math:`(N, *, c) \to (n, *, C)`. The backward pass sends each rank
    its columns of the results' gradients, and the owner of each row all columns of its gradient; of an input that all
    ranks read whole, the sum of what all ranks computed. Gradients of leaves stay on the rank, as those of parameters.
    """

    @staticmethod
    def forward(ctx: Any, run: ChunkedRun, graded: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        kind, num_inputs = run.layout.memory.device.type, len(run.inputs)
        ctx.run, ctx.autocast = run, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.given = [(tuple(one.shape), one.dtype, one.device) for one in tensors[:num_inputs]]
        travelling = [number for number, one in enumerate(run.inputs) if one.way != "here"]
        rows = list(tensors[:num_inputs])
        for number in travelling:
            rows[number] = run.memory_for(number, rows[number])
        sources = SplitPipeline(
            [run.shipment(number, tensors[number], rows[number], len(travelling)) for number in travelling], run.layout
        )
        if not run.layout.overlap:
            sources.wait_for(len(run.plan.chunks))
        results = _Results(run)
        for number, chunk in enumerate(run.plan.chunks):
            sources.wait_for(number + 1)
            with recorded(run.layout.communicator.recorder, "aggregate", f"chunk {number}"):
                of_chunk = run.rows(chunk, rows)
                # the first chunk's autograd graph tells which other tensors the result depends on
                with torch.set_grad_enabled(graded and number == 0):
                    out = run.check(run.compute(run.edges(chunk), of_chunk)).detach()
            results.add(chunk, out)
        ctx.save_for_backward(*rows, *tensors[num_inputs:])
        return results.finish(), *(rows[number] for number in travelling if run.inputs[number].returned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_returned: Tensor) -> tuple[Tensor | None, ...]:
        run: ChunkedRun = ctx.run
        rows = ctx.saved_tensors[: len(run.inputs)]
        gradients = _Gradients(run, rows, ctx.given, ctx.needs_input_grad[2:], of_returned)
        of_leaves: list[Tensor | None] = [None] * len(run.leaves)
        kind, dtype, enabled = ctx.autocast
        for number, chunk, of_result in _gradients_of_results(run, grad):
            with recorded(run.layout.communicator.recorder, "aggregate", f"chunk {number}"):
                of_chunk = run.rows(chunk, rows)
                graded = gradients.require(of_chunk)
                with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                    out = run.compute(run.edges(chunk), of_chunk)
                parts = [part for _, _, part in graded]
                run.check(out, parts)
                # nothing needs a gradient in a chunk without edges, say
                grads = (
                    torch.autograd.grad(out, [*parts, *run.leaves], uploaded(of_result, out.device), allow_unused=True)
                    if out.requires_grad
                    else (None,) * (len(parts) + len(run.leaves))
                )
                for (end, total, _), gradient in zip(graded, grads, strict=False):
                    if gradient is not None:
                        run.add_gradient(chunk, end, total, gradient)
            for place, gradient in enumerate(grads[len(parts) :]):
                so_far = of_leaves[place]
                of_leaves[place] = so_far if gradient is None else gradient if so_far is None else so_far + gradient
            gradients.send(number)
        return None, None, *gradients.finish(), *of_leaves


class _Results:
    """Results of chunks: sent to the owners of their rows, or collected where the rows of all ranks are."""

    def __init__(self, run: ChunkedRun) -> None:
        self._run = run
        self._gather: GatherPipeline | None = None
        self._out: Tensor | None = None

    def add(self, chunk: Chunk, out: Tensor) -> None:
        """Take the result of a chunk, :math:`(destinations, *, c)`."""
        device, parts = self._run.device, out.split([length_of(span) for span in chunk.spans])
        if self._out is None:
            self._out = self._begin(out)
        if self._gather is not None:
            self._gather.send(chunk.spans, lambda rank: parts[rank].to(device).contiguous())
            return
        for span, part in zip(chunk.spans, parts, strict=True):
            self._out[span] = part.to(self._out.device)

    def _begin(self, first: Tensor) -> Tensor:
        """Return memory for the whole result, from that of the first chunk."""
        run, layout = self._run, self._run.layout
        if run.width is None:
            return layout.memory.empty((run.plan.num_rows, *first.shape[1:]), first.dtype)
        shape = (layout.counts[layout.rank], *first.shape[1:-1], run.width)
        out = torch.empty(shape, dtype=first.dtype, device=run.device)
        self._gather = GatherPipeline([run.result(out, run.plan.queue(source=False, target=True))], layout)
        return out

    def finish(self) -> Tensor:
        """Return the whole result, once all of it has arrived."""
        assert self._out is not None
        if self._gather is not None:
            self._gather.finish()
        return self._out


def _gradients_of_results(run: ChunkedRun, grad: Tensor) -> Iterator[tuple[int, Chunk, Tensor]]:
    """Yield number, chunk and the gradients of its results, the last chunk first; those of the next are under way."""
    plan, layout, rows, sources = run.plan, run.layout, grad, None
    if run.width is not None:
        rows = layout.memory.empty((plan.num_rows, *grad.shape[1:-1], layout.held(run.width)), grad.dtype)
        row_bytes = math.prod(grad.shape[1:]) * grad.element_size()
        most_rows = layout.memory.rows_at_a_time(row_bytes)
        queue = plan.queue(source=False, target=True, most_rows=most_rows)
        sources = SplitPipeline([run.result(grad, queue[::-1], rows)], layout, what="backward of gather")
        if not layout.overlap:
            sources.wait_for(len(plan.chunks))
    for turn, (number, chunk) in enumerate(reversed(list(enumerate(plan.chunks)))):
        if sources is not None:
            sources.wait_for(turn + 1)
        yield number, chunk, rows_of(rows, plan.joined(chunk))


class _Gradients:
    """Gradients of a hop's inputs: added up chunk by chunk, and sent to the owners of rows when they are complete.

    For each input: ``rows`` are those of all ranks that chunks read, ``given`` its shape, dtype and device as the hop
    was given it, ``needed`` tells if it needs a gradient. ``of_returned``, from later hops, are added to in place.
    """

    def __init__(
        self,
        run: ChunkedRun,
        rows: Sequence[Tensor],
        given: Sequence[tuple[tuple[int, ...], torch.dtype, torch.device]],
        needed: Sequence[bool],
        of_returned: Sequence[Tensor],
    ) -> None:
        later = iter(of_returned)
        from_later = [next(later) if one.returned else None for one in run.inputs]
        self._totals = [
            (run.layout.memory.empty(tuple(one.shape), one.dtype).zero_() if total is None else total) if need else None
            for one, total, need in zip(rows, from_later, needed, strict=False)
        ]
        self._gradients: list[Tensor | None] = list(self._totals)
        travelling: list[tuple[int, Tensor, Tensor]] = []
        for number, (one, total) in enumerate(zip(run.inputs, self._totals, strict=True)):
            if one.way != "here" and total is not None:
                shape, dtype, device = given[number]
                owned = self._gradients[number] = torch.empty(shape, dtype=dtype, device=device)
                travelling.append((number, owned, total))
        shipments = [run.shipment(*one, len(travelling)) for one in travelling]
        self._gather = GatherPipeline(shipments, run.layout, what="backward of split")

    def require(self, rows: list[ChunkRows]) -> list[tuple[str, Tensor, Tensor]]:
        """Let the rows of a chunk require gradients, in place.

        Returns:
            For each: the end of an edge at which it is read, the total to which its gradient is added, and the rows.
        """
        graded = []
        for number, total in enumerate(self._totals):
            if total is not None:
                parts = {
                    end: part.detach().requires_grad_()
                    for end, part in rows[number]._asdict().items() if part is not None
                }  # fmt: skip
                graded += [(end, total, part) for end, part in parts.items()]
                rows[number] = ChunkRows(**parts)
        return graded

    def send(self, chunk: int) -> None:
        """Send the gradients of the rows that were sent for a chunk: no chunk that is still to come adds to them."""
        self._gather.send_chunk(chunk)

    def finish(self) -> list[Tensor | None]:
        """Return the gradient of each input as the hop was given it, once all have arrived."""
        self._gather.finish()
        return self._gradients


class _Repeat(torch.autograd.Function):
    """One tensor for several readers. The backward pass stays on the rank and adds all gradients to the first."""

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
