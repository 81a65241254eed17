"""Hops that aggregate each chunk as it arrives, while the next one travels (NeutronStar, Sec. 4.3).

Forward, what needs no other rank is aggregated first, then chunk by chunk in the order of arrival. Backward it is the
other way round: the gradients of each rank's rows are computed and sent, one rank after the other, and the gradients of
this rank's own rows while they travel. Sums, means, maxima and minima are built up directly; attention by softmax
through the largest score and the sum of exponentials so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from pygdist.backends.chunks import Arrival, Chunk, Chunks, split_by_source
from pygdist.comm import Communicator, Transfer, describe_rows
from pygdist.comm.recorder import recorded
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Reduce
from pygdist.kernels import CSR
from pygdist.kernels.chunked import extremum_grad, gat_grad, gat_part, merge_gat, spmm_into, tie_counts
from pygdist.kernels.spmm import spmm

__all__ = ["ChunkedAdjacency", "Hop"]

Whole = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One hop of a layer on this rank, and how its rows travel.

    Attributes:
        communicator: The ranks.
        arrival: What arrives.
        label: Named when something goes wrong.
        ring: One peer after the other.
        overlap: Aggregate while rows travel; without, wait for all of them first.
        wire: The dtype in which rows and gradients travel; ``None`` for their own.
        whole: All rows that the hop reads, from those of this rank; for what cannot be done in chunks.
    """

    communicator: Communicator
    arrival: Arrival
    label: str
    ring: bool
    overlap: bool
    wire: torch.dtype | None
    whole: Whole

    def fetch(self, x: Tensor, *, keep: bool) -> Transfer:
        """Begin to fetch rows; ``keep`` where they are needed beyond the hop."""
        plan, label = self.arrival.plan, f"{self.label}, forward, {describe_rows(x)}"
        packed = self.communicator.pack(x, plan.send_index, self.label, self.wire).split(list(plan.send_counts))
        buffers = self.communicator.buffers
        halo = (
            x.new_empty((plan.num_received, *x.shape[1:]), dtype=self.wire)
            if keep
            else buffers.get("rows received", plan.num_received, x, self.wire)
        )
        transfer = Transfer(self.communicator, halo.split(list(plan.recv_counts)), label, ring=self.ring)
        for peer in transfer.targets:
            transfer.give(peer, packed[peer])
        if not self.overlap:
            transfer.finish()
        return transfer

    def give_back(
        self,
        like: Tensor,
        gradient_of: Callable[[int, Tensor], None],
        own_gradient: Callable[[], Tensor],
    ) -> Tensor:
        """Send gradients to the owners of the rows that were fetched; returns those of this rank's rows.

        Args:
            like: Rows of the width and dtype of the gradients.
            gradient_of: Writes the gradient of a peer's rows into the memory that it is given.
            own_gradient: Computes what this rank's own edges add to the gradient of its rows.
        """
        plan, buffers = self.arrival.plan, self.communicator.buffers
        label = f"{self.label}, backward, {describe_rows(like)}"
        arrived = buffers.get("gradients received", plan.num_sent, like, self.wire).split(list(plan.send_counts))
        computed = buffers.get("gradients sent", plan.num_received, like).split(list(plan.recv_counts))
        sent = computed
        if self.wire is not None:
            sent = buffers.get("gradients sent", plan.num_received, like, self.wire).split(list(plan.recv_counts))
        transfer = Transfer(self.communicator, arrived, label, ring=self.ring, back=True)
        out = None if self.overlap else self._computed(own_gradient)
        for peer in transfer.targets:
            if plan.recv_counts[peer]:
                with recorded(self.communicator.recorder, "aggregate", f"gradient of rank {peer}'s rows"):
                    gradient_of(peer, computed[peer])
                    if self.wire is not None:
                        sent[peer].copy_(computed[peer])
            if self.overlap:
                transfer.give(peer, sent[peer])
        if out is None:
            out = self._computed(own_gradient)
        else:
            for peer in transfer.targets:
                transfer.give(peer, sent[peer])
            transfer.finish()
        for peer in transfer.sources:
            rows = transfer.take(peer) if self.overlap else arrived[peer]
            self.communicator.add_rows(out, rows.to(out.dtype), plan.send_index_of(peer), self.label)
        if self.overlap:
            transfer.finish()
        return out

    def _computed(self, gradient: Callable[[], Tensor]) -> Tensor:
        with recorded(self.communicator.recorder, "aggregate", "gradient of own rows"):
            return gradient()

    def arriving(self, transfer: Transfer, chunks: Chunks, like: Tensor) -> Any:
        """Each peer's chunk and its rows, in the order of arrival; the time until the next is noted as aggregation."""
        for peer in transfer.sources:
            rows = transfer.take(peer)
            if peer in chunks.remote:
                with recorded(self.communicator.recorder, "aggregate", f"rows of rank {peer}"):
                    yield peer, chunks.remote[peer], rows.to(like.dtype)
        transfer.finish()


class ChunkedAdjacency(Adjacency):
    """The adjacency of a hop that fetches what it reads: a layer multiplies it with this rank's rows alone."""

    _hop: Hop

    @classmethod
    def over(cls, adjacency: Adjacency, hop: Hop) -> ChunkedAdjacency:
        """The same edges and weights, in chunks."""
        out = cls.from_csr(adjacency.csr(), adjacency.value)
        assert isinstance(out, ChunkedAdjacency)
        out._origin, out._hop = adjacency.origin, hop
        return out

    @override
    def with_value(self, value: Tensor | None) -> ChunkedAdjacency:
        """The same edges with other weights."""
        return ChunkedAdjacency.over(self.origin.with_value(value), self._hop)

    @override
    def matmul(
        self,
        other: Tensor,
        input_value: Tensor | None = None,
        other_value: None = None,
        reduce: Reduce = "sum",
        transpose: bool = False,
    ) -> Tensor:
        """Aggregate; ``other`` holds the rows of this rank alone."""
        value = self.value if input_value is None else input_value
        plain = value is None or (value.dtype == other.dtype and not value.requires_grad)
        if (
            other.dim() != 2
            or other.dtype not in (torch.float32, torch.float64)
            or not plain
            or other_value is not None
        ):
            dim = 1 if other.dim() == 3 else 0  # layers that stack features have their nodes in the second place
            rows = self._hop.whole(other.movedim(dim, 0)).movedim(0, dim)
            return self.origin.with_value(value).matmul(rows, reduce=reduce)
        chunks = self._chunks(other.size(0))
        if reduce in ("max", "min"):
            found: Tensor = _Extremum.apply(other, chunks, self._hop, value, reduce)  # type: ignore[no-untyped-call]
        else:
            found = _Sum.apply(other, chunks, self._hop, value, reduce)  # type: ignore[no-untyped-call]
        return found

    @override
    def attend(self, x: Tensor, source: Tensor, target: Tensor, negative_slope: float) -> Tensor:
        """Aggregate by attention; ``x`` holds the rows of this rank, ``source`` is there for all rows."""
        if x.dtype not in (torch.float32, torch.float64):
            return self.origin.attend(self._hop.whole(x), source, target, negative_slope)
        heads, channels = x.shape[1:]
        chunks = self._chunks(x.size(0))
        parts = (x.flatten(1), source, target)
        out: Tensor = _Attention.apply(*parts, chunks, self._hop, negative_slope)  # type: ignore[no-untyped-call]
        return out.view(-1, heads, channels)

    def _chunks(self, num_local: int) -> Chunks:
        # a layer of several hops fetches other rows in each, over the same edges
        known: dict[tuple[int, int], tuple[Arrival, Chunks]] = self.origin.derived.setdefault("chunks", {})
        arrival = self._hop.arrival
        key = (id(arrival), num_local)
        if key not in known:
            with torch.inference_mode(False):
                known[key] = (arrival, split_by_source(self.csr(), num_local, arrival))
        return known[key][1]


class _Sum(torch.autograd.Function):
    """Sums and means."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, hop: Hop, value: Tensor | None, reduce: str) -> Tensor:
        ctx.chunks, ctx.hop, ctx.value, ctx.mean, ctx.shape = chunks, hop, value, reduce == "mean", x.shape
        x = x.detach().contiguous()
        transfer = hop.fetch(x, keep=False)
        out = x.new_empty(chunks.num_rows, x.size(1))
        with recorded(hop.communicator.recorder, "aggregate", "own rows"):
            spmm_into(out, chunks.local.csr, x, chunks.local.values(value))
        for _, chunk, rows in hop.arriving(transfer, chunks, x):
            spmm_into(out, chunk.csr, rows, chunk.values(value), onto=True)
        return out.div_(chunks.degree) if ctx.mean else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chunks, hop, value = ctx.chunks, ctx.hop, ctx.value
        grad = (grad / chunks.degree if ctx.mean else grad).contiguous()

        def into(out: Tensor, chunk: Chunk) -> Tensor:
            spmm_into(out, _plain(chunk.transposed), grad, chunk.values(value, transposed=True))
            return out

        out = hop.give_back(
            grad,
            lambda peer, memory: _ignore(into(memory, chunks.remote[peer])),
            lambda: into(grad.new_empty(ctx.shape), chunks.local),
        )
        return out, None, None, None, None


class _Extremum(torch.autograd.Function):
    """Maxima and minima; the gradient is shared among all edges of a row that attain it, wherever they come from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, hop: Hop, value: Tensor | None, reduce: Any) -> Tensor:
        ctx.chunks, ctx.hop, ctx.value = chunks, hop, value
        better = torch.maximum if reduce == "max" else torch.minimum
        x = x.detach().contiguous()
        transfer = hop.fetch(x, keep=True)
        out = spmm(chunks.local.csr, x, _flat(chunks.local.values(value)), reduce)
        filled, arrived = chunks.local.filled, {}
        for peer, chunk, rows in hop.arriving(transfer, chunks, x):
            arrived[peer] = rows
            found = spmm(chunk.csr, rows, _flat(chunk.values(value)), reduce)
            out = torch.where(chunk.filled, torch.where(filled, better(out, found), found), out)
            filled = filled | chunk.filled
        ctx.peers = list(arrived)
        ctx.save_for_backward(x, out, *arrived.values())
        return out.clone()  # a step after the layer may write into what it gets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out, *arrived = ctx.saved_tensors
        chunks, hop, value = ctx.chunks, ctx.hop, ctx.value
        rows = dict(zip(ctx.peers, arrived, strict=True))
        count = (out == 0).to(out.dtype)  # the zero that torch.scatter_reduce starts from takes a share
        for chunk, part in ((chunks.local, x), *((chunks.remote[peer], part) for peer, part in rows.items())):
            count += tie_counts(chunk.csr, part, chunk.values(value), out)
        share = grad / count.clamp(min=1)

        def of(chunk: Chunk, part: Tensor) -> Tensor:
            return extremum_grad(_plain(chunk.transposed), part, chunk.values(value, transposed=True), out, share)

        own = hop.give_back(
            grad,
            lambda peer, memory: _ignore(memory.copy_(of(chunks.remote[peer], rows[peer]))),
            lambda: of(chunks.local, x),
        )
        return own, None, None, None, None


class _Attention(torch.autograd.Function):
    """GAT's weighted sums: the softmax over all edges of a row, from the chunks so far."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, chunks: Chunks, hop: Hop, slope: float) -> Tensor:
        ctx.chunks, ctx.hop, ctx.slope = chunks, hop, slope
        x, source, target = (part.detach().contiguous() for part in (x, source, target))
        graded = any(ctx.needs_input_grad)
        transfer = hop.fetch(x, keep=True)
        with recorded(hop.communicator.recorder, "aggregate", "own rows"):
            found = gat_part(chunks.local.csr, x, source[: x.size(0)], target, slope)
        arrived = {}
        for peer, chunk, rows in hop.arriving(transfer, chunks, x):
            arrived[peer] = rows
            scores = source.index_select(0, hop.arrival.positions_of(peer))
            found = merge_gat(found, gat_part(chunk.csr, rows, scores, target, slope))
        ctx.peers = list(arrived)
        if graded:
            ctx.save_for_backward(x, source, target, *found, *arrived.values())
        return found[0].clone() if graded else found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source, target, out, above, facts, *arrived = ctx.saved_tensors
        chunks, hop, slope = ctx.chunks, ctx.hop, ctx.slope
        rows = dict(zip(ctx.peers, arrived, strict=True))
        grad, grad_source, grad_target = grad.contiguous(), torch.zeros_like(source), torch.zeros_like(target)

        def of(chunk: Chunk, part: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return gat_grad(_plain(chunk.transposed), part, scores, target, slope, out, above, facts, grad)

        def remote(peer: int, memory: Tensor) -> None:
            places = hop.arrival.positions_of(peer)
            found, grad_source[places], _ = of(chunks.remote[peer], rows[peer], source.index_select(0, places))
            memory.copy_(found)

        def own() -> Tensor:
            found, grad_source[: x.size(0)], total = of(chunks.local, x, source[: x.size(0)])
            grad_target.copy_(total)  # of all edges of the row: it is made of sums over them
            return found

        grad_x = hop.give_back(x, remote, own)
        return grad_x, grad_source, grad_target, None, None, None


def _plain(csr: CSR) -> CSR:
    """Without its permutation: edge values come in the order of the entries."""
    return CSR(csr.indptr, csr.index, csr.num_cols)


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.squeeze(1)


def _ignore(_: Tensor) -> None:
    """What a function that writes into given memory returns."""
