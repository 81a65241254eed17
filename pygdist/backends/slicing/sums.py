"""Sums over in-edges on slices, chunk by chunk: sources are split before a chunk is summed, results gathered after it.

While a chunk is summed, the sources of the next chunk and the sums of the previous chunk are under way (NeutronTP, Sec.
4.2.2). With an :class:`~pygdist.memory.overflow.Overflow`, only the running chunk is on the device: its edges, its
source rows and its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pygdist.backends.slicing.all_nodes import SliceLayout
from pygdist.backends.slicing.chunk_plan import Chunk, ChunkPlan, length_of
from pygdist.backends.slicing.pipeline import GatherPipeline, Shipment, SplitPipeline
from pygdist.comm.recorder import Recorder, recorded
from pygdist.kernels import CSR
from pygdist.kernels.chunked import spmm_into
from pygdist.memory.ring import download, settle, uploaded


@dataclass(frozen=True, kw_only=True)
class Rounds:
    r"""Successive hops, and the work on each row between hops.

    Attributes:
        number: Number of hops.
        before: Factor of each row before every hop, :math:`(N, 1)`.
        after: Factor of each sum after every hop, :math:`(N, 1)`.
        own_factors: For each hop a factor; the row itself times this factor is added to the row's sum. Not together
            with ``before``.
        visit: Called after each hop with its number and this rank's columns of all rows before the hop.
    """

    number: int = 1
    before: Tensor | None = None
    after: Tensor | None = None
    own_factors: Sequence[float] | None = None
    visit: Callable[[int, Tensor], None] | None = None

    @property
    def between(self) -> Tensor | None:
        """Factor of each sum between two hops, the product of ``after`` and ``before``."""
        if self.before is None or self.after is None:
            return self.after if self.before is None else self.before
        return self.before * self.after

    def reversed(self) -> Rounds:
        """Return the hops of the backward pass."""
        own_factors = None if self.own_factors is None else self.own_factors[::-1]
        return replace(self, before=self.after, after=self.before, own_factors=own_factors)


def aggregate_slices(
    x: Tensor, plan: ChunkPlan, layout: SliceLayout, rounds: Rounds, *, label: str, value: Tensor | None = None
) -> Tensor:
    r"""Sum the rows of sources, each rank some of the columns; without gradient.

    Rows travel to all ranks before the first hop, and to their owners after the last:
    :math:`(n, C) \to (N, c) \to (n, C)`.

    Args:
        x: This rank's rows, :math:`(n, C)`.
        plan: The edges.
        layout: The ranks; each makes the call, with the same arguments but for ``x``.
        rounds: The hops.
        label: Names the hop in errors.
        value: Weight of each edge of all ranks, :math:`(E, 1)`.
    """
    communicator, own_rows = layout.communicator, slice(*plan.starts[layout.rank : layout.rank + 2])
    if rounds.before is not None:
        x = x * uploaded(rounds.before[own_rows], x.device)
    columns, out = layout.columns(x.size(1)), torch.empty_like(x)
    held = x[:, columns[layout.rank]]
    rows = _memory(plan, held)
    sums = _memory(plan, held) if rounds.number > 1 else torch.empty(0)
    most_rows = None if plan.overflow is None else plan.overflow.rows_at_a_time(x.size(1) * x.element_size())
    queue = plan.queue(target=rounds.own_factors is not None, most_rows=most_rows)
    ship = partial(Shipment, columns=columns, start=own_rows.start, label=label)
    sources = SplitPipeline([ship(owned=x, rows=rows, queue=queue)], layout)
    results = GatherPipeline([ship(owned=out, queue=plan.queue(source=False, target=True))], layout)
    if not layout.overlap:
        sources.wait_for(len(plan.chunks))
    between, last = rounds.between, rounds.number - 1
    for hop in range(rounds.number):
        scale = rounds.after if hop == last else between
        for turn, chunk in enumerate(plan.chunks):
            if hop == 0:
                sources.wait_for(turn + 1)
            added = None if rounds.own_factors is None else (rows, rounds.own_factors[hop])
            chunk_sum = _ChunkSum(plan, chunk, plan.sources_of(chunk, rows), value, scale, added, communicator.recorder)
            if hop == last:
                results.send(chunk.spans, partial(chunk_sum.for_rank, results, held))
            else:
                for span in plan.joined(chunk):
                    chunk_sum.write(span, sums[span])
        settle(held.device if plan.overflow is None else plan.overflow.device)
        if rounds.visit is not None:
            rounds.visit(hop, rows)
        rows, sums = sums, rows
    results.finish()
    return out


def _memory(plan: ChunkPlan, like: Tensor) -> Tensor:
    """Return memory for this rank's columns of all rows."""
    shape = (plan.num_rows, like.size(1))
    return like.new_empty(shape) if plan.overflow is None else plan.overflow.empty(shape, like.dtype)


@dataclass(frozen=True)
class _ChunkSum:
    """The sums of a chunk.

    ``sources`` are the rows that it reads, on the device; ``value``, ``scale`` and the rows of ``added`` (added to the
    sums, times a number) are those of all ranks' edges and rows.
    """

    plan: ChunkPlan
    chunk: Chunk
    sources: Tensor
    value: Tensor | None
    scale: Tensor | None
    added: tuple[Tensor, float] | None
    recorder: Recorder | None

    def for_rank(self, results: GatherPipeline, like: Tensor, rank: int) -> Tensor:
        """Return the sums that travel to a rank, in memory of the exchange."""
        span = self.chunk.spans[rank]
        memory = results.buffer(rank, length_of(span), like)
        self.write(span, memory)
        if not memory.is_cuda:
            settle(self.sources.device)
        return memory

    def write(self, span: slice, out: Tensor) -> None:
        """Write the sums of consecutive rows into ``out``, on whatever device."""
        with recorded(self.recorder, "aggregate", f"rows {span.start} to {span.stop}"):
            if out.numel() == 0:
                return
            device = self.sources.device
            sums = out if out.device == device else torch.empty_like(out, device=device)
            self._add_up(span, sums)
            if self.scale is not None:
                sums *= uploaded(self.scale[span], device)
            if self.added is not None:
                rows, factor = self.added
                sums.add_(uploaded(rows[span], device), alpha=factor)
            if sums is not out:
                download(sums, out)

    def _add_up(self, span: slice, sums: Tensor) -> None:
        device, first = self.sources.device, 0
        for csr in self.plan.blocks if self.value is None else (self.plan.csr,):
            indptr = csr.indptr[span.start : span.stop + 1]
            edges = slice(int(indptr[0]), int(indptr[-1]))
            sources = self.sources[first : first + csr.num_cols]
            block = CSR(uploaded(indptr - edges.start, device), uploaded(csr.index[edges], device), sources.size(0))
            weight = None if self.value is None else uploaded(self.value[edges], device)
            spmm_into(sums, block, sources, weight, onto=first > 0)
            first += csr.num_cols
