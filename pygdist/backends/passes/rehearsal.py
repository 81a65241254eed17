"""The rehearsal: a model runs on a few nodes, to learn which hops it makes and whether its layers are a chain.

Nothing is exchanged: while a :class:`Rehearsal` runs, the backend hands layers and hops to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.passes.clock import Clock
from pygdist.backends.passes.rows import Rows
from pygdist.graph import Adjacency
from pygdist.hops.arguments import copied, mapped, named_values, node_dim, tensors_of
from pygdist.hops.fused_attention import defers_scores
from pygdist.hops.hop import Deferred, Hop, check_rows
from pygdist.kernels import CSR

log = logging.getLogger(__name__)

_COUNTED_ON = 2  # rows
_LEFT = 89  # rows that a model is left with where each hop leaves one fewer

Kind: TypeAlias = Literal["node", "edge"] | None
"""An argument holds a row per node, a row per edge, or neither (``None``)."""


@dataclass(frozen=True)
class Call:
    """A call of a model, and the kinds of its arguments, in the order of :func:`~pygdist.hops.arguments.mapped`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kinds: list[Kind]

    @property
    def values(self) -> list[tuple[Any, Kind]]:
        """The value and kind of each argument."""
        values = named_values(self.model.forward, self.args, self.kwargs)
        return [(value, kind) for (_, value), kind in zip(values, self.kinds, strict=True)]

    def changed(self, change: Callable[[Any, Kind], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Apply ``change`` to the value and kind of each argument."""
        kind = iter(self.kinds)
        return mapped(self.model.forward, self.args, self.kwargs, lambda _, value: change(value, next(kind)))


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that is called with certain arguments.

    Attributes:
        widths: Values of a source that each hop of a forward pass reads.
        shrinks: True if its layers are a chain, and may put out fewer rows than go in.
        hops_of: Number of hops of each layer, by its id.
    """

    widths: tuple[int, ...]
    shrinks: bool
    hops_of: dict[int, int]


class Rehearsal:
    """The pass of a model on a few nodes; one object for as many passes as its maker likes.

    Args:
        num_rows: Nodes of the graph.
        clock: Times the hops.

    Attributes:
        widths: Values of a source that each hop read, in the last pass in which the hop ran.
        hops_of: Number of hops of each layer, by its id.
        exchanges: By hop: exchanges before that of its rows, in a pass.
        graded: Hops whose rows need a gradient, which travels back.
        num_hops: Hops of the longest pass.
    """

    alone = True

    def __init__(self, num_rows: int, clock: Clock | None = None) -> None:
        self.num_rows = self.num_sources = num_rows
        self.clock = clock
        self.widths: dict[int, int] = {}
        self.hops_of: dict[int, int] = {}
        self.exchanges: dict[int, int] = {}
        self.graded: set[int] = set()
        self.num_hops = 0
        self._hop = 0
        self._before: dict[int, int] = {}  # by the id of a layer: hops before it, where it ran last

    def begin_pass(self) -> None:
        """Begin a forward pass that is not the first."""
        self._hop = 0
        self.exchanges.clear()

    def begin_hop(self) -> None:
        """Count a hop, also one whose kept result is used."""
        self._hop += 1
        self.num_hops = max(self.num_hops, self._hop)
        if self.clock is not None:
            self.clock.begin(self._hop)

    def propagate(self, hop: Hop) -> Tensor:
        """Note what a hop reads, run it and time it."""
        for name, rows in hop.sources.items():
            check_rows(hop, name, rows, self.num_rows, f"the model was given {self.num_rows} nodes to try it")
        if any(rows.requires_grad for rows in hop.sources.values()):
            self.graded.add(self._hop)
        self.widths[self._hop] = sum(
            rows.numel() // rows.size(node_dim(hop.layer, rows)) for rows in hop.sources.values()
        )
        return self._timed(self._hop, hop)

    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        """Run an ``edge_updater``, timed as part of the hop after it."""
        self.exchanges[self._hop + 1] = self.exchanges.get(self._hop + 1, 0) + (not defers_scores(hop))
        return self._timed(self._hop + 1, hop)

    def _timed(self, number: int, hop: Hop) -> Tensor:
        if self.clock is None:
            return hop.run()
        return self.clock.timed(number, lambda **arguments: replace(hop, arguments=arguments).run(), hop.arguments)

    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer and count its hops, also if it runs again in the backward pass."""
        if torch._C._current_graph_task_id() != -1:
            self._hop = self._before[id(layer)]
        before = self._before[id(layer)] = self._hop
        out = forward(layer, *args, **kwargs)
        # a layer may keep what its hops made, and make none from then on (cached=True)
        hops = self.hops_of[id(layer)] = max(self._hop - before, self.hops_of.get(id(layer), 0))
        self._hop = before + hops
        return out

    def source_rows(self, x: Tensor) -> Tensor:
        """The rows themselves: all nodes are here."""
        return x

    def owned_rows(self, x: Tensor) -> Tensor:
        """All rows."""
        return x


Rehearse: TypeAlias = Callable[[Rehearsal, bool], AbstractContextManager[None]]
"""Called with a rehearsal and whether the model trains: the model's layers and hops go to the rehearsal meanwhile.

Afterwards the model is as before."""

Attempt: TypeAlias = Callable[[ModelFacts, Rows, bool], AbstractContextManager[None]]
"""Called with facts, rows and whether the model trains: the model runs on these rows meanwhile, without exchanges."""


def look_at(call: Call, rehearse: Rehearse, attempt: Attempt, begin_pass: Callable[[], None]) -> ModelFacts:
    """Run a model on a few nodes with self-loops, to learn its hops and whether its layers are a chain.

    The model makes two passes. Only in the second pass do layers know whether their input rows stay the same; this
    decides on which side of their weights layers aggregate.

    In a chain, each layer may return fewer rows than the previous layer. A model counts as a chain if it runs in this
    way: if rows of several depths meet, in a sum or a concatenation, their numbers do not fit, and the run fails.

    Args:
        call: The model and its arguments.
        rehearse: Runs it on a rehearsal's nodes.
        attempt: Runs it on chosen rows.
        begin_pass: Called before each pass.
    """
    rehearsals = [Rehearsal(_COUNTED_ON) for _ in range(2)]
    for rehearsal, training in zip(rehearsals, (True, False), strict=True):  # some layers run in training only
        with rehearse(rehearsal, training):
            model = _on_loops(call, _loops(call, _COUNTED_ON), _COUNTED_ON)
            for _ in range(2):
                begin_pass()
                rehearsal.begin_pass()
                model()
    longer = max(rehearsals, key=lambda one: one.num_hops)
    # a hop that never ran reads nothing: an earlier one over the same rows stands for it
    widths = tuple(longer.widths.get(hop, 0) for hop in range(1, longer.num_hops + 1))
    chain = ModelFacts(widths, shrinks=True, hops_of=longer.hops_of)
    if widths and all(_fits(call, attempt, chain, training) for training in (False, True)):
        return chain
    return replace(chain, shrinks=False)


def can_be_timed(call: Call, rehearse: Rehearse) -> bool:
    """Tell whether a model's backward pass can run by itself: reentrant activation checkpointing forbids it."""
    with rehearse(Rehearsal(_COUNTED_ON), True):
        out = _on_loops(call, _loops(call, _COUNTED_ON), _COUNTED_ON)()
        sums = [one.sum() for one in tensors_of(out) if one.requires_grad]
        parameters = [one for one in call.model.parameters() if one.requires_grad]
        try:
            if sums and parameters:
                torch.autograd.grad(sums, parameters, allow_unused=True)
        except RuntimeError as error:
            if "torch.utils.checkpoint" not in str(error):
                raise
            return False
    return True


def _fits(call: Call, attempt: Attempt, chain: ModelFacts, training: bool) -> bool:
    """True if the model runs where each hop leaves one row fewer, and puts out no rows of an earlier layer."""
    rows = _rows_of_loops(_loops(call, _LEFT + len(chain.widths)), len(chain.widths))
    try:
        with attempt(chain, rows, training):
            out = _on_loops(call, rows.adjacency, rows.num_owned)()
    except Exception as error:  # whatever a model says where numbers of rows do not fit
        log.debug("the model is no chain of layers, so each hop keeps all rows: %s: %s", type(error).__name__, error)
        return False
    return not any(one.dim() and _LEFT < one.size(0) < rows.num_rows for one in tensors_of(out))


def _loops(call: Call, num_rows: int) -> Adjacency:
    values = [*call.args, *call.kwargs.values(), *call.model.parameters()]
    device = next((one.device for one in values if isinstance(one, Tensor)), None)
    indptr = torch.arange(num_rows + 1, device=device)
    return Adjacency.from_csr(CSR(indptr, indptr[:-1].to(torch.int32), num_rows))


def _rows_of_loops(edges: Adjacency, num_hops: int) -> Rows:
    """Rows of which each hop leaves all but one; nothing is fetched."""
    computed = tuple(edges.num_dst - hop for hop in range(num_hops + 1))
    n_id = torch.arange(edges.num_dst, device=edges.device)
    return Rows.all_here(n_id, computed[-1], computed, edges, num_own_edges=computed[-1])


def _on_loops(call: Call, edges: Adjacency, num_ids: int) -> Callable[[], Any]:
    """Return a run of the model on a graph of self-loops: numbers become ones, ids become ids below ``num_ids``.

    Integers of nodes and edges, such as categories, stay in the range of their column.
    """

    def replaced(value: Any, kind: Kind) -> Any:
        if isinstance(value, Adjacency):
            return edges
        if kind is None:
            replacement = within(value, num_ids)
            # the model may write into what it gets
            return replacement.clone() if isinstance(replacement, Tensor) else replacement
        numbers = value.is_floating_point() or value.is_complex()
        one = value.new_ones(value.shape[1:]) if numbers else _common_integers(value)
        return one.repeat(edges.num_dst, *[1] * one.dim())

    given = call.changed(replaced)

    def run() -> Any:
        args, kwargs = copied(call.model.forward, *given)
        # as in training, where a layer's weight may come before or after its sum for other reasons
        with torch.enable_grad():
            return call.model.forward(*args, **kwargs)

    return run


def _common_integers(value: Tensor) -> Tensor:
    """Return a row of integers such as the rows of a tensor: 0, or what is next to 0 in each column."""
    zeros = value.new_zeros(value.shape[1:])
    if not len(value) or value.dtype == torch.bool:
        return zeros
    return torch.minimum(torch.maximum(zeros, value.amin(0)), value.amax(0))


def within(value: Any, num_rows: int) -> Any:
    """Map ids, for example of nodes whose rows the model picks, into ``range(num_rows)``; keep any other value."""
    ids = isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )
    return value % max(num_rows, 1) if ids else value
