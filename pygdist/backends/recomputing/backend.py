"""The backend over rows that are computed again: what ``cache`` and ``hybrid`` do once it is said which rows these are.

Exact, whatever is chosen: a replica's row is computed from the same numbers as its owner's, and the gradients of a
rank's own loss go through its replicas into the parameters, or back to the owners of rows that were fetched.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Inner
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.backend import FetchingBackend, WireDtype
from pygdist.backends.passes.rehearsal import Call, Kind, Looked, Rehearsal, look_at
from pygdist.backends.passes.rows import Rows, leading
from pygdist.backends.planning.hop_costs import Timed, time_hops
from pygdist.backends.recomputing.inputs import ModelInputs, in_order, kinds_of
from pygdist.backends.recomputing.rows import make_rows
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.neighbourhood import Neighbourhood, in_neighbourhood
from pygdist.hops.arguments import each_tensor, first_rows, mapped, node_dim, with_rows
from pygdist.hops.layer import computes_fewer, layer_name

__all__ = ["Probe", "RecomputingBackend"]


@dataclass(frozen=True)
class Probe:
    """The model that a choice is made for.

    Attributes:
        model: It.
        measure: Times it on some of this rank's rows and edges; the same on all ranks, which make the call at the same
            time.
        shrinks: Whether its layers put out fewer rows than go in; see :class:`~.rehearsal.Looked`.
    """

    model: nn.Module
    measure: Callable[[], Timed]
    shrinks: bool


@dataclass(frozen=True)
class _Known:
    """What is known of a model, by what it is called with."""

    model: weakref.ref[nn.Module]
    kinds: dict[tuple[object, ...], list[Kind]] = field(default_factory=dict)
    looked: dict[tuple[object, ...], Looked] = field(default_factory=dict)


class RecomputingBackend(FetchingBackend):
    """Computes replicas of other ranks' rows, and fetches the rest; :meth:`choose` says which: all by default."""

    def __init__(
        self,
        *,
        ring: bool = True,
        overlap: bool = True,
        wire_dtype: WireDtype | None = None,
        halo_gib: float | None = None,
    ) -> None:
        super().__init__(ring=ring, overlap=overlap, wire_dtype=wire_dtype, halo_gib=halo_gib)
        self._forget_graph()

    def _forget_graph(self) -> None:
        self._by_widths: dict[tuple[int, ...], Rows] = {}
        self._models: dict[int, _Known] = {}  # of each model, by its id
        self._model: Looked | None = None  # that is running
        self._rows: Rows | None = None  # of that model
        self._entered: int | None = None  # the hop with which the running layer begins
        self._computes = 0  # the rows that it computes
        self._at = 0  # the hop that runs, or whose edge_updater runs
        self._alone = False  # a model runs on a graph of this rank's own, to be looked at; nothing is exchanged
        self._rehearsal: Rehearsal | None = None  # what its hops are handed over to then, if anything
        self._inputs = ModelInputs()
        self._planning_s: float | None = None

    def choose(self, found: Neighbourhood, widths: tuple[int, ...], probe: Probe) -> list[Tensor]:
        """Which halo rows are computed here rather than fetched, hop by hop; see :func:`~.replicas.replicas_of`. All.

        Args:
            found: The nodes around, as many hops away as the model has hops.
            widths: How many values of a source each hop reads.
            probe: The model, and what measures its hops.
        """
        place = torch.arange(found.n_id.numel())
        own, halo = self.shard.num_owned, self.shard.num_halo
        return [(place >= own) & (place < own + halo)] * len(widths)

    def hops_around(self, num_hops: int) -> int:
        """How far a rank must see to choose for a model of so many hops; their in-edges are held meanwhile."""
        return num_hops

    def rows_of(self, widths: tuple[int, ...], probe: Probe) -> Rows:
        """The rows of this rank for a model; every rank makes the call.

        Args:
            widths: How many values of a source each of its hops reads.
            probe: The model, and what measures its hops.
        """
        start = time.perf_counter()
        found = in_neighbourhood(self.shard, self.communicator, self.hops_around(max(len(widths), 1)))
        chosen = self.choose(found, widths, probe)
        self._planning_s = time.perf_counter() - start
        return make_rows(self.shard, self.communicator, found, chosen)

    def given(self, call: Call, rows: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the model is called with on such rows; every rank makes the call."""
        return self._inputs.extended(call, rows, self.shard, self.communicator)

    @property
    @override
    def planning_s(self) -> float | None:
        return self._planning_s

    @override
    def unbind(self) -> None:
        super().unbind()
        self._forget_graph()

    @override
    def _pickled_state(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        RecomputingBackend._forget_graph(fresh)
        return {**super()._pickled_state(), **vars(fresh)}

    # -- the model --------------------------------------------------------------------------------------------------

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        known = self._models.get(id(model))
        if known is None or known.model() is not model:
            self._models = {key: one for key, one in self._models.items() if one.model() is not None}
            known = self._models[id(model)] = _Known(weakref.ref(model))
        key, kinds = kinds_of(model, args, kwargs, self.shard, self.communicator, known.kinds)
        call, rehearse = Call(model, args, kwargs, kinds), partial(self._rehearse, model)
        begin_pass = self.routing.first_hop.begin_forward
        with torch.inference_mode(False):  # training uses what evaluation may begin
            if key not in known.looked:
                known.looked[key] = look_at(call, rehearse, partial(self._attempt, model), begin_pass)
            looked = known.looked[key]
            if looked.widths not in self._by_widths:
                measure = partial(
                    time_hops, call, rehearse, begin_pass, self.shard.adjacency, self.communicator, looked.widths
                )
                self._by_widths[looked.widths] = self.rows_of(looked.widths, Probe(model, measure, looked.shrinks))
        self._model, self._rows = looked, self._by_widths[looked.widths]
        return self.given(call, self._rows)

    @override
    def forget_model(self, model: nn.Module) -> None:
        self._models.pop(id(model), None)

    @override
    def model_output(self, output: Any) -> Any:
        rows, self._rows, self._model = self._rows, None, None
        if rows is None:
            return output
        return each_tensor(output, lambda out: first_rows(out, rows.computed, rows.num_owned) if out.dim() else out)

    @override
    def begin_hop(self) -> None:
        if self._rehearsal is None:
            super().begin_hop()
        else:
            self._rehearsal.begin_hop()

    @override
    def _held(self) -> list[Tensor]:
        return [*super()._held(), *self._inputs.grown]

    @override
    def end_forward(self) -> None:
        super().end_forward()
        self._entered = None

    @contextlib.contextmanager
    def _rehearse(self, model: nn.Module, rehearsal: Rehearsal, training: bool) -> Iterator[None]:
        """Hand a model's hops over; see :data:`~.rehearsal.Rehearse`."""
        first_hop, shard = self.routing.first_hop, self.shard
        with self._by_itself(model, training):
            self._rehearsal, first_hop.rehearsed = rehearsal, True
            first_hop.stands_for = max(1.0, (shard.num_owned + shard.num_halo) / max(rehearsal.num_rows, 1))
            try:
                yield
            finally:
                self._rehearsal, first_hop.rehearsed, first_hop.stands_for = None, False, 1.0

    @contextlib.contextmanager
    def _attempt(self, model: nn.Module, looked: Looked, rows: Rows, training: bool) -> Iterator[None]:
        """Let a model run on other rows; see :data:`~.rehearsal.Attempt`."""
        with self._by_itself(model, training):
            self._model, self._rows, self._hop = looked, rows, 0
            try:
                yield
            finally:
                self._model = self._rows = self._entered = None
                self._hop = 0

    @contextlib.contextmanager
    def _by_itself(self, model: nn.Module, training: bool) -> Iterator[None]:
        """Nothing is exchanged, and nothing of what happens stays."""
        modes = {module: module.training for module in model.modules()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._alone = True
        try:
            device = self.shard.n_id.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                model.train(training)
                yield
        finally:
            self._alone = False
            self._forget()
            self.routing.forget()  # layers and norms may have kept something of that graph
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])
            for module, was in modes.items():
                module.training = was

    # -- a layer ----------------------------------------------------------------------------------------------------

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._rehearsal is not None:
            return self._rehearsal.run_layer(layer, forward, args, kwargs)
        edges = [value for value in (*args, *kwargs.values()) if isinstance(value, Adjacency)]
        if self._entered is not None:
            return forward(layer, *args, **kwargs)
        if self._rows is None or self._model is None:
            raise InputError(
                f"{layer_name(layer)} runs outside a forward pass of the model: backend '{self.name}' does not support "
                "activation checkpointing, nor layers called by themselves; 'comm' does"
            )
        if not edges:
            if self._model.shrinks:
                raise InputError(
                    f"{layer_name(layer)} is given edges of the model's own making, which it was not when the model "
                    f"was first run: backend '{self.name}' took it for a chain; distribute it again when it changes"
                )
            return forward(layer, *args, **kwargs)
        rows, model, hop = self._rows, self._model, self._hop + 1
        hops = model.hops_of.get(id(layer), 1)
        if hop - 1 + hops > rows.num_hops:
            raise InputError(
                f"{layer_name(layer)}: the model makes more hops than the {rows.num_hops} of its first pass, for which "
                f"backend '{self.name}' computed what is needed; distribute it again when it changes"
            )
        if hops == 0:  # it takes edges and does without them
            return forward(layer, *args, **kwargs)
        num_rows, num_edges = rows.computed[hop - 1], edges[0].size(1)
        # a layer of several hops needs all its rows to the last one
        one_hop = hops == 1
        fewer = computes_fewer(layer) if one_hop and args and isinstance(args[0], Tensor) else None
        num_computed = num_rows if fewer is None else rows.computed[hop]
        held = rows.computed[:hop] if model.shrinks else rows.computed[:1]
        # the layer's edges, which may be more than the shard's: with self-loops
        kept_edges = self._edges_into(edges[0], hop, num_computed).size(1)
        as_edges = num_edges not in (*held, num_rows)

        def trimmed(name: str, value: Any) -> Any:
            if isinstance(value, Adjacency):
                return self._edges_into(value, hop, num_computed)
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            if value.size(0) == num_edges and (as_edges or name.startswith("edge_")):
                return value[:kept_edges]
            value = first_rows(value, held, num_rows, node_dim(layer, value))
            pair = fewer == "pairs" and name == "x" and num_computed < num_rows
            return (value, value[:num_computed]) if pair else value

        args, kwargs = mapped(forward, (layer, *args), kwargs, trimmed)
        self._entered, self._computes = hop, num_computed
        try:
            out = forward(*args, **kwargs)
        finally:
            self._entered = None
        self._hop = max(self._hop, hop - 1 + hops)  # a layer may keep what its hops made, and make none (cached=True)
        made, left = (num_rows, num_computed), rows.computed[self._hop]
        if model.shrinks:
            return each_tensor(out, lambda one: first_rows(one, made, left, node_dim(layer, one)))
        return each_tensor(out, lambda one: with_rows(layer, one, made, rows.num_rows))

    def _edges_into(self, adjacency: Adjacency, hop: int, num_rows: int) -> Adjacency:
        """The edges that a hop and those after it need, into the first ``num_rows`` rows."""
        rows, derived = self._running, adjacency.origin.derived
        key, value = f"first {num_rows} rows of hop {hop}", adjacency.value
        known: tuple[tuple[object, ...], Adjacency] | None = derived.get(key)
        if known is not None and known[0] == identity_of(value):
            return known[1]
        # the same object for the same weights: what is kept of hops is kept by that
        if known is None:
            with torch.inference_mode(False):
                cut = leading(adjacency.origin, num_rows, rows.computed[hop], rows.num_sources[hop - 1])
            derived[key] = (identity_of(adjacency.origin.value), cut)
        else:
            cut = known[1]
        if identity_of(value) == identity_of(adjacency.origin.value):
            return cut.origin
        found = cut.with_value(None if value is None else value[: cut.size(1)])
        if fixable(value):
            derived[key] = (identity_of(value), found)
        return found

    @override
    def propagate(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._rehearsal is not None:
            return self._rehearsal.propagate(layer, inner, edge_index, size, kwargs)
        self._at = self._hop
        return super().propagate(layer, inner, edge_index, size, kwargs)

    @override
    def edge_updater(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._rehearsal is not None:
            fetches = not self._scores_wait(layer, edge_index, kwargs)
            return self._rehearsal.edge_updater(layer, inner, edge_index, size, kwargs, fetches=fetches)
        self._at = self._hop + 1
        return super().edge_updater(layer, inner, edge_index, size, kwargs)

    # -- rows -------------------------------------------------------------------------------------------------------

    @override
    def halo_rows(self, x: Tensor, *, label: str) -> Tensor:
        rows = self._running
        if not rows.exchanges[self._at - 1]:
            return x.new_empty((0, *x.shape[1:]))
        return self._exchanged(x[: rows.num_owned], rows.fetched[self._at - 1].plan, label)

    @override
    def arrival(self) -> Arrival | None:
        rows = self._running
        return rows.fetched[self._at - 1] if rows.exchanges[self._at - 1] else None

    @override
    def joined(self, x: Tensor, halo: Tensor) -> Tensor:
        rows, missing = self._running, self.num_sources - x.size(0)
        if missing:
            x = torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
        if not rows.exchanges[self._at - 1]:
            return x
        # also with no rows: every rank takes part in the exchange of the backward pass
        return x.index_copy(0, rows.fetched[self._at - 1].position, halo)

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        if self._rehearsal is not None:
            return x
        rows = self._running
        own, arrival = x[: rows.num_owned], rows.everything
        if self._alone:
            others = own[:1].expand(rows.n_id.numel() - rows.num_owned, *own.shape[1:])
        else:
            others = in_order(self.communicator.exchange_rows(own, arrival.plan, label="node values"), arrival)
        every = torch.cat([own, others])
        return every if self._entered is None else every[: self.num_sources]

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        return x if self._alone else x[: self.shard.num_owned]

    @override
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x if self._alone else super().sum_over_ranks(x)

    @override
    def max_over_ranks(self, value: int) -> int:
        return value if self._alone else super().max_over_ranks(value)

    @property
    @override
    def num_rows(self) -> int:
        if self._rehearsal is not None:
            return self._rehearsal.num_rows
        if self._rows is None:
            return self.shard.num_owned
        if self._entered is not None:
            return self._computes
        return self._rows.computed[self._hop] if self._bound(self._model).shrinks else self._rows.num_rows

    @property
    @override
    def num_local(self) -> int:
        return self.num_rows if self._entered is None else self._running.computed[self._entered - 1]

    @property
    @override
    def num_sources(self) -> int:
        rows = self._running
        return rows.n_id.numel() if self._entered is None else rows.num_sources[self._entered - 1]

    @property
    @override
    def _has(self) -> str:
        return f"computes {self.num_rows} nodes here"

    @property
    def _running(self) -> Rows:
        return self._bound(self._rows)
