"""Sums over slices chunk by chunk: a chunk's sources are split just before it, its sums gathered just after.

While a chunk is aggregated the sources of the next one travel, and the sums of the one before (NeutronTP, Sec. 4.2.2).
With an :class:`~pygdist.memory.overflow.Overflow` nothing but the chunk that runs is on the device: its edges, the
rows that it reads, its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pygdist.backends.slicing.chunk_plan import AHEAD, SliceChunk, SlicePlan, length_of
from pygdist.backends.slicing.pipeline import Freight, Homeward, Outward, slices_of
from pygdist.comm import Communicator
from pygdist.comm.recorder import recorded
from pygdist.kernels import CSR
from pygdist.kernels.chunked import spmm_into

__all__ = ["aggregate_slices"]


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
    own: Sequence[float] | None = None,
    visit: Callable[[int, Tensor], None] | None = None,
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
        own: In each round a row is added to its sum, times this; not together with ``before``.
        visit: Called after each round with its number and this rank's columns of all rows as they were before it.
        overlap: Aggregate while rows and sums travel; without, all rows first, and each chunk's sums before the next.

    Shapes:
        ``x`` and the result are :math:`(n, C)`, ``value`` is :math:`(E, 1)` and ``before`` and ``after`` are
        :math:`(N, 1)`, where N and E count the rows and edges of all ranks.
    """
    rank, ahead = communicator.rank, AHEAD if overlap else 1
    start, columns = plan.starts[rank], slices_of(x.size(1), communicator.world_size)
    if before is not None:
        x = x * before[start : plan.starts[rank + 1]].to(x.device)
    between = after if before is None else before if after is None else before * after
    mine, out = x[:, columns[rank]], torch.empty_like(x)
    rows = _memory(plan, mine)
    sums = torch.empty(0) if rounds == 1 else _memory(plan, mine)
    most_rows = None if plan.overflow is None else plan.overflow.rows_at_a_time(x.size(1) * x.element_size())
    queue = plan.queue(target=own is not None, most_rows=most_rows)
    there = Outward(
        [Freight(own=x, every=rows, columns=columns, start=start, queue=queue, label=label)], communicator, ahead=ahead,
    )  # fmt: skip
    back = Homeward(
        [Freight(own=out, columns=columns, start=start, queue=plan.result_queue(), label=label)],
        communicator, ahead=ahead,
    )  # fmt: skip
    if not overlap:
        there.take(len(plan.chunks))
    for number in range(rounds):
        for turn, chunk in enumerate(plan.chunks):
            if number == 0:
                there.take(turn + 1)
            block = _Block(plan, chunk, plan.sources_of(chunk, rows), value, communicator)
            more = None if own is None else (rows, own[number])
            if number < rounds - 1:
                for span in plan.joined(chunk):
                    block.add_up(span, sums[span], between, more)
                continue

            def summed(peer: int, block: _Block = block, more: tuple[Tensor, float] | None = more) -> Tensor:
                span = block.chunk.spans[peer]
                memory = back.memory(peer, length_of(span), mine)
                block.add_up(span, memory, after, more)
                return memory

            back.send(chunk.spans, summed)
        if visit is not None:
            visit(number, rows)
        rows, sums = sums, rows
    back.finish()
    return out


def _memory(plan: SlicePlan, mine: Tensor) -> Tensor:
    """For this rank's columns of all rows."""
    shape = (plan.num_rows, mine.size(1))
    return mine.new_empty(shape) if plan.overflow is None else plan.overflow.empty(shape, mine.dtype)


class _Block:
    """The edges of a chunk and what they read.

    Args:
        plan: The edges of all ranks.
        chunk: Some of these.
        x: The rows that the chunk reads.
        value: The weight of each edge.
        communicator: Notes the time.
    """

    def __init__(
        self, plan: SlicePlan, chunk: SliceChunk, x: Tensor, value: Tensor | None, communicator: Communicator
    ) -> None:
        self.chunk, self._plan, self._x, self._value, self._communicator = chunk, plan, x, value, communicator

    def add_up(self, span: slice, out: Tensor, scale: Tensor | None, more: tuple[Tensor, float] | None = None) -> None:
        """Write the sums of some rows, one after the other, into ``out``, on whatever device.

        Args:
            span: The rows.
            out: As many.
            scale: Each sum is multiplied by its row of this.
            more: Of this, its row is added, times a number.
        """
        with self._aggregating(span):
            if out.numel() == 0:
                return
            device, first = self._x.device, 0
            sums = out if out.device == device else torch.empty_like(out, device=device)
            for csr in self._plan.blocks if self._value is None else (self._plan.csr,):
                indptr = csr.indptr[span.start : span.stop + 1]
                edges = slice(int(indptr[0]), int(indptr[-1]))
                x = self._x[first : first + csr.num_cols]
                block = CSR((indptr - edges.start).to(device), csr.index[edges].to(device), x.size(0))
                value = None if self._value is None else self._value[edges].to(device)
                spmm_into(sums, block, x, value, onto=first > 0)
                first += csr.num_cols
            if scale is not None:
                sums *= scale[span].to(device)
            if more is not None:
                sums.add_(more[0][span].to(device), alpha=more[1])
            if sums is not out:
                out.copy_(sums)

    def _aggregating(self, span: slice) -> AbstractContextManager[None]:
        return recorded(self._communicator.recorder, "aggregate", f"rows {span.start} to {span.stop}")
