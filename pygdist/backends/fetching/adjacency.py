"""Hops that aggregate each chunk as it arrives, while the next one travels (NeutronStar, Sec. 4.3).

What needs no other rank is aggregated first, then chunk by chunk in the order of arrival. Sums, means, maxima and
minima are built up here; attention by softmax in :mod:`~pygdist.backends.fetching.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from pygdist.backends.fetching.attention import attend, attend_by
from pygdist.backends.fetching.exchange import Gradients, Hop
from pygdist.backends.fetching.groups import Chunk, Chunks, split_by_source
from pygdist.comm import Message
from pygdist.comm.recorder import recorded
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Reduce, Score
from pygdist.kernels import spmm
from pygdist.kernels.chunked import extremum_grad, spmm_into, tie_counts

__all__ = ["ChunkedAdjacency"]


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
        return attend(x, source, target, self._chunks(x.size(0)), self._hop, negative_slope)

    @override
    def attend_by(self, parts: Sequence[Tensor], score: Score, others: Sequence[Tensor]) -> Tensor:
        """Aggregate by attention; ``parts`` hold the rows of this rank."""
        rows = torch.stack(tuple(parts), dim=1)
        if rows.dtype not in (torch.float32, torch.float64):
            return self.origin.attend_by(self._hop.whole(rows).unbind(1), score, others)
        return attend_by(rows, self._chunks(rows.size(0)), self._hop, score, others)

    def _chunks(self, num_local: int) -> Chunks:
        # a layer of several hops fetches other rows in each, over the same edges
        known: dict[tuple[int, int, int], tuple[Any, Chunks]] = self.origin.derived.setdefault("chunks", {})
        pieces, parts = self._hop.pieces, self._hop.parts
        key = (id(pieces), parts, num_local)
        if key not in known:
            with torch.inference_mode(False):
                known[key] = (pieces, split_by_source(self.csr(), num_local, pieces, parts, self._hop.overflow))
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

        def of(_piece: int, _message: Message | None, chunk: Chunk, _rows: Any, memory: Tensor | None) -> Tensor:
            out = grad.new_empty(ctx.shape) if memory is None else memory
            spmm_into(out, chunk.transposed.unpermuted(), grad, chunk.values(value, transposed=True))
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
                arrived[one.message] = one.rows
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
            for message, chunk in remote.items():
                count += tie_counts(chunk.csr, rows[message], chunk.values(value), out)
        share = grad / count.clamp(min=1)

        def of(_piece: int, _message: Message | None, chunk: Chunk, part: Tensor, _memory: Tensor | None) -> Tensor:
            return extremum_grad(chunk.transposed.unpermuted(), part, chunk.values(value, transposed=True), out, share)

        return hop.give_back(Gradients(of, hop, chunks, x, kept), grad), None, None, None, None


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.squeeze(1)
