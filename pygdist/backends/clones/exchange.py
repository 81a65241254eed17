"""Exchanges between the rows of a split node: leaves send what they have to the root, the root answers (cd-0).

Sums over the rows of one node are self-adjoint: in the backward pass, gradients travel from the leaves that received
the total to the root, and their sum to the leaves that sent a term (DistGNN, Sec. 5.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pygdist.comm import Communicator, ExchangePlan, describe_rows
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.recorder import recorded
from pygdist.graph import Shard
from pygdist.hops.folds import better_of, share_of_ties
from pygdist.kernels.spmm import Reduce


class Leaves(NamedTuple):
    """Some of the leaves on this rank, and the roots on this rank that have such leaves on other ranks.

    Attributes:
        plan: The exchange from roots to leaves.
        rows: Local rows of the leaves, in the order of the plan; int64.
    """

    plan: ExchangePlan
    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class CloneExchange:
    """The split nodes of a part.

    Attributes:
        communicator: The ranks.
        num_owned: Rows of roots; they come first.
        up: Leaves with in-edges: their sums are parts of sums.
        down: Leaves with out-edges: their rows are read.
        all: All leaves.
        wire: The dtype in which floating point rows travel; ``None`` for their own.
    """

    communicator: Communicator
    num_owned: int
    up: Leaves
    down: Leaves
    all: Leaves
    wire: torch.dtype | None

    @classmethod
    def of(cls, shard: Shard, communicator: Communicator, wire: torch.dtype | None) -> CloneExchange:
        """Return the exchange of a part of placement *edges*."""
        clones = shard.clones
        assert clones is not None, "the placement was checked"
        leaves = torch.arange(shard.num_owned, shard.n_id.numel(), device=shard.n_id.device)
        return cls(
            communicator=communicator, num_owned=shard.num_owned, up=Leaves(clones.up, clones.up_rows),
            down=Leaves(clones.down, clones.down_rows), all=Leaves(shard.plan, leaves), wire=wire,
        )  # fmt: skip

    @property
    def of_this_part(self) -> CloneExchange:
        """The same rows as if no node were split, so that all rows are roots and nothing is exchanged."""
        index, num_rows = self.all.rows[:0], self.num_owned + self.all.rows.numel()
        nobody = Leaves(ExchangePlan(send_index=index, send_counts=(0,), recv_counts=(0,)), index)
        alone = Communicator()
        alone.recorder = self.communicator.recorder
        return replace(self, communicator=alone, num_owned=num_rows, up=nobody, down=nobody, all=nobody)

    def sent_down(self, x: Tensor, to: Leaves, label: str) -> Tensor:
        """Send rows of roots to leaves; return those of this rank's leaves. No gradient."""
        with torch.no_grad():
            return self.communicator.exchange_rows(x, to.plan, label=label, wire=self.wire_of(x))

    def summed_up(self, x: Tensor, of: Leaves, label: str) -> Tensor:
        """Return the rows of roots plus those of their leaves, in the order of ranks. No gradient.

        Shapes:
            ``x`` is :math:`(m, *)`, one row for each of the part; the result :math:`(n, *)`.
        """
        label = f"{label}, {describe_rows(x)}"
        with recorded(self.communicator.recorder, "pack", label):
            rows = x.detach().index_select(0, of.rows)
        n, wire = self.num_owned, self.wire_of(x)
        total = self.communicator.return_rows(rows, of.plan, num_owned=n, label=label, wire=wire)
        return total.add_(x.detach()[:n])

    def collected(self, rows: Tensor, of: Leaves, label: str) -> Tensor:
        """Return the rows of the leaves of this rank's roots, in the order of ``send_index``. No gradient."""
        return self._swapped(rows, of.plan.recv_counts, of.plan.send_counts, label)

    def handed_out(self, rows: Tensor, to: Leaves, label: str) -> Tensor:
        """Send a row to each leaf of this rank's roots, in the order of ``send_index``; return what arrives here."""
        return self._swapped(rows, to.plan.send_counts, to.plan.recv_counts, label)

    def _swapped(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], label: str) -> Tensor:
        """Send so many of the rows to each rank, and return those that arrive."""
        if self.communicator.world_size == 1:
            return rows
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        outgoing, incoming = rows.contiguous().split(list(sent)), out.split(list(received))
        self.communicator.send_and_receive(outgoing, incoming, f"{label}, {describe_rows(rows)}")
        return out

    def wire_of(self, x: Tensor) -> torch.dtype | None:
        """Return the dtype in which rows like ``x`` travel; ``None`` for their own."""
        return self.wire if x.is_floating_point() and x.element_size() > 2 else None


def summed(z: Tensor, exchange: CloneExchange, *, of: Leaves, to: Leaves, label: str) -> Tensor:
    r"""Sum the rows of each split node (cd-0; DistGNN, Sec. 5.3); differentiable once. Every rank makes the call.

    Args:
        z: A row for each row of the part: what its edges contribute to the node's sum.
        exchange: The split nodes.
        of: The leaves that contribute. Other leaves must have zeros.
        to: The leaves that get the sum. Others get ones, which must not be read.
        label: Names the exchange in errors; equal on all ranks.

    Shapes:
        ``z`` and the result are :math:`(m, *)`.
    """
    if exchange.communicator.world_size == 1:
        return z
    out: Tensor = _Sum.apply(z, exchange, of, to, label)  # type: ignore[no-untyped-call]
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, exchange: CloneExchange, of: Leaves, to: Leaves, label: str) -> Tensor:
        ctx.exchange, ctx.of, ctx.to, ctx.label = exchange, of, to, label
        total = exchange.summed_up(z, of, f"{label}, forward, up")
        arrived = exchange.sent_down(total, to, f"{label}, forward, down")
        with recorded(exchange.communicator.recorder, "unpack", label):
            unread = torch.ones_like(z[exchange.num_owned :])  # of which a root, a logarithm and their like are finite
            return torch.cat([total, unread]).index_copy_(0, to.rows, arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, of, to, label = ctx.exchange, ctx.of, ctx.to, ctx.label
        total = exchange.summed_up(grad, to, f"{label}, backward, up")
        arrived = exchange.sent_down(total, of, f"{label}, backward, down")
        with recorded(exchange.communicator.recorder, "unpack", label):
            out = torch.cat([total, torch.zeros_like(grad[exchange.num_owned :])])
            return out.index_copy_(0, of.rows, arrived), None, None, None, None


def highest(x: Tensor, exchange: CloneExchange, *, label: str) -> Tensor:
    r"""Return the largest number of each split node's rows, at roots and at leaves with in-edges; no gradient.

    Shapes:
        ``x`` and the result are :math:`(m, *)`.
    """
    if exchange.communicator.world_size == 1:
        return x
    exchange = replace(exchange, wire=None)  # all rows of a node must subtract the same number
    n, up = exchange.num_owned, exchange.up
    out = x.detach().clone()
    theirs = exchange.collected(out[up.rows], up, f"{label}, forward, up")
    for index, rows in _by_rank(up.plan, theirs):
        out[index] = torch.maximum(out[index], rows)
    return out.index_copy_(0, up.rows, exchange.sent_down(out[:n], up, f"{label}, forward, down"))


def extremum(
    z: Tensor, count: Tensor, exchange: CloneExchange, *, of: Leaves, to: Leaves, reduce: Reduce, label: str
) -> Tensor:
    r"""Take the maximum or minimum over the rows of each split node (cd-0). Every rank makes the call.

    The gradient that comes back is that of each edge that attains the extremum of the node: edges share it whatever
    part they are in. Rows whose part does not attain the extremum get zeros.

    Args:
        z: The extremum over the edges of this part, for each row.
        count: The number of edges of this part that attain it, 0 for rows without edges; int32.
        exchange: The split nodes.
        of: The leaves that contribute.
        to: The leaves that get the result.
        reduce: ``"max"`` or ``"min"``.
        label: Names the exchange in errors; equal on all ranks.

    Returns:
        The extremum over the edges of all parts, 0 for nodes without.

    Shapes:
        ``z``, ``count`` and the result are :math:`(m, F)`.
    """
    out: Tensor = _Extremum.apply(z, count, exchange, of, to, reduce, label)  # type: ignore[no-untyped-call]
    return out


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, count: Tensor, exchange: CloneExchange, of: Leaves, to: Leaves, reduce: Any, label: str
    ) -> Tensor:
        n, z = exchange.num_owned, z.detach()
        most, filled = z[:n].clone(), count[:n] > 0
        theirs = exchange.collected(z[of.rows], of, f"{label}, forward, up")
        counts = exchange.collected(count[of.rows], of, f"{label}, forward, up, ties")
        for (index, rows), (_, ties) in zip(_by_rank(of.plan, theirs), _by_rank(of.plan, counts), strict=True):
            most[index] = better_of(reduce, most[index], filled[index], rows, ties > 0)
            filled[index] = filled[index] | (ties > 0)
        most = torch.where(filled, most, 0)
        here = (count[:n] > 0) & _same(z[:n], most)
        attains = (counts > 0) & _same(theirs, most[of.plan.send_index])
        total = torch.where(here, count[:n], 0)
        for index, ties in _by_rank(of.plan, torch.where(attains, counts, 0)):
            total[index] = total[index] + ties
        arrived = exchange.sent_down(most, to, f"{label}, forward, down")
        ctx.exchange, ctx.of, ctx.to, ctx.label = exchange, of, to, label
        ctx.save_for_backward(here, attains, total, most)
        return torch.cat([most, torch.ones_like(z[n:])]).index_copy_(0, to.rows, arrived)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, label, of = ctx.exchange, ctx.label, ctx.of
        here, attains, total, most = ctx.saved_tensors
        share = share_of_ties(exchange.summed_up(grad, ctx.to, f"{label}, backward, up"), total, most)
        theirs = torch.where(attains, share[of.plan.send_index], 0)
        arrived = exchange.handed_out(theirs, of, f"{label}, backward, down")
        out = torch.cat([torch.where(here, share, 0), torch.zeros_like(grad[exchange.num_owned :])])
        return out.index_copy_(0, of.rows, arrived), None, None, None, None, None, None


def _same(part: Tensor, extremum: Tensor) -> Tensor:
    return (part == extremum) | (part.isnan() & extremum.isnan())


def _by_rank(plan: ExchangePlan, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each other rank, its leaves' roots and their rows among ``rows``; inside a piece no root comes twice.

    ``rows`` are in the order of ``plan.send_index``.
    """
    counts = list(plan.send_counts)
    yield from zip(plan.send_index.split(counts), rows.split(counts), strict=True)
