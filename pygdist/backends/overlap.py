"""Hops that aggregate each chunk as it arrives, while the next one travels (NeutronStar, Sec. 4.3).

Forward, what needs no other rank is aggregated first, then chunk by chunk in the order of arrival. Backward it is the
other way round: the gradients of each rank's rows are computed and sent, one rank after the other, and the gradients of
this rank's own rows while they travel. Sums, means, maxima and minima are built up directly; attention by softmax
through the largest score and the sum of exponentials so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from pygdist.backends.chunks import Arrival, Chunk, Chunks, split_by_source
from pygdist.comm import Communicator, Leg, Transfer, describe_rows, part_of
from pygdist.comm.recorder import recorded
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Reduce, Score
from pygdist.kernels import CSR, sddmm, spmm
from pygdist.kernels.chunked import (
    extremum_grad,
    gat_grad,
    gat_part,
    merge_gat,
    merge_softmax,
    softmax_part,
    spmm_into,
    tie_counts,
)

__all__ = ["ChunkedAdjacency", "Hop"]

Whole = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One hop of a layer on this rank, and how its rows travel.

    Attributes:
        communicator: The ranks.
        pieces: What arrives: all at once, or piece by piece if the device is to hold no more than that at a time.
        label: Named when something goes wrong.
        ring: One peer after the other.
        overlap: Aggregate while rows travel; without, wait for all of them first.
        wire: The dtype in which rows and gradients travel; ``None`` for their own.
        parts: In how many parts what comes from a rank is aggregated, and what goes there is computed.
        whole: All rows that the hop reads, from those of this rank; for what cannot be done in chunks.
    """

    communicator: Communicator
    pieces: tuple[Arrival, ...]
    label: str
    ring: bool
    overlap: bool
    wire: torch.dtype | None
    parts: int
    whole: Whole

    @property
    def at_once(self) -> bool:
        """Whether all rows may be here at a time."""
        return len(self.pieces) == 1

    def positions_of(self, piece: int, leg: Leg) -> Tensor:
        """Where rows belong that come with a leg."""
        return self.pieces[piece].positions_of(leg.rank, leg.part, self.parts)

    def fetch(self, x: Tensor, piece: Arrival, *, keep: bool) -> Transfer:
        """Begin to fetch rows; ``keep`` where they are needed beyond the hop."""
        plan, label = piece.plan, f"{self.label}, forward, {describe_rows(x)}"
        packed = self.communicator.pack(x, plan.send_index, self.label, self.wire).split(list(plan.send_counts))
        buffers = self.communicator.buffers
        halo = (
            x.new_empty((plan.num_received, *x.shape[1:]), dtype=self.wire)
            if keep
            else buffers.get("rows received", plan.num_received, x, self.wire)
        )
        incoming = halo.split(list(plan.recv_counts))
        transfer = Transfer(self.communicator, incoming, label, ring=self.ring, parts=self.parts)
        for leg in transfer.targets:
            transfer.give(leg, self._part(packed, leg))
        if not self.overlap:
            transfer.finish()
        return transfer

    def again(self, x: Tensor, number: int) -> dict[Leg, Tensor]:
        """By leg, the rows of a piece, fetched once more; until the next are."""
        transfer = self.fetch(x, self.pieces[number], keep=False)
        found = {leg: transfer.take(leg).to(x.dtype) for leg in transfer.sources}
        transfer.finish()
        return found

    def _part(self, by_rank: Sequence[Tensor], leg: Leg) -> Tensor:
        rows = by_rank[leg.rank]
        return rows[part_of(rows.size(0), leg.part, self.parts)]

    def give_back(self, gradients: Gradients, like: Tensor) -> Tensor:
        """Send gradients to the owners of the rows that were fetched; returns those of this rank's rows.

        Args:
            gradients: Computes them.
            like: Rows of their width and dtype.
        """
        out = None
        for number, piece in enumerate(self.pieces):
            gradients.turn_to(number)
            out = self._give_back(piece, gradients, like, out)
        assert out is not None
        return out

    def _give_back(self, piece: Arrival, gradients: Gradients, like: Tensor, known: Tensor | None) -> Tensor:
        plan, buffers = piece.plan, self.communicator.buffers
        label = f"{self.label}, backward, {describe_rows(like)}"
        arrived = buffers.get("gradients received", plan.num_sent, like, self.wire).split(list(plan.send_counts))
        computed = buffers.get("gradients sent", plan.num_received, like).split(list(plan.recv_counts))
        sent = computed
        if self.wire is not None:
            sent = buffers.get("gradients sent", plan.num_received, like, self.wire).split(list(plan.recv_counts))
        transfer = Transfer(self.communicator, arrived, label, ring=self.ring, back=True, parts=self.parts)
        if known is None and not self.overlap:
            known = self._computed(gradients.own)
        for leg in transfer.targets:
            memory, rows = self._part(computed, leg), self._part(sent, leg)
            if rows.size(0):
                with recorded(self.communicator.recorder, "aggregate", f"gradient of rank {leg.rank}'s rows"):
                    gradients.remote(leg, memory)
                    if self.wire is not None:
                        rows.copy_(memory)
            if self.overlap:
                transfer.give(leg, rows)
        out = self._computed(gradients.own) if known is None else known
        if not self.overlap:
            for leg in transfer.targets:
                transfer.give(leg, self._part(sent, leg))
            transfer.finish()
        for leg in transfer.sources:
            rows = transfer.take(leg) if self.overlap else self._part(arrived, leg)
            index = plan.send_index_of(leg.rank)
            index = index[part_of(index.numel(), leg.part, self.parts)]
            self.communicator.add_rows(out, rows.to(out.dtype), index, self.label)
        if self.overlap:
            transfer.finish()
        return out

    def _computed(self, gradient: Callable[[], Tensor]) -> Tensor:
        with recorded(self.communicator.recorder, "aggregate", "gradient of own rows"):
            return gradient()

    def arriving(self, x: Tensor, chunks: Chunks, first: Transfer, *, keep: bool) -> Iterator[Landed]:
        """Chunks and their rows, in the order of arrival; the time until the next is noted as aggregation.

        Args:
            x: This rank's rows.
            chunks: The edges.
            first: The first piece, under way.
            keep: Whether rows are needed beyond the hop.
        """
        for number, piece in enumerate(self.pieces):
            transfer = first if number == 0 else self.fetch(x, piece, keep=keep)
            remote = chunks.remote[number]
            for leg in transfer.sources:
                rows = transfer.take(leg)
                if leg in remote:
                    with recorded(self.communicator.recorder, "aggregate", f"rows of rank {leg.rank}"):
                        yield Landed(number, leg, remote[leg], rows.to(x.dtype))
            transfer.finish()


@dataclass(frozen=True)
class Landed:
    """A chunk and the rows that it reads: of which piece, and how they came."""

    piece: int
    leg: Leg
    chunk: Chunk
    rows: Tensor


class Gradients:
    """Computes the gradients of a hop: of each rank's rows, piece by piece, and of this rank's own.

    Args:
        of: From the leg (``None`` for own rows), the chunk, and its rows if ``x`` is given: their gradient, which may
            be written into the memory given.
        hop: The hop.
        chunks: Its edges.
        x: This rank's rows, where their values are needed.
        kept: By leg, the rows that arrived, if they are all still here.
    """

    def __init__(
        self,
        of: Callable[[Leg | None, Chunk, Any, Tensor | None], Tensor],
        hop: Hop,
        chunks: Chunks,
        x: Tensor | None = None,
        kept: dict[Leg, Tensor] | None = None,
    ) -> None:
        self._of, self._hop, self._chunks, self._x, self._rows = of, hop, chunks, x, kept
        self.piece = 0

    def turn_to(self, number: int) -> None:
        """The piece that comes next."""
        self.piece = number
        if self._x is not None and not self._hop.at_once:
            self._rows = self._hop.again(self._x, number)

    def remote(self, leg: Leg, memory: Tensor) -> None:
        """Writes the gradient of a rank's rows into memory."""
        rows = None if self._rows is None else self._rows[leg]
        found = self._of(leg, self._chunks.remote[self.piece][leg], rows, memory)
        if found is not memory:
            memory.copy_(found)

    def own(self) -> Tensor:
        """What this rank's own edges add to the gradient of its rows."""
        return self._of(None, self._chunks.local, self._x, None)


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

    @override
    def attend_by(self, parts: Sequence[Tensor], score: Score, others: Sequence[Tensor]) -> Tensor:
        """Aggregate by attention; ``parts`` hold the rows of this rank."""
        rows, shape = torch.stack(tuple(parts), dim=1), parts[-1].shape[1:]
        if rows.dtype not in (torch.float32, torch.float64):
            return self.origin.attend_by(self._hop.whole(rows).unbind(1), score, others)
        chunks = self._chunks(rows.size(0))
        scored = _Scored(score, len(parts), *shape)
        out: Tensor = _AttentionBy.apply(rows.flatten(1), chunks, self._hop, scored, *others)  # type: ignore[no-untyped-call]
        return out

    def _chunks(self, num_local: int) -> Chunks:
        # a layer of several hops fetches other rows in each, over the same edges
        known: dict[tuple[int, int, int], tuple[Any, Chunks]] = self.origin.derived.setdefault("chunks", {})
        pieces, parts = self._hop.pieces, self._hop.parts
        key = (id(pieces), parts, num_local)
        if key not in known:
            with torch.inference_mode(False):
                known[key] = (pieces, split_by_source(self.csr(), num_local, pieces, parts))
        return known[key][1]


class _Sum(torch.autograd.Function):
    """Sums and means."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, hop: Hop, value: Tensor | None, reduce: str) -> Tensor:
        ctx.chunks, ctx.hop, ctx.value, ctx.mean, ctx.shape = chunks, hop, value, reduce == "mean", x.shape
        x = x.detach().contiguous()
        transfer = hop.fetch(x, hop.pieces[0], keep=False)
        out = x.new_empty(chunks.num_rows, x.size(1))
        with recorded(hop.communicator.recorder, "aggregate", "own rows"):
            spmm_into(out, chunks.local.csr, x, chunks.local.values(value))
        for one in hop.arriving(x, chunks, transfer, keep=False):
            spmm_into(out, one.chunk.csr, one.rows, one.chunk.values(value), onto=True)
        return out.div_(chunks.degree) if ctx.mean else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chunks, hop, value = ctx.chunks, ctx.hop, ctx.value
        grad = (grad / chunks.degree if ctx.mean else grad).contiguous()

        def of(_leg: Leg | None, chunk: Chunk, _rows: Any, memory: Tensor | None) -> Tensor:
            out = grad.new_empty(ctx.shape) if memory is None else memory
            spmm_into(out, _plain(chunk.transposed), grad, chunk.values(value, transposed=True))
            return out

        return hop.give_back(Gradients(of, hop, chunks), grad), None, None, None, None


class _Extremum(torch.autograd.Function):
    """Maxima and minima; the gradient is shared among all edges of a row that attain it, wherever they come from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, hop: Hop, value: Tensor | None, reduce: Any) -> Tensor:
        ctx.chunks, ctx.hop, ctx.value = chunks, hop, value
        better = torch.maximum if reduce == "max" else torch.minimum
        x = x.detach().contiguous()
        transfer = hop.fetch(x, hop.pieces[0], keep=hop.at_once)
        out = spmm(chunks.local.csr, x, _flat(chunks.local.values(value)), reduce)
        filled, arrived = chunks.local.filled, {}
        for one in hop.arriving(x, chunks, transfer, keep=hop.at_once):
            if hop.at_once:
                arrived[one.leg] = one.rows
            found = spmm(one.chunk.csr, one.rows, _flat(one.chunk.values(value)), reduce)
            out = torch.where(one.chunk.filled, torch.where(filled, better(out, found), found), out)
            filled = filled | one.chunk.filled
        ctx.legs = list(arrived)
        ctx.save_for_backward(x, out, *arrived.values())
        return out.clone()  # a step after the layer may write into what it gets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out, *arrived = ctx.saved_tensors
        chunks, hop, value = ctx.chunks, ctx.hop, ctx.value
        kept = dict(zip(ctx.legs, arrived, strict=True))
        count = (out == 0).to(out.dtype)  # the zero that torch.scatter_reduce starts from takes a share
        count += tie_counts(chunks.local.csr, x, chunks.local.values(value), out)
        for number, remote in enumerate(chunks.remote):
            rows = kept if hop.at_once else hop.again(x, number)
            for leg, chunk in remote.items():
                count += tie_counts(chunk.csr, rows[leg], chunk.values(value), out)
        share = grad / count.clamp(min=1)

        def of(_leg: Leg | None, chunk: Chunk, part: Tensor, _memory: Tensor | None) -> Tensor:
            return extremum_grad(_plain(chunk.transposed), part, chunk.values(value, transposed=True), out, share)

        return hop.give_back(Gradients(of, hop, chunks, x, kept), grad), None, None, None, None


class _Attention(torch.autograd.Function):
    """GAT's weighted sums: the softmax over all edges of a row, from the chunks so far."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, chunks: Chunks, hop: Hop, slope: float) -> Tensor:
        ctx.chunks, ctx.hop, ctx.slope = chunks, hop, slope
        x, source, target = (part.detach().contiguous() for part in (x, source, target))
        graded = any(ctx.needs_input_grad)
        transfer = hop.fetch(x, hop.pieces[0], keep=hop.at_once)
        with recorded(hop.communicator.recorder, "aggregate", "own rows"):
            found = gat_part(chunks.local.csr, x, source[: x.size(0)], target, slope)
        arrived = {}
        for one in hop.arriving(x, chunks, transfer, keep=hop.at_once):
            if hop.at_once:
                arrived[one.leg] = one.rows
            scores = source.index_select(0, hop.positions_of(one.piece, one.leg))
            found = merge_gat(found, gat_part(one.chunk.csr, one.rows, scores, target, slope))
        ctx.legs = list(arrived)
        if graded:
            ctx.save_for_backward(x, source, target, *found, *arrived.values())
        return found[0].clone() if graded else found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source, target, out, above, facts, *arrived = ctx.saved_tensors
        chunks, hop, slope = ctx.chunks, ctx.hop, ctx.slope
        kept = dict(zip(ctx.legs, arrived, strict=True))
        grad, grad_source, grad_target = grad.contiguous(), torch.zeros_like(source), torch.zeros_like(target)

        def of(leg: Leg | None, chunk: Chunk, part: Tensor, _memory: Tensor | None) -> Tensor:
            own = torch.arange(x.size(0), device=x.device)
            places = own if leg is None else hop.positions_of(gradients.piece, leg)
            scores = source.index_select(0, places)
            found, grad_source[places], total = gat_grad(
                _plain(chunk.transposed), part, scores, target, slope, out, above, facts, grad
            )
            if leg is None:
                grad_target.copy_(total)  # of all edges of the row: it is made of sums over them
            return found

        gradients = Gradients(of, hop, chunks, x, kept)
        return hop.give_back(gradients, x), grad_source, grad_target, None, None, None


@dataclass(frozen=True)
class _Scored:
    """How the rows of a chunk are read; see :meth:`~pygdist.graph.Adjacency.attend_by`."""

    score: Score
    num_parts: int
    heads: int
    channels: int

    def read(self, chunk: Chunk, rows: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Scores of the chunk's edges ``(E, H)``, and what is summed of its rows ``(M, H, C)``."""
        parts = rows.view(-1, self.num_parts, self.heads, self.channels).unbind(1)
        return self.score(_plain(chunk.csr), parts[0], *others, transposed=chunk.transposed), parts[-1]


class _AttentionBy(torch.autograd.Function):
    """Attention with any score: the softmax over all edges of a row, by the running maximum and sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, hop: Hop, scored: _Scored, *others: Tensor) -> Tensor:
        ctx.chunks, ctx.hop, ctx.scored = chunks, hop, scored
        x = x.detach().contiguous()
        transfer = hop.fetch(x, hop.pieces[0], keep=hop.at_once)
        with recorded(hop.communicator.recorder, "aggregate", "own rows"):
            found = softmax_part(_plain(chunks.local.csr), *scored.read(chunks.local, x, others))
        arrived = {}
        for one in hop.arriving(x, chunks, transfer, keep=hop.at_once):
            if hop.at_once:
                arrived[one.leg] = one.rows
            more = softmax_part(_plain(one.chunk.csr), *scored.read(one.chunk, one.rows, others))
            found = merge_softmax(found, more)
        out, most, total = found
        out = out / total.clamp(min=1).unsqueeze(-1)  # the largest score alone gives 1; without edges there is none
        ctx.legs = list(arrived)
        ctx.save_for_backward(x, out, most, total, *others, *arrived.values())
        return out.clone() if any(ctx.needs_input_grad) else out  # a step after the layer may write into what it gets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out, most, total, *rest = ctx.saved_tensors
        chunks, hop, scored = ctx.chunks, ctx.hop, ctx.scored
        others = rest[: len(rest) - len(ctx.legs)]
        kept = dict(zip(ctx.legs, rest[len(others) :], strict=True))
        grad, shared = grad.contiguous(), (grad * out).sum(-1)
        totals = [torch.zeros_like(other) for other in others]

        def of(_leg: Leg | None, chunk: Chunk, rows: Tensor, _memory: Tensor | None) -> Tensor:
            csr = _plain(chunk.csr)
            row = csr.row_index()
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in (rows, *others)]
                scores, values = scored.read(chunk, leaves[0], leaves[1:])
                weights = (scores.detach() - most[row]).exp() / total[row]
                summed = spmm(csr, values, weights, transposed=chunk.transposed)
            towards = weights * (sddmm(csr, values.detach(), grad) - shared[row])
            found, *more = torch.autograd.grad([scores, summed], leaves, [towards, grad])
            for one, part in zip(totals, more, strict=True):
                one += part
            return found

        gradients = Gradients(of, hop, chunks, x, kept)
        return hop.give_back(gradients, x), None, None, None, *totals


def _plain(csr: CSR) -> CSR:
    """Without its permutation: edge values come in the order of the entries."""
    return CSR(csr.indptr, csr.index, csr.num_cols)


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.squeeze(1)
