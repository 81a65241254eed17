"""A model by itself on a small graph of the rank's own: which hops it makes, how wide they are, what they cost.

Nothing is exchanged: while a :class:`Rehearsal` runs, the backend hands over to it what layers ask for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.arguments import each_tensor, first_rows, mapped, node_dim, tensors_of
from pygdist.backends.layers import neighbour_arguments
from pygdist.backends.probe import Clock, small_part, total
from pygdist.backends.replicas import leading
from pygdist.comm import Communicator
from pygdist.graph import Adjacency
from pygdist.kernels import CSR

__all__ = ["Call", "Kind", "Looked", "Rehearsal", "Rehearse", "look_at", "time_hops"]

_TRIED = 2  # rows of the graph on which hops are counted
_LEFT = 89  # rows that a model is left with where each hop leaves one fewer
_FIRST_ROWS, _FIRST_EDGES = 1_000, 20_000  # of the graph that a model is timed on at first
# Then of one with as many rows as a pass of that length allows: tensors that fit into the caches nearest to a core cost
# less than most do.
_PASS_S, _FOR_ROWS = 0.1, 0.6  # of a pass, and the share of it that is for rows
_MOST_ROWS, _MOST_EDGES = 30_000, 1_000_000
_WARM_UP, _ROUNDS = 1, 3  # times that the model is run there before it is timed, and while

Kind: TypeAlias = Literal["node", "edge"] | None
"""Of what an argument holds a row."""


@dataclass(frozen=True)
class Call:
    """A call of a model, and of what each of its arguments holds a row, in the order of :func:`~.arguments.mapped`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kinds: list[Kind]

    def changed(self, change: Callable[[Any, Kind], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, each changed by its value and its kind."""
        kind = iter(self.kinds)
        return mapped(self.model.forward, self.args, self.kwargs, lambda _, value: change(value, next(kind)))


@dataclass(frozen=True)
class Looked:
    """What is known of a model that is called with certain arguments.

    Attributes:
        widths: How many values of a source each hop of a forward pass reads.
        shrinks: Whether its layers may put out fewer rows than go in.
        hops_of: Hops of each layer, by its id.
    """

    widths: tuple[int, ...]
    shrinks: bool
    hops_of: dict[int, int]


class Rehearsal:
    """One model, run as often as its maker likes.

    Args:
        num_rows: Of the graph.
        clock: Times the hops.
        edges: Those of a graph with nothing but self-loops, where each hop shall leave one row fewer.
    """

    def __init__(self, num_rows: int, clock: Clock | None = None, edges: Adjacency | None = None) -> None:
        self.num_rows, self.clock, self.edges = num_rows, clock, edges
        self.widths: list[int] = []
        self.hops_of: dict[int, int] = {}
        self._hop = 0
        self._inside = False  # a layer

    def begin_pass(self) -> None:
        """Called before a forward pass that is not the first."""
        self._hop = 0

    def begin_hop(self) -> None:
        """Called before each hop, also where what was kept of an earlier one stands for it."""
        self._hop += 1
        if self.clock is not None:
            self.clock.begin(self._hop)

    def propagate(
        self, layer: MessagePassing, inner: Callable[..., Tensor], edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """A hop, noted and timed."""
        read = [kwargs.get(name) for name in neighbour_arguments(layer, edges=False)]
        rows = [value[0] if isinstance(value, (tuple, list)) else value for value in read]
        values = sum(one.numel() // one.size(node_dim(layer, one)) for one in rows if isinstance(one, Tensor))
        self.widths.append(values)
        return self._timed(self._hop, partial(inner, edge_index, size=size), kwargs)

    def edge_updater(
        self, layer: MessagePassing, inner: Callable[..., Tensor], edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """What a layer does before a hop with its edges, timed as part of it."""
        return self._timed(self._hop + 1, partial(inner, edge_index, size=size), kwargs)

    def _timed(self, hop: int, run: Callable[..., Tensor], kwargs: dict[str, Any]) -> Tensor:
        return run(**kwargs) if self.clock is None else self.clock.timed(hop, run, kwargs)

    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A layer; if there shall be fewer rows after it, on those that are left."""
        before, num_rows = self._hop, self.num_rows
        shrinks = self.edges is not None and not self._inside
        if shrinks:
            args, kwargs = self._left(layer, forward, args, kwargs)
        was, self._inside = self._inside, True
        try:
            out = forward(layer, *args, **kwargs)
        finally:
            self._inside = was
        self.hops_of[id(layer)] = self._hop - before
        if not shrinks:
            return out
        assert self.edges is not None
        self.num_rows = self.edges.num_dst - self._hop
        return each_tensor(out, lambda one: first_rows(one, (num_rows,), self.num_rows, node_dim(layer, one)))

    def _left(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a layer, with the rows and edges that are left; an error if it is given others."""
        edges, known = self.edges, []
        assert edges is not None
        all_rows = edges.num_dst

        def left(name: str, value: Any) -> Any:
            if value is edges:
                known.append(value)
                return leading(edges, self.num_rows, self.num_rows, self.num_rows)
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            dim = 0 if name.startswith("edge_") else node_dim(layer, value)
            if self.num_rows < value.size(dim) < all_rows:
                raise ValueError("rows of an earlier layer")
            return first_rows(value, (all_rows,), self.num_rows, dim)

        found = mapped(partial(forward, layer), args, kwargs, left)
        if not known:
            raise ValueError("edges of the model's own making")
        return found


Rehearse: TypeAlias = Callable[[Rehearsal, bool], AbstractContextManager[None]]
"""Hands a model's layers over to a rehearsal, in training mode or not; afterwards all is as it was."""


def look_at(call: Call, rehearse: Rehearse) -> Looked:
    """The hops of a forward pass: on a few nodes, each with a self-loop.

    In a chain of layers each may put out fewer rows than the one before. Whether a model is one is tried: where rows of
    several depths meet, in a sum or a concatenation, their numbers do not fit.
    """
    counted = [Rehearsal(_TRIED) for _ in range(2)]
    for rehearsal, training in zip(counted, (False, True), strict=True):  # some layers are there for training alone
        _run_on_loops(call, rehearse, rehearsal, _loops(call, _TRIED), training=training)
    longer = max(counted, key=lambda one: len(one.widths))
    chain = bool(longer.widths) and all(_shrinks(call, rehearse, len(longer.widths), mode) for mode in (False, True))
    return Looked(tuple(longer.widths), chain, longer.hops_of)


def _shrinks(call: Call, rehearse: Rehearse, num_hops: int, training: bool) -> bool:
    num_rows = _LEFT + num_hops
    edges = _loops(call, num_rows)
    try:
        out = _run_on_loops(call, rehearse, Rehearsal(num_rows, edges=edges), edges, training=training)
    except Exception:  # whatever a model says where numbers of rows do not fit
        return False
    # nothing of an earlier layer is put out
    return not any(one.dim() and _LEFT < one.size(0) < num_rows for one in tensors_of(out))


def _loops(call: Call, num_rows: int) -> Adjacency:
    given = [*call.args, *call.kwargs.values(), *call.model.parameters()]
    device = next((one.device for one in given if isinstance(one, Tensor)), None)
    indptr = torch.arange(num_rows + 1, device=device)
    return Adjacency.from_csr(CSR(indptr, indptr[:-1].to(torch.int32), num_rows))


def _run_on_loops(call: Call, rehearse: Rehearse, rehearsal: Rehearsal, edges: Adjacency, *, training: bool) -> Any:
    """The model's output on a graph of self-loops, with ones in place of numbers that are given, and first ids."""

    def given(value: Any, kind: Kind) -> Any:
        if isinstance(value, Adjacency):
            return edges
        if kind is None:
            return _within(value, rehearsal.num_rows)
        return value.new_full((rehearsal.num_rows, *value.shape[1:]), 1 if value.is_floating_point() else 0)

    # as in training, where a layer's weight may come before or after its sum for other reasons
    with torch.inference_mode(False), torch.enable_grad():
        args, kwargs = call.changed(given)
        with rehearse(rehearsal, training):
            return call.model.forward(*args, **kwargs)


def _within(value: Any, num_rows: int) -> Any:
    """A tensor of ids, say of nodes whose rows are wanted, as ids in a graph of so many; anything else as it is."""
    ids = isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )
    return value % max(num_rows, 1) if ids else value


def time_hops(
    call: Call,
    rehearse: Rehearse,
    begin_pass: Callable[[], None],
    adjacency: Adjacency,
    communicator: Communicator,
    num_hops: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a row between hops and of an edge in each hop: on some of this rank's rows and edges.

    The model trains there, forward and backward, a few times; the first times it makes what it keeps. Every rank makes
    the call at the same time and gets the same.

    Args:
        call: The model, and what it is given.
        rehearse: Runs it by itself.
        begin_pass: Called before each pass.
        adjacency: The rank's edges.
        communicator: The ranks.
        num_hops: Of the model.
    """
    parameters: list[Tensor] = [one for one in call.model.parameters() if one.requires_grad]

    def timed(num_rows: int, num_edges: int, warm_up: int, rounds: int) -> tuple[Tensor, Tensor, float]:
        """Seconds of a row, and of an edge, by hop; those of an edge in the first pass, which makes what is kept."""
        part = small_part(adjacency, num_rows, num_edges)
        clock = Clock(part.device)
        rehearsal = Rehearsal(part.num_dst, clock)

        def cut(value: Any, kind: Kind) -> Any:
            if isinstance(value, Adjacency):
                return part if value.value is None else part.with_value(value.value[: part.size(1)])
            if kind is None:
                value = _within(value, part.num_dst)
            else:
                value = value[: part.num_dst if kind == "node" else part.size(1)]
            # what was made in inference mode cannot be trained on
            return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

        args, kwargs = call.changed(cut)

        def step() -> Tensor:
            rehearsal.begin_pass()
            begin_pass()
            return total(call.model.forward(*args, **kwargs))

        own = torch.zeros(2 * num_hops + 1, dtype=torch.float64)
        runs = part.num_dst > 0 and part.size(1) > 0
        first = 0.0
        slowest: list[float] = []  # of a round
        usual: list[float] = []
        communicator.gather([])  # all begin at once: who computes alone on a shared machine is faster
        with rehearse(rehearsal, True):
            for number in range(warm_up + rounds):
                between, inside = clock.seconds(step, parameters, num_hops) if runs else ([], [])
                taken = communicator.gather([sum(between) + sum(inside)])
                if number == 0 and runs:
                    first = sum(inside) / part.size(1)
                if number >= warm_up and runs:
                    own += torch.tensor([*between, *inside], dtype=torch.float64)
                if number >= warm_up and bool(taken.any()):
                    slowest.append(float(taken.max()))
                    usual.append(float(taken[taken > 0].mean()))
        counts = [rounds * part.num_dst, rounds * part.size(1)] if runs else [0, 0]
        found = communicator.gather([*map(float, counts), *own.tolist()]).sum(0)
        # an epoch is as long as the slowest rank's; its median, as others may use the machine too
        seconds = found[2:] * (statistics.median(slowest) / statistics.fmean(usual) if usual else 1.0)
        row, edge = (
            seconds[: num_hops + 1] / max(float(found[0]), 1.0),
            seconds[num_hops + 1 :] / max(float(found[1]), 1.0),
        )
        return row, edge, float(communicator.gather([first]).max())

    with torch.inference_mode(False), torch.enable_grad():
        row, edge, first = timed(_FIRST_ROWS, _FIRST_EDGES, 1, 1)
        num_rows = int(_PASS_S * _FOR_ROWS / max(float(row.sum()), 1e-9))
        num_edges = int(_PASS_S * (1 - _FOR_ROWS) / max(float(edge.sum()), first, 1e-9))
        row, edge, _ = timed(min(num_rows, _MOST_ROWS), min(num_edges, _MOST_EDGES), _WARM_UP, _ROUNDS)
    return tuple(row.tolist()), tuple(edge.tolist())
