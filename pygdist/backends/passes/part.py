"""The pass over a rank's part: each layer computes the rows that it or a later layer needs.

A layer gets the leading rows that it reads, and returns the rows that later layers need. In a chain of layers the
number of rows shrinks from layer to layer. If rows of several depths meet, copies of the first row replace missing
rows, so that all layers return the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import names_of
from pygdist.backends.fetching.adjacency import ArrivingAdjacency
from pygdist.backends.fetching.fetcher import Fetcher, HopRows
from pygdist.backends.passes.base import Forward
from pygdist.backends.passes.rehearsal import ModelFacts
from pygdist.backends.passes.rows import Rows, edges_into, in_order, leading
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.graph.identity import identity_of
from pygdist.graph.memo import Memo
from pygdist.hops.arguments import each_tensor, first_rows, mapped, node_dim, with_rows
from pygdist.hops.fused_attention import Unscored, defers_scores
from pygdist.hops.hop import Deferred, Hop
from pygdist.hops.layer import computes_fewer, layer_name

_LEADING = Slot[Memo[Adjacency]]("edges of later hops")


@dataclass(frozen=True)
class _Layer:
    """The layer that runs.

    Attributes:
        first: Its first hop, from 1.
        num_hops: Hops that it makes, or fewer.
        num_read: Rows that it reads.
        num_computed: Rows that it computes.
        num_sources: Rows that the edges of its hops start from.
        possible: Numbers of rows that its arguments may hold.
        num_edges: Edges that the model gives it.
        kept_edges: Those of them that it needs.
        takes_pairs: True if it gets a pair of source rows and destination rows.
        is_beyond: Its hops come after those that are planned, and fetch all that they read.
    """

    first: int
    num_hops: int
    num_read: int
    num_computed: int
    num_sources: int
    possible: tuple[int, ...]
    num_edges: int
    kept_edges: int
    takes_pairs: bool
    is_beyond: bool

    def is_of_edges(self, name: str, value: Tensor) -> bool:
        """True if an argument holds a row per edge."""
        by_size = self.num_edges not in (*self.possible, self.num_read)
        return value.size(0) == self.num_edges and (by_size or name.startswith("edge_"))


class PartPass:
    """A forward pass over the rows of a rank.

    Args:
        rows: The rows, hop by hop.
        facts: The model.
        communicator: The ranks.
        fetcher: Fetches rows for hops; ``None`` if no hop fetches any.
        alone: Nothing is exchanged: the model is tried on these rows.
        name: The backend's name, for messages.
        late: Makes a fetcher for hops that come after those that are planned; ``None`` if there may be none.

    Attributes:
        ended: The model's forward pass is over; layers that run from then on run again, in the backward pass.
    """

    def __init__(
        self,
        rows: Rows,
        facts: ModelFacts,
        communicator: Communicator,
        fetcher: Fetcher | None,
        *,
        alone: bool = False,
        name: str = "",
        late: Callable[[], Fetcher] | None = None,
    ) -> None:
        if fetcher is None and not alone and any(rows.exchanges):
            raise InputError(f"backend '{name}' leaves rows to be fetched, but was made without FetchOptions")
        self.rows, self.facts, self.alone = rows, facts, alone
        self._communicator, self._fetcher, self._name, self._late = communicator, fetcher, name, late
        self._hops = 0  # so far
        self._layer: _Layer | None = None
        self._edges: dict[int, Adjacency] = {}  # by their number: edges that hops ran on, with loops of the layer's own
        self._before: dict[int, set[int]] = {}  # by the id of a module: numbers of hops before it
        self.ended = False

    @property
    def num_rows(self) -> int:
        """Rows that a layer puts out now."""
        if self._layer is not None:
            return self._layer.num_computed
        return self._computed(self._hops) if self.facts.shrinks else self.rows.num_rows

    def _computed(self, hop: int) -> int:
        """Rows that exist after a hop; hops after the last one that is planned compute the rank's own."""
        return self.rows.computed[min(hop, self.rows.num_hops)]

    @property
    def num_sources(self) -> int:
        """Rows that the edges of the running hop may start from."""
        return self.rows.n_id.numel() if self._layer is None else self._layer.num_sources

    def begin_hop(self) -> None:
        """Count a hop."""
        self._hops += 1

    # -- a hop ---------------------------------------------------------------------------------------------------------

    def propagate(self, hop: Hop) -> Tensor:
        """Run a hop: fetch the source rows that are not computed here, by group where the hop allows."""
        running = self._layer
        if running is not None and not running.is_beyond and self._hops >= running.first + running.num_hops:
            raise self._too_many(hop.layer)  # rows of its later hops are those of layers before
        self._note_edges(hop)
        rows = self._rows_of_hop(self._hops)
        if self._fetcher is not None and rows.arrival is not None:
            exchange = self._fetcher.by_group(hop, rows)
            if exchange is not None:
                return hop.run(ArrivingAdjacency.over(hop.edge_index, exchange))
        return hop.run(rows=self._sources(hop, rows), size=(rows.num_sources, rows.num_rows))

    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        """Run an ``edge_updater``; scores wait where the rows of the hop after it arrive."""
        if hop.sources and self._hops >= self.rows.num_hops and not (self._layer and self._layer.is_beyond):
            raise InputError(
                f"{hop.layer_name} updates edges from rows of nodes after the model's last hop, for which backend "
                f"'{self._name}' has no rows; use backend {names_of(lambda abilities: abilities.reruns_layers)}"
            )
        self._note_edges(hop)
        rows = self._rows_of_hop(self._hops + 1)
        if rows.arrival is not None and defers_scores(hop):
            return Unscored()
        return hop.run(rows=self._sources(hop, rows), size=(rows.num_sources, rows.num_rows))

    def _note_edges(self, hop: Hop) -> None:
        if isinstance(hop.edge_index, Adjacency) and not self.ended:
            self._edges[hop.edge_index.size(1)] = hop.edge_index

    def _sources(self, hop: Hop, rows: HopRows) -> dict[str, Tensor]:
        if self._fetcher is not None:
            return self._fetcher.rows_of(hop, rows)
        dim = hop.layer.node_dim
        for name, x in hop.sources.items():
            rows.check(hop, name, x)
        return {name: rows.joined(x.movedim(dim, 0), None).movedim(0, dim) for name, x in hop.sources.items()}

    def _rows_of_hop(self, number: int) -> HopRows:
        rows, layer = self.rows, self._layer
        if number <= rows.num_hops:
            arrival = rows.fetched[number - 1] if rows.exchanges[number - 1] else None
        else:  # an edge_updater may follow the last hop
            arrival = rows.everything if layer is not None and layer.is_beyond else None
        return HopRows(
            num_owned=rows.num_owned,
            num_local=self.num_rows if layer is None else layer.num_read,
            num_rows=self.num_rows,
            num_sources=self.num_sources,
            arrival=arrival,
            number=number,
            reason=f"rank {self._communicator.rank} computes {self.num_rows} nodes here",
        )

    # -- a layer -------------------------------------------------------------------------------------------------------

    def run_layer(self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on the rows and edges that it needs.

        Raises:
            InputError: If the layer makes more hops than in the model's first pass, or gets edges of the model's own
                making for the first time; if it runs again, but ran in several places.
        """
        self.begin_module(layer)
        edges = next((value for value in (*args, *kwargs.values()) if isinstance(value, Adjacency)), None)
        if self._layer is not None or self._runs_without_edges(layer, edges) or edges is None:
            return forward(layer, *args, **kwargs)
        running = self._begin_layer(layer, edges, args)
        if running is None:
            return forward(layer, *args, **kwargs)
        hops = self.facts.hops_of.get(id(layer), 1)
        args, kwargs = mapped(forward, (layer, *args), kwargs, partial(self._trimmed, running, layer))
        self._layer = running
        try:
            out = forward(*args, **kwargs)
        finally:
            self._layer = None
        # a layer may keep what its hops made, and make none (cached=True)
        self._hops = max(self._hops, running.first - 1 + hops)
        made, left = (running.num_read, running.num_computed), self._computed(self._hops)
        if self.facts.shrinks:
            return each_tensor(out, lambda one: first_rows(one, made, left, node_dim(layer, one)))
        return each_tensor(out, lambda one: with_rows(layer, one, made, self.rows.num_rows))

    def begin_module(self, module: nn.Module) -> None:
        """Note how many hops were made before a layer or norm; if the module runs again, go back there.

        Raises:
            InputError: If the module runs again, but ran in several places.
        """
        if self._layer is not None:
            return
        before = self._before.setdefault(id(module), set())
        if not self.ended:
            before.add(self._hops)
        elif len(before) == 1:
            (self._hops,) = before
        elif not before:
            raise InputError(
                f"{layer_name(module)} runs again in the backward pass (activation checkpointing), but another pass of "
                f"the model came before it, so backend '{self._name}' no longer knows its rows; run the backward pass "
                "first"
            )
        else:
            raise InputError(
                f"{layer_name(module)} runs again in the backward pass (activation checkpointing), and {len(before)} "
                f"times in a forward pass, so backend '{self._name}' cannot tell which of its hops run; use backend "
                f"{names_of(lambda abilities: abilities.reruns_layers)}"
            )

    def _runs_without_edges(self, layer: MessagePassing, edges: Adjacency | None) -> bool:
        if edges is None and self.facts.shrinks:
            raise InputError(
                f"{layer_name(layer)} gets edges that the model made, which it did not when the model first ran, so "
                f"backend '{self._name}' computes too few rows for it; call undistribute(model) and distribute(model) "
                "when the model changes"
            )
        return edges is None

    def _begin_layer(self, layer: MessagePassing, edges: Adjacency, args: tuple[Any, ...]) -> _Layer | None:
        """Find the rows and edges that a layer needs; ``None`` if it makes no hop."""
        rows, first, hops = self.rows, self._hops + 1, self.facts.hops_of.get(id(layer), 1)
        if hops == 0:
            return None
        is_beyond = first > rows.num_hops > 0 and self._late is not None
        if is_beyond and self._fetcher is None and self._late is not None:
            self._fetcher = self._late()
        if first - 1 + hops > rows.num_hops and not is_beyond:
            raise self._too_many(layer)
        # a layer of several hops needs all its rows to the last one
        fewer = computes_fewer(layer) if hops == 1 and args and isinstance(args[0], Tensor) else None
        num_read = self._computed(first - 1)
        num_computed = num_read if fewer is None else self._computed(first)
        return _Layer(
            first=first,
            num_hops=hops,
            num_read=num_read,
            num_computed=num_computed,
            num_sources=rows.n_id.numel() if is_beyond else rows.num_sources[first - 1],
            possible=rows.computed[:first] if self.facts.shrinks else rows.computed[:1],
            num_edges=edges.size(1),  # may be more than the shard's: with self-loops
            kept_edges=self._edges_into(edges, first, num_computed).size(1),
            takes_pairs=fewer == "pairs" and num_computed < num_read,
            is_beyond=is_beyond,
        )

    def _too_many(self, layer: MessagePassing) -> InputError:
        return InputError(
            f"{layer_name(layer)} makes a hop whose rows are not here: backend '{self._name}' tried the model on a few "
            f"nodes before, and the model made {self.rows.num_hops} others. If the model has changed, call "
            "undistribute(model) and distribute(model). If a loop or condition decides by rows, use backend "
            f"{names_of(lambda abilities: abilities.exact and abilities.reruns_layers)}, and decide by what "
            "MeanAggregation() or SumAggregation(), as a module of the model, makes of the rows of all nodes",
            of_one_rank=self._late is None,
        )

    def _trimmed(self, running: _Layer, layer: MessagePassing, name: str, value: Any) -> Any:
        """The rows of an argument that the layer needs."""
        if isinstance(value, Adjacency):
            return self._edges_into(value, running.first, running.num_computed)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if running.is_of_edges(name, value):
            return value[: running.kept_edges]
        value = first_rows(value, running.possible, running.num_read, node_dim(layer, value))
        return (value, value[: running.num_computed]) if running.takes_pairs and name == "x" else value

    def _edges_into(self, adjacency: Adjacency, hop: int, num_rows: int) -> Adjacency:
        """The edges that a hop and those after it need, into the first ``num_rows`` rows.

        The same weights give the same object, by which results of hops are kept.
        """
        rows, origin, value = self.rows, adjacency.origin, adjacency.value
        hop = min(hop, rows.num_hops + 1)  # those after the planned ones are alike
        edges = origin.slot(_LEADING, Memo)
        num_sources = rows.num_sources[hop - 1] if hop <= rows.num_hops else rows.n_id.numel()
        cut = edges.get((hop, num_rows), (), lambda: leading(origin, num_rows, self._computed(hop), num_sources))
        if identity_of(value) == identity_of(origin.value):
            return cut
        return edges.get(
            (hop, num_rows, "weighted"),
            (value,),
            lambda: cut.with_value(None if value is None else value[: cut.size(1)]),
        )

    # -- rows ----------------------------------------------------------------------------------------------------------

    def source_rows(self, x: Tensor) -> Tensor:
        """Rows of all nodes that this rank knows, from those that it owns."""
        rows = self.rows
        owned, arrival = x[: rows.num_owned], rows.everything
        if self.alone:
            others = owned[:1].expand(rows.n_id.numel() - rows.num_owned, *owned.shape[1:])
        else:
            others = in_order(self._communicator.exchange_rows(owned, arrival.plan, label="node values"), arrival)
        return torch.cat([owned, others])[: self.num_sources]

    def owned_of(self, out: Tensor) -> Tensor:
        """Cut an output of the model to the rank's own nodes, or a tensor of a hop's edges to those into these nodes.

        Edges are sorted by destination, so those into own nodes, with their loops, come first.
        """
        rows = self.rows
        if out.dim() == 0 or out.size(0) in rows.computed:
            return first_rows(out, rows.computed, rows.num_owned) if out.dim() else out
        edges = {rows.adjacency.size(1): rows.adjacency, **self._edges}.get(out.size(0))
        return out if edges is None else out[: edges_into(edges, rows.num_owned)]

    def owned_rows(self, x: Tensor) -> Tensor:
        """The rows that the rank owns."""
        return x if self.alone else x[: self.rows.num_owned]
