"""The delayed sums of a model: which hop has which, in which training pass, and what a checkpoint holds of them.

:mod:`pygdist.backends.clones.flights` has the algorithm.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pygdist.backends.clones.exchange import CloneExchange, Leaves
from pygdist.backends.clones.flights import Bin, DelayedSum, Pass, bins, with_delay
from pygdist.errors import InputError
from pygdist.hops.arguments import tensors_of

_MOST_CALLS = 8  # training passes before a backward pass, such as views of a graph


@dataclass(frozen=True, kw_only=True)
class DelayOptions:
    """Options for sums of other parts, which may arrive late.

    Attributes:
        delay: Number of training passes between sending a sum and using it (*r*); 0 exchanges sums at once, ``"never"``
            leaves out other parts' sums.
        keep: If true, a row uses the last sum that arrived, in every pass until a newer sum arrives. If false, a row
            uses a sum only in the pass in which the sum arrives; in other passes its local sum is scaled up.
        gradients: ``"local"``: a row's gradient stays in its part (Sec. 5.3). ``"stale"``: gradients travel as sums do.
        warm_up: ``"local"``: pass 0 sums over the edges of the part only. ``"exact"``: it exchanges all sums at once.

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
        """The clause that names the exactness given up by delays; empty with ``delay=0``."""
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
        r"""Return the sum over this part's edges plus the arrived sums of other parts, which get no gradient here.

        Every rank makes the call.

        Args:
            z: The sum over the edges of this part, for each row.
            share: Share of each node's in-edges that are in this part. If no sum has arrived for a row, the row's local
                sum is divided by this share, so that the edges here stand for all.
            of: The leaves that contribute.
            to: The leaves that get totals.
            label: Names the hop in errors.

        Shapes:
            ``z`` and the result are :math:`(m, *)`, ``share`` is :math:`(m)`.
        """
        name, label = f"{self._call}.{self._hop}.{self._number}", f"{label}, sum {self._number}"
        # ranks whose passes are not of one number, or view, must not meet
        label = f"{label}, training pass {self.epoch}, view {self._call}"
        self._number += 1
        forward, stale = self._sum(f"{name}.forward", of, to), self._options.gradients == "stale"
        backward = self._sum(f"{name}.backward", to, of) if stale or self.at_once else None
        share = share.to(z.dtype).view(-1, *[1] * (z.dim() - 1))
        now = Pass(self.epoch, self.at_once, f"{label}, delayed")
        return with_delay(z, share, self._unread(to), forward, backward, now)

    def _unread(self, to: Leaves) -> Tensor:
        """Return the leaves whose rows nobody reads."""
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
