"""Aggregation of rows as they arrive, one source group while the next one travels (NeutronStar, Sec. 4.3).

Edges between this rank's rows are aggregated first, then one source group after the other, in the order of arrival.
This file has sums, means, maxima and minima; :mod:`~pygdist.backends.fetching.attention` has attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from pygdist.backends.fetching.attention import attend, attend_by
from pygdist.backends.fetching.exchange import Exchange, Gradients
from pygdist.backends.fetching.groups import SourceGroup, SourceGroups, group_by_source
from pygdist.comm import Message
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.recorder import recorded
from pygdist.graph.adjacency import Reduce, Score, Slot
from pygdist.graph.memo import Memo
from pygdist.hops.folds import better_of, share_of_ties
from pygdist.hops.routed_edges import RoutedAdjacency
from pygdist.kernels import spmm
from pygdist.kernels.chunked import extremum_grad, spmm_into, tie_counts

SOURCE_GROUPS = Slot[Memo[SourceGroups]]("source groups")
"""Where the shard's edges keep their source groups, by the pieces in which rows arrive."""


class ArrivingAdjacency(RoutedAdjacency[Exchange]):
    """The adjacency of a hop that fetches its source rows: the layer multiplies it with this rank's rows alone."""

    @override
    def matmul(
        self,
        other: Tensor,
        input_value: Tensor | None = None,
        other_value: None = None,
        reduce: Reduce = "sum",
        transpose: bool = False,
    ) -> Tensor:
        """Aggregate; ``other`` holds only this rank's rows."""
        value = self.value if input_value is None else input_value
        plain = value is None or (value.dtype == other.dtype and not value.requires_grad)
        if (
            other.dim() != 2
            or other.dtype not in (torch.float32, torch.float64)
            or not plain
            or other_value is not None
        ):
            dim = 1 if other.dim() == 3 else 0  # layers that stack features have their nodes in the second place
            rows = self.way.whole(other.movedim(dim, 0)).movedim(0, dim)
            return self.origin.with_value(value).matmul(rows, reduce=reduce)
        groups = self._groups(other.size(0))
        if reduce in ("max", "min"):
            out: Tensor = _Extremum.apply(other, groups, self.way, value, reduce)  # type: ignore[no-untyped-call]
        else:
            out = _Sum.apply(other, groups, self.way, value, reduce)  # type: ignore[no-untyped-call]
        return out

    @override
    def attend(self, x: Tensor, source: Tensor, target: Tensor, negative_slope: float) -> Tensor:
        """Aggregate by attention; ``x`` holds only this rank's rows, ``source`` the scores of all source rows."""
        if x.dtype not in (torch.float32, torch.float64):
            return self.origin.attend(self.way.whole(x), source, target, negative_slope)
        return attend(x, source, target, self._groups(x.size(0)), self.way, negative_slope)

    @override
    def attend_by(self, parts: Sequence[Tensor], score: Score, others: Sequence[Tensor]) -> Tensor:
        """Aggregate by attention; ``parts`` hold only this rank's rows."""
        rows = torch.stack(tuple(parts), dim=1)
        if rows.dtype not in (torch.float32, torch.float64):
            return self.origin.attend_by(self.way.whole(rows).unbind(1), score, others)
        return attend_by(rows, self._groups(rows.size(0)), self.way, score, others)

    def _groups(self, num_local: int) -> SourceGroups:
        # a layer of several hops fetches other rows in each, over the same edges
        pieces, messages, overflow = self.way.pieces, self.way.messages, self.way.overflow
        return self.slot(SOURCE_GROUPS, Memo).get(
            (id(pieces), messages, num_local),
            (pieces,),
            lambda: group_by_source(self.csr(), num_local, pieces, messages, overflow),
        )


class _Sum(torch.autograd.Function):
    """Sums and means. The backward pass sends each rank the gradients of the rows that were fetched from it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: SourceGroups, exchange: Exchange, value: Tensor | None, reduce: str
    ) -> Tensor:
        ctx.groups, ctx.exchange, ctx.value, ctx.mean, ctx.shape = groups, exchange, value, reduce == "mean", x.shape
        x = x.detach().contiguous()
        transfer = exchange.fetch(x, exchange.pieces[0], keep=False)
        out = x.new_empty(groups.num_rows, x.size(1))
        with recorded(exchange.communicator.recorder, "aggregate", "own rows"):
            spmm_into(out, groups.local.csr, x, groups.local.values(value))
        for one in exchange.arriving(x, groups, transfer, keep=False):
            spmm_into(out, one.group.csr, one.rows, one.group.values(value), onto=True)
        return out.div_(groups.degree) if ctx.mean else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        groups, exchange, value = ctx.groups, ctx.exchange, ctx.value
        grad = (grad / groups.degree if ctx.mean else grad).contiguous()

        def of(_piece: int, _message: Message | None, group: SourceGroup, _rows: Any, memory: Tensor | None) -> Tensor:
            out = grad.new_empty(ctx.shape) if memory is None else memory
            spmm_into(out, group.transposed.unpermuted(), grad, group.values(value, transposed=True))
            return out

        return exchange.give_back(Gradients(of, exchange, groups), grad), None, None, None, None


class _Extremum(torch.autograd.Function):
    """Maxima and minima. Edges of a row that attain its extremum share the gradient, whatever their source group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: SourceGroups, exchange: Exchange, value: Tensor | None, reduce: Any
    ) -> Tensor:
        ctx.groups, ctx.exchange, ctx.value = groups, exchange, value
        x = x.detach().contiguous()
        transfer = exchange.fetch(x, exchange.pieces[0], keep=exchange.at_once)
        out = spmm(groups.local.csr, x, _flat(groups.local.values(value)), reduce)
        filled, arrived = groups.local.filled, {}
        for one in exchange.arriving(x, groups, transfer, keep=exchange.at_once):
            if exchange.at_once:
                arrived[one.message] = one.rows
            part = spmm(one.group.csr, one.rows, _flat(one.group.values(value)), reduce)
            out = better_of(reduce, out, filled, part, one.group.filled)
            filled = filled | one.group.filled
        ctx.messages = list(arrived)
        ctx.save_for_backward(x, out, *arrived.values())
        return out.clone()  # a step after the layer may write into what it gets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out, *arrived = ctx.saved_tensors
        groups, exchange, value = ctx.groups, ctx.exchange, ctx.value
        by_message = dict(zip(ctx.messages, arrived, strict=True))
        count = tie_counts(groups.local.csr, x, groups.local.values(value), out)
        for number, remote in enumerate(groups.remote):
            rows = by_message if exchange.at_once else exchange.again(x, number)
            for message, group in remote.items():
                count += tie_counts(group.csr, rows[message], group.values(value), out)
        share = share_of_ties(grad, count, out)

        def of(
            _piece: int, _message: Message | None, group: SourceGroup, part: Tensor, _memory: Tensor | None
        ) -> Tensor:
            return extremum_grad(group.transposed.unpermuted(), part, group.values(value, transposed=True), out, share)

        return exchange.give_back(Gradients(of, exchange, groups, x, by_message), grad), None, None, None, None


def _flat(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.squeeze(1)
