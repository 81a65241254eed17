r"""Sums over the parts of split nodes that travel while training goes on (cd-r; DistGNN, Sec. 5.3, Algorithm 4).

A hash of the ids divides the split nodes into *r* bins. Training pass *e* serves bin *e mod r*: a rank takes the sums
that arrived for the nodes of this bin, which were posted *r* passes before, and posts its present sums. So no hop waits
for sums that were just sent. Pass 0 exchanges nothing. A training pass is a forward pass of a model in training mode
with gradients enabled.

========  ===========================================================================================================
a root    takes the sums that its leaves posted *r* passes before; posts its own sum and these to each leaf, without
          what came from the leaf itself
a leaf    takes what its root posted *r* passes before; posts its sum
========  ===========================================================================================================

A row's total is its local sum over the edges of this part, plus the arrived sums of other parts, which are constants.
In a pass in which nothing arrives for a row, the local sum is multiplied by the row's in-degree in all parts over its
in-degree in this part. At a root, the sums of leaves are *r* passes old. At a leaf, the sum of its root is *r* passes
old, and the sums of other leaves are *2r* passes old. With ``keep``, these sums get up to *r - 1* passes older.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pygdist.backends.clones.exchange import CloneExchange, Leaves
from pygdist.comm import Communicator, ExchangePlan, Transfer, describe_rows
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.recorder import recorded
from pygdist.errors import InputError
from pygdist.graph.links import drawn

_BINS = 0x5EED  # seeds the hash of ids


class Bin(NamedTuple):
    """The split nodes that one pass in *r* serves.

    Attributes:
        of: Their leaves that contribute.
        to: Their leaves that get totals.
        own: For each row that roots send to ``to``, the place of the leaf's own sum among those that arrive from
            ``of``; -1 if that leaf sends none.
    """

    of: Leaves
    to: Leaves
    own: Tensor


def bins(n_id: Tensor, of: Leaves, to: Leaves, delay: int) -> list[Bin]:
    """Deal the split nodes of a part to ``delay`` bins, on all ranks alike."""
    place = bin_of(n_id, delay)
    made = []
    for number in range(delay):
        here = place == number
        served, told = (
            Leaves(one.plan.chosen(here[one.plan.send_index], here[one.rows]), one.rows[here[one.rows]])
            for one in (of, to)
        )
        made.append(Bin(served, told, _places(served.plan, told.plan)))
    return made


def bin_of(n_id: Tensor, delay: int) -> Tensor:
    """Return the bin of each node, by a hash of its global id; int64 of the shape of ``n_id``."""
    return drawn(_BINS, n_id) % delay


def _places(of: ExchangePlan, to: ExchangePlan) -> Tensor:
    """Return the place in ``of.send_index`` of each row and rank in ``to.send_index``; -1 if there is none."""
    own, wanted = (_keys(plan) for plan in (of, to))
    if not own.numel():
        return torch.full_like(wanted, -1)
    order = own.argsort()
    place = order[torch.searchsorted(own[order], wanted).clamp(max=order.numel() - 1)]
    return torch.where(own[place] == wanted, place, -1)


def _keys(plan: ExchangePlan) -> Tensor:
    """Return a number for each row that is sent and the rank that gets it."""
    counts = torch.tensor(plan.send_counts)
    ranks = torch.arange(len(counts)).repeat_interleave(counts).to(plan.send_index.device)
    return plan.send_index * len(counts) + ranks


class Flight:
    """Rows on their way between the roots and leaves of a bin; they hold their own memory until they are taken.

    Args:
        exchange: The split nodes, on a communicator of flights alone, as other exchanges begin and end meanwhile.
        plan: The exchange from roots to leaves.
        rows: A row for each leaf here if ``up``, else one for each leaf of this rank's roots; nobody else has them.
        label: Names the exchange in errors; equal on all ranks.
        up: From leaves to roots.
    """

    def __init__(self, exchange: CloneExchange, plan: ExchangePlan, rows: Tensor, label: str, *, up: bool) -> None:
        counts = (plan.recv_counts, plan.send_counts) if up else (plan.send_counts, plan.recv_counts)
        self._communicator, self._label = exchange.communicator, f"{label}, {describe_rows(rows)}"
        self._sent = rows.to(exchange.wire_of(rows) or rows.dtype)
        self._arrived = self._sent.new_empty((sum(counts[1]), *rows.shape[1:]))
        self._transfer: Transfer | None = None
        if self._communicator.world_size == 1:
            return
        arrived, outgoing = self._arrived.split(list(counts[1])), self._sent.split(list(counts[0]))
        self._transfer = Transfer(self._communicator, arrived, self._label, ring=False, back=up)
        for message in self._transfer.targets:
            self._transfer.give(message, outgoing[message.rank])
        self._communicator.done()  # nobody waits for it yet

    @classmethod
    def landed(cls, arrived: Tensor) -> Flight:
        """Return a flight whose rows are here."""
        flight = cls.__new__(cls)
        flight._arrived, flight._transfer = arrived, None
        return flight

    def take(self) -> Tensor:
        """Wait until all rows are here, and return them as they travelled."""
        if self._transfer is not None:
            self._communicator.begin_wait(self._label)
            self._transfer.finish()
            self._transfer = None
        return self._arrived


class DelayedSum:
    """The sums of one hop, or their gradients: what other parts contribute is at least *r* passes old.

    Args:
        exchange: The split nodes, on a communicator of flights alone.
        communicator: The ranks, by which they compare later what they have posted.
        bins: The split nodes by bins.
        num_rows: Rows of the part.
        keep: If true, a row uses the last sum that arrived, in every pass until a newer sum arrives; if false, only in
            the pass in which the sum arrives.

    Attributes:
        rows: Local rows that get something of other parts; sorted, without duplicates.
        remote: What other parts contribute to the sums of these, ``(s, *)``.
        has: The ones of them that use it now; bool, ``(s,)``.
    """

    def __init__(
        self, exchange: CloneExchange, communicator: Communicator, bins: list[Bin], *, num_rows: int, keep: bool
    ) -> None:
        self._exchange, self._communicator, self._bins, self._keep = exchange, communicator, bins, keep
        self._up: dict[int, Flight] = {}
        self._down: dict[int, Flight] = {}
        self.rows = torch.cat([rows for one in bins for rows in (one.of.plan.send_index, one.to.rows)]).unique()
        self._place = torch.full((num_rows,), -1, device=self.rows.device)  # of a row among ``rows``
        self._place[self.rows] = torch.arange(self.rows.numel(), device=self.rows.device)
        self.has = torch.zeros(self.rows.shape, dtype=torch.bool, device=self.rows.device)
        self.remote: Tensor | None = None

    def step(self, z: Tensor, epoch: int, label: str, *, at_once: bool) -> None:
        """Serve the bin of a pass: take what was posted *r* passes before, and post what is there now.

        Args:
            z: The sum over the edges of this part, for each row; ``(m, *)``.
            epoch: The number of the pass, from 0.
            label: Names the hop in errors.
            at_once: Serve all bins, and wait for them.

        Raises:
            InputError: If the rows have another shape or dtype than before.
        """
        if self.remote is None:
            self.remote = z.new_zeros((self.rows.numel(), *z.shape[1:]))
        if describe_rows(self.remote) != describe_rows(z):
            raise InputError(
                f"{label}: rows are {describe_rows(z)}, and were {describe_rows(self.remote)} in the pass before; sums "
                "with a delay are for models that compute the same hops, in one precision, in each training pass"
            )
        if not self._keep:
            self.has.zero_()
        if at_once:
            for number in range(len(self._bins)):
                self._post_up(number, z, label)
            for number in range(len(self._bins)):
                self._serve_root(number, z, label)
                self._serve_leaf(self._bins[number], self._down.pop(number), label)
        elif epoch > 0:
            number = epoch % len(self._bins)
            posted = self._down.pop(number, None)
            if number in self._up:
                self._serve_root(number, z, label)
            if posted is not None:
                self._serve_leaf(self._bins[number], posted, label)
            self._post_up(number, z, label)

    def _post_up(self, number: int, z: Tensor, label: str) -> None:
        served = self._bins[number]
        with self._recorded("pack", f"{label}, up"):
            rows = z[served.of.rows]
        self._up[number] = self._post(served.of.plan, rows, f"{label}, up", up=True)

    def _serve_root(self, number: int, z: Tensor, label: str) -> None:
        """Take the sums of leaves, add them up in the order of ranks, and answer each leaf."""
        served, remote = self._bins[number], self.remote
        assert remote is not None
        plan, theirs = served.of.plan, self._up.pop(number).take().to(z.dtype)
        with self._recorded("unpack", f"{label}, up"):
            places = self._place[plan.send_index]
            remote[places], self.has[places] = 0, True
            counts = list(plan.send_counts)
            for place, rows in zip(places.split(counts), theirs.split(counts), strict=True):
                remote[place] = remote[place] + rows
        with self._recorded("pack", f"{label}, down"):
            told = served.to.plan.send_index
            answer, others = z[told], self._place[told]
            summed = others >= 0  # leaves of other roots send nothing
            answer[summed] = answer[summed] + remote[others[summed]]
            sent = served.own >= 0
            answer[sent] = answer[sent] - theirs[served.own[sent]]
        self._down[number] = self._post(served.to.plan, answer, f"{label}, down", up=False)

    def _serve_leaf(self, served: Bin, posted: Flight, label: str) -> None:
        assert self.remote is not None
        theirs = posted.take().to(self.remote.dtype)
        with self._recorded("unpack", f"{label}, down"):
            places = self._place[served.to.rows]
            self.remote[places], self.has[places] = theirs, True

    def plus(self, out: Tensor, label: str) -> Tensor:
        """Add to each row what has arrived for it, in place."""
        assert self.remote is not None
        with self._recorded("unpack", label):
            return out.index_add_(0, self.rows[self.has], self.remote[self.has])

    def _recorded(self, kind: str, label: str) -> contextlib.AbstractContextManager[None]:
        return recorded(self._communicator.recorder, kind, label)

    def _post(self, plan: ExchangePlan, rows: Tensor, label: str, *, up: bool) -> Flight:
        self._communicator.note(label)
        return Flight(self._exchange, plan, rows, label, up=up)

    def drain(self) -> None:
        """Wait until all that was posted has arrived; it stays to be taken."""
        for flight in (*self._up.values(), *self._down.values()):
            flight.take()

    def state(self, name: str) -> dict[str, Tensor]:
        """Return what has arrived, by names that begin with ``name``; waits for what is on its way."""
        if self.remote is None:  # its first pass has not come
            return {}
        state = {f"{name}.remote": self.remote, f"{name}.has": self.has}
        for way, flights in (("up", self._up), ("down", self._down)):
            state |= {f"{name}.{way}.{number}": flight.take() for number, flight in flights.items()}
        return state

    def load(self, state: Mapping[str, Tensor], name: str) -> None:
        """Take up what :meth:`state` returned.

        Raises:
            InputError: If it is that of other split nodes.
        """
        if not state:
            return
        device = self.rows.device
        self.remote, self.has = (state[f"{name}.{part}"].to(device, copy=True) for part in ("remote", "has"))
        fits = self.rows.numel() == len(self.remote) == len(self.has)
        for number, served in enumerate(self._bins):
            ways = ("up", self._up, served.of.plan.num_sent), ("down", self._down, served.to.plan.num_received)
            for way, flights, num_rows in ways:
                if (arrived := state.get(f"{name}.{way}.{number}")) is not None:
                    fits &= len(arrived) == num_rows
                    flights[number] = Flight.landed(arrived.to(device))
        if not fits:
            raise InputError(f"the checkpoint's backend_state: {name} has sums of other split nodes; resume without it")


class Pass(NamedTuple):
    """The training pass that a hop is in.

    Attributes:
        epoch: Its number, from 0.
        at_once: All bins are served, and waited for.
        label: Names the hop in errors.
    """

    epoch: int
    at_once: bool
    label: str


def with_delay(
    z: Tensor, share: Tensor, unread: Tensor, forward: DelayedSum, backward: DelayedSum | None, now: Pass
) -> Tensor:
    r"""Return the sum over the edges here plus what of other parts has arrived, which gets no gradient here.

    Args:
        z: The sum over the edges of this part, for each row.
        share: The part of each node's in-edges that are here. The sum of a row for which nothing has arrived is divided
            by it.
        unread: Rows that nobody reads; they get ones, of which a root and a logarithm are finite.
        forward: Brings the sums of other parts.
        backward: Brings their gradients; ``None`` leaves each row its own (Sec. 5.3).
        now: The training pass.

    Shapes:
        ``z`` and the result are :math:`(m, *)`, ``share`` is :math:`(m, 1, ...)` or as ``z``.
    """
    out: Tensor = _Delayed.apply(z, share, unread, forward, backward, now)  # type: ignore[no-untyped-call]
    return out


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, share: Tensor, unread: Tensor, forward: DelayedSum, backward: Any, now: Pass
    ) -> Tensor:
        ctx.now, ctx.backward_sum = now, backward
        forward.step(z.detach(), now.epoch, f"{now.label}, forward", at_once=now.at_once)
        scale = 1 / share
        scale[forward.rows[forward.has]] = 1
        ctx.save_for_backward(scale, unread)
        return forward.plus(z.detach() * scale, f"{now.label}, forward").index_fill_(0, unread, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, unread = ctx.saved_tensors
        grad = grad.index_fill(0, unread, 0)
        out, stale = grad * scale, ctx.backward_sum
        if stale is not None:
            now = ctx.now
            stale.step(grad, now.epoch, f"{now.label}, backward", at_once=now.at_once)
            out = stale.plus(out, f"{now.label}, backward")
        return out, *[None] * 5
