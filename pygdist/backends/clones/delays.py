r"""Sums over the parts of split nodes that travel while training goes on (cd-r; DistGNN, Sec. 5.3, Algorithm 4).

The split nodes are dealt to *r* bins by a hash of their ids. Training pass *e* serves bin *e mod r*: a rank takes what
arrived for the nodes of this bin, all of which was posted *r* passes before, and posts what it has now. So no hop waits
for what has just been sent. Pass 0 exchanges nothing. A training pass is a forward pass of a model in training mode
with gradients enabled.

========  ===========================================================================================================
a root    takes the sums that its leaves posted *r* passes before; posts its own sum and these to each leaf, without
          what came from the leaf itself
a leaf    takes what its root posted *r* passes before; posts its sum
========  ===========================================================================================================

A row is its live sum over the edges here, plus what arrived of other parts, which is a constant. In a pass in which
nothing arrives for a row, the sum here stands for all: it is multiplied by the number of in-edges in all parts over
that here. At a root the sums of leaves are *r* passes old; at a leaf that of its root is as old, and those of other
leaves are *2r* passes old. If rows keep what arrived until more arrives, all of this gets up to *r - 1* passes older.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pygdist.backends.clones.exchange import CloneExchange, Leaves
from pygdist.comm import Communicator, ExchangePlan, Transfer, describe_rows
from pygdist.comm.derivatives import once_differentiable
from pygdist.errors import InputError
from pygdist.graph.links import drawn
from pygdist.hops.arguments import tensors_of

_BINS = 0x5EED  # seeds the hash of ids
_MOST_CALLS = 8  # training passes before a backward pass, such as views of a graph


@dataclass(frozen=True, kw_only=True)
class DelayOptions:
    """How late sums of other parts may be, and what becomes of them.

    Attributes:
        delay: Training passes between posting a sum and using it (*r*); 0 exchanges at once, ``"never"`` not at all.
        keep: A row uses what arrived until more arrives, instead of in the pass in which it arrives alone.
        gradients: ``"local"``: a row's gradient stays in its part (Sec. 5.3). ``"stale"``: gradients travel as sums do.
        warm_up: Pass 0 sums over the edges here (``"local"``), or exchanges all at once (``"exact"``).

    Raises:
        InputError: If an option has another value, or no effect.
    """

    delay: int | Literal["never"] = 0
    keep: bool = False
    gradients: Literal["local", "stale"] = "local"
    warm_up: Literal["local", "exact"] = "local"

    def __post_init__(self) -> None:
        delay, late = self.delay, self.is_late
        if isinstance(delay, bool) or not (delay == "never" or (isinstance(delay, int) and delay >= 0)):
            raise InputError(f"delay is {delay!r}, expected a number of training passes, 0 or more, or 'never'")
        for name, allowed in (("gradients", ("local", "stale")), ("warm_up", ("local", "exact"))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        for name in ("keep", "gradients", "warm_up"):
            if not late and getattr(self, name) != getattr(DelayOptions, name):
                raise InputError(f"{name}={getattr(self, name)} has no effect with delay={delay}; leave it out")

    @property
    def approximation(self) -> str:
        """What is given up, in one clause; empty if nothing is."""
        if self.delay == "never":
            return "in training, sums leave out the edges of other parts"
        return (
            f"in training, what other parts contribute to sums is {self.delay} passes old or older"
            if self.delay
            else ""
        )

    @property
    def numbers(self) -> Tensor:
        """The options on which the meaning of sums on their way depends, as numbers."""
        return torch.tensor([-1 if self.delay == "never" else self.delay, self.keep, self.gradients == "stale"])

    @property
    def is_late(self) -> bool:
        """True if sums travel while passes go on."""
        return isinstance(self.delay, int) and self.delay > 0


class Delays:
    """The delayed sums of a model's hops, and the number of its training pass.

    Args:
        exchange: The split nodes.
        n_id: Global ids of the rows of the part, ``(m,)``.
        options: With a delay of at least 1.

    Attributes:
        model: The model whose sums these are.
        epoch: The number of its training pass that runs, or ran last; -1 before the first. Passes before the backward
            pass, such as those of two views of a graph, have one number, and sums of their own.
        running: A training pass runs.
    """

    def __init__(self, exchange: CloneExchange, n_id: Tensor, options: DelayOptions) -> None:
        self._here, self._n_id, self._options = exchange.communicator, n_id, options
        self._flights: CloneExchange | None = None
        self._exchange, self._sums = exchange, dict[str, DelayedSum]()
        self._saved = dict[str, Tensor]()  # out of a checkpoint, for sums that are not yet made
        self._bins: dict[tuple[int, int], list[Bin]] = {}
        self.model: nn.Module | None = None
        self.epoch, self._call, self._hop, self._number = -1, 0, 0, 0
        self._answered, self.running = True, False
        self._hops: dict[int, int] = {}  # of each pass before a backward pass

    def begin_pass(self, model: nn.Module) -> None:
        """Begin a training pass.

        Raises:
            InputError: If another model made the passes before, or there are too many without a backward pass.
        """
        if self.model is not None and self.model is not model:
            raise InputError(
                "two models train on one backend 'delayed', whose delayed sums are those of one model; give each model "
                "a backend of its own, or distribute the model again to begin anew"
            )
        self.model, self.running = model, True
        self._call = 0 if self._answered else self._call + 1
        self.epoch += self._answered
        self._answered = False
        if self._call == _MOST_CALLS:
            raise InputError(
                f"{_MOST_CALLS + 1} training passes without a backward pass: with a delay each keeps sums of its own; "
                "call model.eval(), or use torch.no_grad(), where nothing is trained"
            )
        if self._flights is not None:
            flights = self._flights.communicator
            flights.epoch, flights.recorder = self._here.epoch, self._here.recorder

    def end_pass(self, hops: int, output: Any) -> None:
        """End a training pass that made so many hops; the backward pass of its output ends the step.

        Raises:
            InputError: If the pass made other hops than those before.
        """
        self.running = False
        if self._hops.setdefault(self._call, hops) != hops:
            raise InputError(
                f"the model made {hops} hops in this training pass, and {self._hops[self._call]} in those before; with "
                "a delay, sums of the same hops travel between passes: use delay=0 for models that skip layers"
            )
        for one in tensors_of(output):
            if one.requires_grad:
                one.register_hook(self._answer)

    def _answer(self, _: Tensor) -> None:
        self._answered = True

    def begin_hop(self, number: int) -> None:
        """Begin the hop of this number; its sums are told apart by their order."""
        self._hop, self._number = number, 0

    def summed(self, z: Tensor, share: Tensor, *, of: Leaves, to: Leaves, label: str) -> Tensor:
        r"""Return the sum over the edges here plus what of other parts has arrived, which gets no gradient here.

        Every rank makes the call.

        Args:
            z: The sum over the edges of this part, for each row.
            share: The part of each node's in-edges that are here. The sum of a row for which nothing has arrived is
                divided by it: these edges stand for all.
            of: The leaves that contribute.
            to: The leaves that get totals.
            label: Names the hop in errors.

        Shapes:
            ``z`` and the result are :math:`(m, *)`, ``share`` is :math:`(m)`.
        """
        name, label = f"{self._call}.{self._hop}.{self._number}", f"{label}, sum {self._number}"
        self._number += 1
        forward, stale = self._sum(f"{name}.forward", of, to), self._options.gradients == "stale"
        backward = self._sum(f"{name}.backward", to, of) if stale or self.at_once else None
        share = share.to(z.dtype).view(-1, *[1] * (z.dim() - 1))
        args = forward, backward, self.epoch, self.at_once, f"{label}, delayed"
        out: Tensor = _Delayed.apply(z, share, self._unread(to), *args)  # type: ignore[no-untyped-call]
        return out

    def _unread(self, to: Leaves) -> Tensor:
        """Return the leaves whose rows nobody reads; they get ones, of which a root and a logarithm are finite."""
        unread = torch.ones_like(self._n_id, dtype=torch.bool)
        unread[: self._exchange.num_owned] = unread[to.rows] = False
        return unread.nonzero().view(-1)

    @property
    def at_once(self) -> bool:
        """True in a first pass that exchanges all sums."""
        return self.epoch == 0 and self._options.warm_up == "exact"

    def _sum(self, name: str, of: Leaves, to: Leaves) -> DelayedSum:
        if name not in self._sums:
            assert isinstance(self._options.delay, int)
            if self._flights is None:
                self._flights = replace(self._exchange, communicator=self._here.apart())
            key = id(of), id(to)
            if key not in self._bins:
                self._bins[key] = bins(self._n_id, of, to, self._options.delay)
            made = DelayedSum(
                self._flights, self._here, self._bins[key], num_rows=self._n_id.numel(), keep=self._options.keep
            )
            mine = [key for key in self._saved if key.startswith(f"{name}.")]
            made.load({key: self._saved.pop(key) for key in mine}, name)
            self._sums[name] = made
        return self._sums[name]

    # -- checkpoints and the end ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return what has arrived and what is on its way, by name; waits until the latter is here."""
        state = {**self._saved, "epoch": torch.tensor(self.epoch), "options": self._options.numbers}
        for name, one in self._sums.items():
            state |= one.state(name)
        return state

    def load(self, state: Mapping[str, Tensor]) -> bool:
        """Go on from what :meth:`state` returned on this rank; ``False`` if it was made with other options."""
        if not torch.equal(state["options"], self._options.numbers):
            return False
        self._drain()
        self._sums.clear()
        self._saved = {name: value for name, value in state.items() if "." in name}
        self.epoch, self._answered = int(state["epoch"]), True
        return True

    def close(self) -> None:
        """End the process group of flights, once all that was posted has arrived; after an error at once."""
        if self._flights is None or self._flights.communicator.is_closed:
            return
        try:
            if sys.exc_info()[0] is None:
                self._drain()
        finally:
            self._flights.communicator.close()

    def _drain(self) -> None:
        for one in self._sums.values():
            one.drain()


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
        keep: Rows use what arrived until more arrives; otherwise in the pass in which it arrives alone.

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
            for number, served in enumerate(self._bins):
                self._up[number] = self._post(served.of.plan, z[served.of.rows], f"{label}, up", up=True)
            for number in range(len(self._bins)):
                self._serve_root(number, z, label)
                self._serve_leaf(self._bins[number], self._down.pop(number))
        elif epoch > 0:
            number = epoch % len(self._bins)
            served, posted = self._bins[number], self._down.pop(number, None)
            if number in self._up:
                self._serve_root(number, z, label)
            if posted is not None:
                self._serve_leaf(served, posted)
            self._up[number] = self._post(served.of.plan, z[served.of.rows], f"{label}, up", up=True)

    def _serve_root(self, number: int, z: Tensor, label: str) -> None:
        """Take the sums of leaves, add them up in the order of ranks, and answer each leaf."""
        served, remote = self._bins[number], self.remote
        assert remote is not None
        plan, theirs = served.of.plan, self._up.pop(number).take().to(z.dtype)
        places = self._place[plan.send_index]
        remote[places], self.has[places] = 0, True
        counts = list(plan.send_counts)
        for place, rows in zip(places.split(counts), theirs.split(counts), strict=True):
            remote[place] = remote[place] + rows
        told = served.to.plan.send_index
        answer, others = z[told], self._place[told]
        known = others >= 0  # leaves of other roots send nothing
        answer[known] = answer[known] + remote[others[known]]
        sent = served.own >= 0
        answer[sent] = answer[sent] - theirs[served.own[sent]]
        self._down[number] = self._post(served.to.plan, answer, f"{label}, down", up=False)

    def _serve_leaf(self, served: Bin, posted: Flight) -> None:
        assert self.remote is not None
        places = self._place[served.to.rows]
        self.remote[places], self.has[places] = posted.take().to(self.remote.dtype), True

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


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, share: Tensor, unread: Tensor, forward: DelayedSum, backward: Any, *how: Any
    ) -> Tensor:
        (ctx.epoch, ctx.at_once, ctx.label), ctx.backward_sum = how, backward
        forward.step(z.detach(), ctx.epoch, f"{ctx.label}, forward", at_once=ctx.at_once)
        scale = 1 / share
        scale[forward.rows[forward.has]] = 1
        ctx.save_for_backward(scale, unread)
        return _plus(z.detach() * scale, forward).index_fill_(0, unread, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale, unread = ctx.saved_tensors
        grad = grad.index_fill(0, unread, 0)
        out, stale = grad * scale, ctx.backward_sum
        if stale is not None:
            stale.step(grad, ctx.epoch, f"{ctx.label}, backward", at_once=ctx.at_once)
            out = _plus(out, stale)
        return out, *[None] * 7


def _plus(out: Tensor, sums: DelayedSum) -> Tensor:
    """Add to each row what has arrived for it, in place."""
    assert sums.remote is not None
    return out.index_add_(0, sums.rows[sums.has], sums.remote[sums.has])
