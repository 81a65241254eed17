"""The backend over rows that are computed again: what ``cache`` and ``hybrid`` do once it is said which rows these are.

Exact, whatever is chosen: a replica's row is computed from the same numbers as its owner's, and the gradients of a
rank's own loss go through its replicas into the parameters, or back to the owners of rows that were fetched.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Inner
from pygdist.backends.chunks import Arrival
from pygdist.backends.fetched import FetchingBackend, WireDtype
from pygdist.backends.layers import computes_fewer, neighbour_arguments
from pygdist.backends.probe import Clock, small_part, total
from pygdist.backends.replicas import Rows, leading, make_rows
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.neighbourhood import Neighbourhood, in_neighbourhood

__all__ = ["Probe", "RecomputingBackend"]

_MOST_KEPT = 64  # inputs of models that stay the same, and edges of layers
_Kind: TypeAlias = Literal["node", "edge"] | None  # of what an argument holds a row
_TRIED = 2  # rows of the graph on which hops are counted
_WARM_UP, _ROUNDS = 2, 3  # times that a model is run before it is timed, and while
_PROBED_EDGES = 50_000  # of the graph that it is timed on at first
_PASS_S = 0.05  # then of one on which a pass takes about so long: rows that fit into caches cost less than most do
_MOST_PROBED_EDGES = 1_000_000


@dataclass(frozen=True)
class Probe:
    """The model that a choice is made for.

    Attributes:
        model: It.
        measure: Times it on some of this rank's rows and edges: seconds for a row between hops (one more than there are
            hops) and for an edge in each hop, the same on all ranks. All of them make the call at the same time.
    """

    model: nn.Module
    measure: Callable[[], tuple[tuple[float, ...], tuple[float, ...]]]


@dataclass
class _Alone:
    """A model that runs on a graph of the rank's own: how many rows it has, and what is noted of its hops."""

    num_rows: int
    clock: Clock | None = None
    widths: list[int] = field(default_factory=list)

    def run(self, hop: int, inner: Callable[..., Tensor], kwargs: dict[str, Any]) -> Tensor:
        """A hop, timed if there is a clock."""
        return inner(**kwargs) if self.clock is None else self.clock.timed(hop, inner, kwargs)


class RecomputingBackend(FetchingBackend):
    """Computes replicas of other ranks' rows, and fetches the rest; :meth:`choose` says which."""

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
        self._by_arguments: dict[tuple[object, ...], list[_Kind]] = {}  # what the arguments of a call are
        self._widths: dict[int, tuple[weakref.ref[nn.Module], tuple[int, ...]]] = {}  # of each model, by its id
        self._rows: Rows | None = None  # of the model that is running
        self._entered: int | None = None  # the hop with which the running layer begins
        self._computes = 0  # the rows that it computes
        self._at = 0  # the hop that runs, or whose edge_updater runs
        self._alone: _Alone | None = None  # while the model runs on a graph of this rank's own, to be looked at
        # inputs that stay the same: who was given, so that its memory stays its own, and what the model gets for it
        self._inputs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._adjacency: tuple[tuple[object, ...], Adjacency] | None = None
        self._leading: dict[tuple[int, int, int], tuple[Adjacency, Adjacency]] = {}
        self._hops_of: dict[int, tuple[weakref.ref[MessagePassing], int]] = {}  # of each layer, by its id

    @abstractmethod
    def choose(self, found: Neighbourhood, widths: tuple[int, ...], probe: Probe) -> list[Tensor]:
        """Which halo rows are computed here rather than fetched, hop by hop; see :func:`~.replicas.replicas_of`.

        Args:
            found: The nodes around, as many hops away as the model has hops.
            widths: How many values of a source each hop reads.
            probe: The model, and what measures its hops.
        """

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
        kinds = self._kinds(model, args, kwargs)
        known = self._widths.get(id(model))
        if known is None or known[0]() is not model:
            known = self._widths[id(model)] = (weakref.ref(model), self._count(model, args, kwargs, kinds))
        widths = known[1]
        if widths not in self._by_widths:
            found = in_neighbourhood(self.shard, self.communicator, max(len(widths), 1))
            measure = partial(self._probe, model, args, kwargs, kinds, len(widths))
            chosen = self.choose(found, widths, Probe(model, measure))
            self._by_widths[widths] = make_rows(self.shard, self.communicator, found, chosen)
        self._rows = self._by_widths[widths]
        kind = iter(kinds)
        return _mapped(model.forward, args, kwargs, lambda name, value: self._extended(name, value, next(kind)))

    def _kinds(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[_Kind]:
        """Which arguments of the model hold a row per node, and which a row per edge, in the order of :func:`_mapped`.

        Told by their length, and by all ranks together: class weights may be as long as one rank's nodes are many.
        """
        shard = self.shard
        expected = {"node": shard.num_owned, "edge": shard.adjacency.size(1)}
        looks: list[tuple[str, Literal["node", "edge"], int | None]] = []
        fits: list[bool] = []

        def look(name: str, value: Any) -> Any:
            kind: Literal["node", "edge"] = "edge" if name.startswith("edge_") else "node"
            rows = isinstance(value, Tensor) and not isinstance(value, Adjacency) and value.dim() > 0
            looks.append((name, kind, value.dim() if rows else None))
            fits.append(rows and value.size(0) == expected[kind])
            return value

        _mapped(model.forward, args, kwargs, look)
        key = tuple(looks)
        if key not in self._by_arguments:
            everywhere = self.communicator.gather([float(fit) for fit in fits]).amin(0).bool().tolist() if fits else []
            self._by_arguments[key] = [
                kind if fit else None for (_, kind, _), fit in zip(looks, everywhere, strict=True)
            ]
        for (name, kind, _), known, fit in zip(looks, self._by_arguments[key], fits, strict=True):
            if known is not None and not fit:
                raise InputError(
                    f"argument '{name or type(model).__name__}' of the model held a row for each {kind} of the rank "
                    f"before, {expected[kind]}; now it has another number on rank {shard.rank}",
                    of_one_rank=True,
                )
        return self._by_arguments[key]

    @override
    def model_output(self, output: Any) -> Any:
        rows, self._rows = self._rows, None
        return output if rows is None else _each(output, lambda out: _first(out, rows.num_rows, rows.num_owned))

    @override
    def begin_hop(self) -> None:
        super().begin_hop()
        if self._alone is not None and self._alone.clock is not None:
            self._alone.clock.begin(self._hop)

    @override
    def end_forward(self) -> None:
        super().end_forward()
        self._entered = None

    def _extended(self, name: str, value: Any, kind: _Kind) -> Any:
        """An input of the model with what this rank has more than a rank of ``comm``."""
        rows, shard = self._running, self.shard
        if isinstance(value, Adjacency) and value.csr() is shard.adjacency.csr():
            return rows.adjacency if value.value is None else self._weighted(value.value)
        return value if kind is None else self._grown(value, rows.edges if kind == "edge" else rows.inputs)

    def _weighted(self, weight: Tensor) -> Adjacency:
        """The edges with weights, the same object for the same weights: what is derived from it is kept by that."""
        grown = self._grown(weight, self._running.edges)
        key = identity_of(grown)
        if self._adjacency is None or self._adjacency[0] != key:
            self._adjacency = (key, self._running.adjacency.with_value(grown))
        return self._adjacency[1]

    def _grown(self, value: Tensor, arrival: Arrival) -> Tensor:
        """Own rows, then others'; fetched once if they stay the same."""
        kept = fixable(value) and not (value.requires_grad and torch.is_grad_enabled())
        key = (id(arrival), *identity_of(value))
        if kept and key in self._inputs:
            return self._inputs[key][1]
        with torch.inference_mode(False):
            arrived = self.communicator.exchange_rows(value, arrival.plan, label="replicas of the model's input")
            grown = torch.cat([value, _in_order(arrived, arrival)])
        if kept:
            if len(self._inputs) >= _MOST_KEPT:
                self._inputs.pop(next(iter(self._inputs)))
            self._inputs[key] = (value.detach(), grown)
        return grown

    def _count(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: list[_Kind]
    ) -> tuple[int, ...]:
        """The hops of a forward pass and their widths: on two nodes, in evaluation mode, with nothing exchanged."""
        kind = iter(kinds)

        def tried(name: str, value: Any) -> Any:
            rows = next(kind) is not None
            if isinstance(value, Adjacency):
                return torch.arange(_TRIED, device=value.device).repeat(2, 1)
            return value.new_ones((_TRIED, *value.shape[1:])) if rows else value

        args, kwargs = _mapped(model.forward, args, kwargs, tried)
        with torch.no_grad(), self._by_itself(model, _Alone(_TRIED), training=False) as alone:
            model.forward(*args, **kwargs)
        return tuple(alone.widths)

    def _probe(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: list[_Kind], num_hops: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of a row between hops and of an edge in each hop: on some of this rank's rows and edges.

        The model trains there, forward and backward, a few times; the first times it makes what it keeps.
        """
        parameters: list[Tensor] = [one for one in model.parameters() if one.requires_grad]
        part = small_part(self.shard.adjacency, _PROBED_EDGES)
        once = self._timed(model, args, kwargs, kinds, part, parameters, num_hops, (1, 1))
        pass_s = float(self.communicator.gather([sum(map(sum, once[0]))]).max())
        more = min(_PROBED_EDGES * _PASS_S / max(pass_s, 1e-6), _MOST_PROBED_EDGES)
        part = small_part(self.shard.adjacency, max(int(more), _PROBED_EDGES))
        rounds = self._timed(model, args, kwargs, kinds, part, parameters, num_hops, (_WARM_UP, _ROUNDS))
        num_rows, num_edges = part.num_dst, part.size(1)
        between, inside = (torch.tensor([one[part] for one in rounds]).median(0).values.tolist() for part in (0, 1))
        counts = self.communicator.gather([float(num_rows), float(num_edges), *between, *inside]).sum(0)
        rows, edges, seconds = float(counts[0]), float(counts[1]), counts[2:]
        return (
            tuple((seconds[: num_hops + 1] / max(rows, 1)).tolist()),
            tuple((seconds[num_hops + 1 :] / max(edges, 1)).tolist()),
        )

    def _timed(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kinds: list[_Kind],
        part: Adjacency,
        parameters: list[Tensor],
        num_hops: int,
        passes: tuple[int, int],
    ) -> list[tuple[list[float], ...]]:
        """Seconds between hops and in hops of passes over a part of the rank's rows and edges, after some more."""
        num_rows, num_edges, kind = part.num_dst, part.size(1), iter(kinds)
        if not (num_rows and num_edges):
            return [([0.0] * (num_hops + 1), [0.0] * num_hops)]

        def cut(name: str, value: Any) -> Any:
            of = next(kind)
            if isinstance(value, Adjacency):
                return part if value.value is None else part.with_value(value.value[:num_edges])
            value = value if of is None else value[: num_rows if of == "node" else num_edges]
            # what was made in inference mode cannot be trained on
            return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

        with torch.inference_mode(False), torch.enable_grad():
            args, kwargs = _mapped(model.forward, args, kwargs, cut)
            clock = Clock(self.shard.n_id.device)

            def step() -> Tensor:
                self._hop = 0
                self.routing.first_hop.begin_forward()
                return total(model.forward(*args, **kwargs))

            with self._by_itself(model, _Alone(num_rows, clock), training=True):
                return [clock.seconds(step, parameters, num_hops) for _ in range(sum(passes))][passes[0] :]

    @contextlib.contextmanager
    def _by_itself(self, model: nn.Module, alone: _Alone, *, training: bool) -> Iterator[_Alone]:
        """The model on a graph of this rank's own, with nothing exchanged; afterwards all is as it was."""
        modes = {module: module.training for module in model.modules()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._alone = alone
        try:
            device = self.shard.n_id.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                model.train(training)
                yield alone
        finally:
            self._alone = None
            self._hop = 0
            self._forget()
            self.routing.forget()  # layers and norms may have kept something of that graph
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            for module, was in modes.items():
                module.training = was

    # -- a layer ----------------------------------------------------------------------------------------------------

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._alone is not None:
            before = self._hop
            out = forward(layer, *args, **kwargs)
            self._hops_of[id(layer)] = (weakref.ref(layer), self._hop - before)
            return out
        edges = [value for value in (*args, *kwargs.values()) if isinstance(value, Adjacency)]
        if self._entered is not None or not edges:
            return forward(layer, *args, **kwargs)
        rows, hop = self._running, self._hop + 1
        num_rows, num_edges = rows.computed[hop - 1], edges[0].size(1)
        kept_edges = int(edges[0].csr().indptr[rows.computed[hop]])
        # a layer of several hops needs all its rows to the last one
        counted = self._hops_of.get(id(layer))
        one_hop = counted is not None and counted[0]() is layer and counted[1] == 1
        fewer = computes_fewer(layer) if one_hop and args and isinstance(args[0], Tensor) else None
        num_computed = num_rows if fewer is None else rows.computed[hop]

        def trimmed(name: str, value: Any) -> Any:
            if isinstance(value, Adjacency):
                return self._first_rows(value, hop, num_computed)
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            if name.startswith("edge_") and value.size(0) == num_edges:
                return value[:kept_edges]
            value = _first(value, rows.num_rows, num_rows, dim=_node_dim(layer, value))
            pair = fewer == "pairs" and name == "x" and num_computed < num_rows
            return (value, value[:num_computed]) if pair else value

        args, kwargs = _mapped(forward, (layer, *args), kwargs, trimmed)
        self._entered, self._computes = hop, num_computed
        try:
            with self._kept_on_the_host():
                out = forward(*args, **kwargs)
        finally:
            self._entered = None
        return _each(out, lambda one: _padded(layer, one, (num_rows, num_computed), rows.num_rows))

    def _first_rows(self, adjacency: Adjacency, hop: int, num_rows: int) -> Adjacency:
        """The edges that a hop and those after it need, into the first ``num_rows`` rows."""
        rows = self._running
        key = (id(adjacency), hop, num_rows)
        if key not in self._leading:
            with torch.inference_mode(False):
                made = leading(adjacency, num_rows, rows.computed[hop], rows.num_sources[hop - 1])
            if len(self._leading) >= _MOST_KEPT:
                self._leading.pop(next(iter(self._leading)))
            self._leading[key] = (adjacency, made)
        return self._leading[key][1]

    @override
    def propagate(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._alone is not None:
            read = [kwargs.get(name) for name in neighbour_arguments(layer, edges=False)]
            rows = [value[0] if isinstance(value, (tuple, list)) else value for value in read]
            self._alone.widths.append(sum(one.numel() // _TRIED for one in rows if isinstance(one, Tensor)))
            return self._alone.run(self._hop, partial(inner, edge_index, size=size), kwargs)
        self._at = self._hop
        return super().propagate(layer, inner, edge_index, size, kwargs)

    @override
    def edge_updater(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._alone is not None:
            return self._alone.run(self._hop + 1, partial(inner, edge_index, size=size), kwargs)
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
        if self._alone is not None:
            return x
        rows = self._running
        arrival = rows.everything
        arrived = self.communicator.exchange_rows(x[: rows.num_owned], arrival.plan, label="node values")
        every = torch.cat([x[: rows.num_owned], _in_order(arrived, arrival)])
        return every if self._entered is None else every[: self.num_sources]

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        return x if self._alone is not None else x[: self.shard.num_owned]

    @override
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return x if self._alone is not None else super().sum_over_ranks(x)

    @override
    def max_over_ranks(self, value: int) -> int:
        return value if self._alone is not None else super().max_over_ranks(value)

    @property
    @override
    def num_rows(self) -> int:
        if self._alone is not None:
            return self._alone.num_rows
        if self._rows is None:
            return self.shard.num_owned
        return self._rows.num_rows if self._entered is None else self._computes

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


def _in_order(arrived: Tensor, arrival: Arrival) -> Tensor:
    """Rows in the order of this rank, from that in which their owners send them."""
    return arrived.index_select(0, torch.argsort(arrival.position))


def _mapped(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, each changed by its name and value; those in tuples one by one."""
    names = [name for name, one in inspect.signature(forward).parameters.items() if one.kind not in (2, 4)]
    names += [""] * (len(args) - len(names))

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(changed(name, one) for one in value)
        return change(name, value)

    made = tuple(changed(name, value) for name, value in zip(names, args, strict=False))
    return made, {name: changed(name, value) for name, value in kwargs.items()}


def _each(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every tensor of an output changed."""
    if isinstance(out, (tuple, list)):
        return type(out)(_each(one, change) for one in out)
    return change(out) if isinstance(out, Tensor) and not isinstance(out, Adjacency) else out


def _first(value: Tensor, num_rows: int, wanted: int, dim: int = 0) -> Tensor:
    """The first rows of a tensor with a row per node; any other as it is."""
    return value.narrow(dim, 0, wanted) if num_rows != wanted and value.size(dim) == num_rows else value


def _padded(layer: MessagePassing, out: Tensor, computed: tuple[int, int], num_rows: int) -> Tensor:
    """The rows that a layer computed, and zeros for the others."""
    dim = _node_dim(layer, out)
    if out.size(dim) not in computed or out.size(dim) == num_rows:
        return out
    shape = list(out.shape)
    shape[dim] = num_rows - out.size(dim)
    return torch.cat([out, out.new_zeros(shape)], dim=dim)


def _node_dim(layer: MessagePassing, value: Tensor) -> int:
    """Where a layer has its nodes; 0 in tensors without that dimension."""
    return layer.node_dim if value.dim() >= max(2, abs(layer.node_dim)) else 0
