"""Attention over source groups as they arrive: with the largest score and the sum of exponentials so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.fetching.exchange import Exchange, Gradients
from pygdist.backends.fetching.groups import SourceGroup, SourceGroups
from pygdist.comm import Message
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.recorder import recorded
from pygdist.graph.adjacency import Score
from pygdist.kernels import sddmm, spmm
from pygdist.kernels.chunked import gat_ends, gat_grad, gat_part, merge_softmax, softmax_part


def attend(
    x: Tensor, source: Tensor, target: Tensor, groups: SourceGroups, exchange: Exchange, negative_slope: float
) -> Tensor:
    """GAT's weighted sums; see :meth:`pygdist.graph.Adjacency.attend`.

    Args:
        x: This rank's rows, ``(n, H, C)``.
        source: Scores of all source rows.
        target: Scores of the destinations.
        groups: The edges.
        exchange: Fetches other ranks' rows.
        negative_slope: Slope of the leaky ReLU below 0.
    """
    parts = (x.flatten(1), source, target)
    out: Tensor = _Attention.apply(*parts, groups, exchange, negative_slope)  # type: ignore[no-untyped-call]
    return out.view(-1, *x.shape[1:])


def attend_by(rows: Tensor, groups: SourceGroups, exchange: Exchange, score: Score, others: Sequence[Tensor]) -> Tensor:
    """Attention with any score; see :meth:`pygdist.graph.Adjacency.attend_by`.

    Args:
        rows: This rank's rows, ``(n, parts, H, C)``: one part for each tensor that the hop reads.
        groups: The edges.
        exchange: Fetches other ranks' rows.
        score: Computes the scores of edges.
        others: Tensors that the score reads beside source rows.
    """
    scored = _Scored(score, *rows.shape[1:])
    out: Tensor = _AttentionBy.apply(rows.flatten(1), groups, exchange, scored, *others)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    """GAT's weighted sums, with the softmax over all edges of a row, built up group by group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Tensor, target: Tensor, groups: SourceGroups, exchange: Exchange, slope: float
    ) -> Tensor:
        ctx.groups, ctx.exchange, ctx.slope = groups, exchange, slope
        x, source, target = (part.detach().contiguous() for part in (x, source, target))
        graded = any(ctx.needs_input_grad)
        transfer = exchange.fetch(x, exchange.pieces[0], keep=exchange.at_once)
        with recorded(exchange.communicator.recorder, "aggregate", "own rows"):
            state = gat_part(groups.local.csr, x, source[: x.size(0)], target, slope)
        arrived = {}
        for one in exchange.arriving(x, groups, transfer, keep=exchange.at_once):
            if exchange.at_once:
                arrived[one.message] = one.rows
            scores = source.index_select(0, exchange.positions_of(one.piece, one.message))
            state = gat_part(one.group.csr, one.rows, scores, target, slope, state)
        ctx.messages = list(arrived)
        if graded:
            ctx.save_for_backward(x, source, target, *state, *arrived.values())
        return state[0].clone() if graded else state[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, source, target, out, above, facts, *arrived = ctx.saved_tensors
        groups, exchange, slope = ctx.groups, ctx.exchange, ctx.slope
        by_message = dict(zip(ctx.messages, arrived, strict=True))
        grad, grad_source = grad.contiguous(), torch.zeros_like(source)
        # of all edges of each row: the gradient of target is made of sums over them
        ends, grad_target = gat_ends(target, slope, (out, above, facts), grad)

        def of(piece: int, message: Message | None, group: SourceGroup, part: Tensor, _memory: Tensor | None) -> Tensor:
            places = slice(0, x.size(0)) if message is None else exchange.positions_of(piece, message)
            gradient, grad_source[places] = gat_grad(
                group.transposed.unpermuted(), part, source[places], slope, ends, grad
            )
            return gradient

        return (
            exchange.give_back(Gradients(of, exchange, groups, x, by_message), x),
            grad_source,
            grad_target,
            None,
            None,
            None,
        )


@dataclass(frozen=True)
class _Scored:
    """Reads the rows of a group; see :meth:`~pygdist.graph.Adjacency.attend_by`."""

    score: Score
    num_parts: int
    heads: int
    channels: int

    def read(self, group: SourceGroup, rows: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the scores of the group's edges, ``(E, H)``, and the rows that are summed, ``(M, H, C)``."""
        parts = rows.view(-1, self.num_parts, self.heads, self.channels).unbind(1)
        return self.score(group.csr.unpermuted(), parts[0], *others, transposed=group.transposed), parts[-1]


class _AttentionBy(torch.autograd.Function):
    """Attention with any score, with the softmax over all edges of a row, by the running maximum and sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: SourceGroups, exchange: Exchange, scored: _Scored, *others: Tensor
    ) -> Tensor:
        ctx.groups, ctx.exchange, ctx.scored = groups, exchange, scored
        x = x.detach().contiguous()
        transfer = exchange.fetch(x, exchange.pieces[0], keep=exchange.at_once)
        with recorded(exchange.communicator.recorder, "aggregate", "own rows"):
            state = softmax_part(groups.local.csr.unpermuted(), *scored.read(groups.local, x, others))
        arrived = {}
        for one in exchange.arriving(x, groups, transfer, keep=exchange.at_once):
            if exchange.at_once:
                arrived[one.message] = one.rows
            more = softmax_part(one.group.csr.unpermuted(), *scored.read(one.group, one.rows, others))
            state = merge_softmax(state, more)
        out, most, total = state
        out = out / total.clamp(min=1).unsqueeze(-1)  # the largest score alone gives 1; without edges there is none
        ctx.messages = list(arrived)
        ctx.save_for_backward(x, out, most, total, *others, *arrived.values())
        return out.clone() if any(ctx.needs_input_grad) else out  # a step after the layer may write into what it gets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, out, most, total, *rest = ctx.saved_tensors
        groups, exchange, scored = ctx.groups, ctx.exchange, ctx.scored
        others = rest[: len(rest) - len(ctx.messages)]
        by_message = dict(zip(ctx.messages, rest[len(others) :], strict=True))
        grad, shared = grad.contiguous(), (grad * out).sum(-1)
        totals = [torch.zeros_like(other) for other in others]

        def of(
            _piece: int, _message: Message | None, group: SourceGroup, rows: Tensor, _memory: Tensor | None
        ) -> Tensor:
            csr = group.csr.unpermuted()
            row = csr.row_index()
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in (rows, *others)]
                scores, values = scored.read(group, leaves[0], leaves[1:])
                weights = (scores.detach() - most[row]).exp() / total[row]
                summed = spmm(csr, values, weights, transposed=group.transposed)
            towards = weights * (sddmm(csr, values.detach(), grad) - shared[row])
            gradient, *more = torch.autograd.grad([scores, summed], leaves, [towards, grad])
            for one, part in zip(totals, more, strict=True):
                one += part
            return gradient

        return exchange.give_back(Gradients(of, exchange, groups, x, by_message), x), None, None, None, *totals
