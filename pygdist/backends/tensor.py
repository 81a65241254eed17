"""``tensor``: every rank aggregates a slice of the columns over the whole topology (NeutronTP, Sec. 3).

Exact. Before each aggregation an exchange turns all columns of a rank's rows into some columns of all rows; after the
aggregation an exchange turns them back. On any graph, all ranks aggregate over the same edges and send the same number
of bytes. Multiplication by weights and attention scores need whole rows, so each rank computes these for its own rows.

A layer runs in the first of these ways that fits (:meth:`TensorBackend.run_layer`):

====================================================  ==================================  =============================
layer                                                 what runs                           what travels
====================================================  ==================================  =============================
any, on one rank without a limit of memory            the layer as it is                  nothing
decoupled GAT (``AttentionPropagation``)              all its hops, on slices             rows once there and back, and
                                                                                          scores of nodes or weights of
                                                                                          edges
one that mixes columns beside its hops                its ``forward``, hop by hop         see below
decoupled sums (``Propagation``)                      all its hops, on slices             rows once there and back
any, with a limit of memory (``memory_gib``)          its ``forward``, hop by hop         see below
one that acts on each column by itself                its ``forward``, on slices          rows once there and back, and
                                                                                          tensors of edges
====================================================  ==================================  =============================

A hop runs in the first of these ways that fits (:meth:`TensorBackend.propagate`):

====================================================  ==================================  =============================
hop                                                   what runs                           what travels
====================================================  ==================================  =============================
of a layer that runs on slices                        the hop, on slices                  nothing more
on one rank without a limit of memory                 the hop                             nothing
of ``TransformerConv``                                weights of own edges from whole     keys to fetch them; values
                                                      rows, then their sum on slices      and weights there, sums back
of ``GATConv``, weights unseen, scores are fewer      weights of all edges from scores,   rows and scores of nodes
                                                      and their sum, on slices            there, sums back
one sparse product                                    the product, on slices              rows and weights that change
                                                                                          there, sums back
any other                                             messages of all edges, on slices    its arguments there, the
                                                                                          result back
====================================================  ==================================  =============================
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, MessagePassing
from typing_extensions import override

from pygdist.backends.base import Abilities, Backend
from pygdist.backends.fetching.fetcher import Fetcher, FetchOptions, HopRows
from pygdist.backends.slicing.adjacency import SlicedAdjacency, SlicedEdges, sum_of_slices
from pygdist.backends.slicing.all_nodes import AllNodes
from pygdist.backends.slicing.any_hop import SlicedRun, gather_result
from pygdist.backends.slicing.attention import (
    attention_in_chunks,
    propagate_attention,
    scores_are_fewer,
    split_with_scores,
    split_with_weights,
    sum_of_values,
    weights_of_scores,
)
from pygdist.backends.slicing.budget import ModelSizes, overflow_of
from pygdist.backends.slicing.columns import TRIED_WITH, Columns, acts_on_columns, advice, columns_of_hops
from pygdist.backends.slicing.edge_tensors import EdgeReader, EdgeTensors
from pygdist.comm.slices import with_phantom_column
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.fused_attention import TransformerParts, Unweighted, transformer_parts
from pygdist.hops.hop import Deferred, Hop, target_of
from pygdist.hops.layer import hooked, layer_name, norms_refused
from pygdist.memory.overflow import beyond_memory
from pygdist.nn.decoupled import AttentionPropagation, Propagation


class TensorBackend(Backend):
    """Slice the columns of all nodes (tensor parallelism; NeutronTP, PVLDB 2024, Sec. 3 and 4.1.1).

    Layers whose message or aggregation mixes columns are refused when the model is distributed.

    Args:
        num_chunks: Number of chunks of destinations in which sums and means with constant weights are computed (Sec.
            4.2.1), by default 4 if slices are large, otherwise 1. Other hops take one chunk. Any hop takes more chunks
            if ``memory_gib`` requires more.
        overlap: Let the rows of one chunk and the results of another chunk travel while a third chunk is computed (Sec.
            4.2.2). Otherwise all rows arrive before the first chunk is computed, and the results of each chunk leave
            before the next one.
        memory_gib: Most memory, in GiB, that edges, slices and exchange buffers may take on the device, on each rank.
            The device holds one chunk at a time; the others wait in the host's memory or, if the device is the host, in
            files beside the partitioned graph. By default there is no limit on the host. On a GPU the default is half
            of the free memory divided by the ranks that use the GPU, and matters only if edges and slices of the widest
            rows need more. The limit holds for all hops. Attention, maxima, minima and layers with their own messages
            compute each chunk once more in the backward pass; the memory of such messages is an estimate. With a limit,
            layers with hooks on their hops are refused; without a limit, hooks see only this rank's columns. If several
            chunks are needed, layers whose messages depend on the edges into other nodes are refused, too. The limit
            does not count a rank's part of the graph, the attention weights of the rank's own edges and, with
            ``GATv2Conv`` and ``TransformerConv``, the source rows of these edges.
        device: Device that computes hops, for example ``cuda`` while the model runs on the host; by default the model's
            device. Unless ``memory_gib`` sets a limit, hops take at most half of the free memory of a GPU divided by
            the ranks that use the GPU. Layers that compute their own messages are refused, as their parameters are on
            the model's device; so is ``cpu`` with a model on a GPU.

    Raises:
        InputError: If ``num_chunks`` or ``memory_gib`` is out of range. When the first layer runs, if ``device`` is no
            device, or is the host while the model is on a GPU.
    """

    name = "tensor"
    abilities = Abilities(mixes_columns=False)
    per_graph: ClassVar[tuple[str, ...]] = ("_all", "_shared", "_fetcher", "_slices", "_splits", "_warned")
    _all: AllNodes | None = None
    _shared: EdgeTensors | None = None
    _fetcher: Fetcher | None = None
    _slices: int | None = None  # while a layer runs on slices: rows of all ranks
    _splits: dict[int, tuple[Tensor, int, Tensor]] | None = None  # slices that hops of the running layer share
    _warned: set[str] | None = None  # names of layers

    def __init__(
        self,
        num_chunks: int | None = None,
        *,
        overlap: bool = True,
        memory_gib: float | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if num_chunks is not None and not 1 <= num_chunks < 1 << 31:
            raise InputError(f"num_chunks is {num_chunks}, expected 1 to {(1 << 31) - 1}")
        if memory_gib is not None and not 0 < memory_gib < math.inf:
            raise InputError(f"memory_gib is {memory_gib}, expected a positive number")
        self.num_chunks, self.overlap, self.memory_gib, self.device = num_chunks, overlap, memory_gib, device
        self._sizes = ModelSizes()
        self._hop = 0  # hops of the forward pass so far

    @override
    def forget_model(self, model: nn.Module) -> None:
        super().forget_model(model)
        self._sizes = ModelSizes.of(model)
        self._shared = None
        if self._all is not None:
            self._all.forget()

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        if transformer_parts(layer) is None:
            try:
                columns_of_hops(layer)
            except InputError as error:
                return str(error)
        return norms_refused(layer)

    @override
    def begin_forward(self) -> None:
        self._hop = 0
        self.fetcher.begin_pass()

    @override
    def begin_hop(self) -> None:
        self._hop += 1

    @override
    def end_forward(self) -> None:
        if self._fetcher is not None:
            self._fetcher.end_pass()

    # -- a layer -------------------------------------------------------------------------------------------------------

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._all_here is not None:
            return forward(layer, *args, **kwargs)
        arguments = inspect.signature(forward).bind(layer, *args, **kwargs).arguments
        plain = not (isinstance(layer, AttentionPropagation) and (hooked(layer) or hooked(layer.propagation)))
        if isinstance(layer, AttentionPropagation) and plain and isinstance(arguments["edge_index"], Adjacency):
            return self._decoupled_attention(layer, arguments)
        if self._acts_on_columns(layer, arguments):
            if isinstance(layer, Propagation) and not hooked(layer):
                out = self._decoupled_sums(layer, arguments)
                if out is not None:
                    return out
            if self._nodes.layout.overflow is None:
                return self._on_slices(layer, forward, arguments)
        outer, self._splits = self._splits, {}
        try:
            return forward(layer, *args, **kwargs)
        finally:
            self._splits = outer

    def _decoupled_attention(self, layer: AttentionPropagation, arguments: Mapping[str, Any]) -> Tensor:
        """All hops of decoupled GAT, on slices."""
        self._warn_of_one_chunk(layer)
        passed = {name: value for name, value in arguments.items() if name != "self"}
        return propagate_attention(layer, self._nodes, label=layer_name(layer), **passed)

    def _decoupled_sums(self, layer: Propagation, arguments: Mapping[str, Any]) -> Tensor | None:
        """All hops of decoupled sums, on slices; ``None`` if the weights of edges need a gradient, say."""
        edges, x, weight = arguments["edge_index"], arguments["x"], arguments.get("edge_weight")
        sliced = self._sliced(layer, edges, layer_name(layer))
        own_factors, mean = layer.own_factors(), layer.aggr == "mean"
        if not sliced.sums(x, weight) or (own_factors is not None and mean):
            return None
        return sum_of_slices(x, sliced, value=weight, mean=mean, rounds=layer.rounds, own_factors=own_factors)

    def _on_slices(self, layer: MessagePassing, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Tensor:
        """The layer's ``forward`` on this rank's columns of all nodes."""
        self._warn_of_one_chunk(layer)
        nodes, label = self._nodes, layer_name(layer)
        topology = nodes.topology(arguments["edge_index"], (layer, self._hop))

        def cut(name: str, value: Any) -> Any:
            if isinstance(value, Adjacency):
                return topology.edges
            if not isinstance(value, Tensor):
                return value
            if name in ("x", "x_0"):
                rows = nodes.layout.split(value.movedim(layer.node_dim, 0), label)
                return with_phantom_column(rows).movedim(0, layer.node_dim)
            return self._edge_tensors.share(EdgeReader(layer, name, topology, f"{label}, {name}"), value)

        sliced = {name: cut(name, value) for name, value in arguments.items()}
        self._slices = nodes.layout.num_rows
        try:
            out = forward(**sliced)
        finally:
            self._slices = None
        return gather_result(layer, out, arguments["x"].size(-1), nodes.layout, label=label)

    def _acts_on_columns(self, layer: MessagePassing, arguments: Mapping[str, Any]) -> bool:
        """True if a layer may go from rows to columns and back once for all its hops."""
        edges, x = arguments.get("edge_index"), arguments.get("x")
        tried = all(value is None or name in (*TRIED_WITH, "self") for name, value in arguments.items())
        if not tried or not isinstance(edges, Adjacency) or edges.value is not None or not isinstance(x, Tensor):
            return False
        # a layer with cached=True would keep edges of one mode and use them in the other
        return not getattr(layer, "cached", False) and acts_on_columns(layer)

    # -- a hop ---------------------------------------------------------------------------------------------------------

    @override
    def propagate(self, hop: Hop) -> Tensor:
        if (num_rows := self._all_here) is not None:
            return hop.run(size=(num_rows, num_rows))
        if self._nodes.layout.overflow is not None and not isinstance(hop.edge_index, Adjacency):
            raise beyond_memory(self._label(hop))
        parts = transformer_parts(hop.layer)
        if parts is not None and isinstance(hop.edge_index, Adjacency):
            return self._transformer(hop, parts, hop.edge_index, **hop.arguments)
        alpha = hop.arguments.get("alpha")
        if isinstance(alpha, Unweighted):
            return self._attention(hop, alpha)
        if hop.is_plain_product:
            return self._product(hop)
        return self._messages(hop)

    def _transformer(
        self,
        hop: Hop,
        parts: TransformerParts,
        adjacency: Adjacency,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edge_attr: Tensor | None,
    ) -> Tensor:
        """Weights of this rank's edges from whole rows, then the sum on slices."""
        self._warn_of_one_chunk(hop.layer)
        layout, label = self._nodes.layout, self._label(hop)
        topology = self._nodes.topology(adjacency, (hop.layer, self._hop))
        keys = self.fetcher.rows_of(replace(hop, arguments={"key": key}), self._rows)["key"]
        weights, extra = parts(hop.layer, adjacency, query, keys, edge_attr)
        edges, width = cast(Adjacency, topology.edges), value.size(-1)
        if layout.overflow is not None:
            out = attention_in_chunks(value, edges, layout, weights=weights, label=label)
        else:
            rows, weights = split_with_weights(value, weights, topology, layout, label=label)
            out = sum_of_values(rows, weights, edges, layout, width=width, label=label)
        return out if extra is None else out + extra

    def _attention(self, hop: Hop, alpha: Unweighted) -> Tensor:
        """A sum of ``GATConv`` whose weights are computed on slices, from the scores of all nodes."""
        self._warn_of_one_chunk(hop.layer)
        topology = self._nodes.topology(hop.edge_index, (hop.layer, self._hop))
        value = hop.sources["x"]
        self._rows.check(hop, "x", value)
        layout, label = self._nodes.layout, self._label(hop)
        edges, slope = cast(Adjacency, topology.edges), alpha.layer.negative_slope
        width = value.size(-1)
        if layout.overflow is not None:
            assert alpha.dropout == 0, "chunks drop nothing"
            scores = alpha.source, alpha.target
            return attention_in_chunks(value, edges, layout, scores=scores, negative_slope=slope, label=label)
        rows, source, target = split_with_scores(value, alpha.source, alpha.target, layout, label=label)
        if alpha.dropout > 0:
            ranks, dropout = self.communicator, alpha.dropout
            weights = weights_of_scores(source, target, topology, ranks, negative_slope=slope, dropout=dropout)
            return sum_of_values(rows, weights, edges, layout, width=width, label=label)
        return layout.gather(edges.attend(rows, source, target, slope), width, label)

    def _product(self, hop: Hop) -> Tensor:
        """One sparse product, on slices."""
        edges = cast(Adjacency, hop.edge_index)
        self._rows.check(hop, "x", hop.sources["x"])
        sliced = self._sliced(hop.layer, edges, self._label(hop))
        columns = columns_of_hops(hop.layer).get(_names(hop))
        if columns is not None and columns.repeated and sliced.layout.overflow is None:
            sliced = replace(sliced, splits=self._splits)
        return hop.run(SlicedAdjacency.over(edges, sliced))

    def _messages(self, hop: Hop) -> Tensor:
        """Any other hop: messages of all edges, on slices."""
        topology = self._nodes.topology(hop.edge_index, (hop.layer, self._hop))
        self._warn_of_one_chunk(hop.layer)
        return SlicedRun(
            hop=hop,
            columns=self._columns(hop),
            topology=topology,
            nodes=self._nodes,
            edge_tensors=self._edge_tensors,
            rows=self._rows,
            label=self._label(hop),
        ).run()

    @override
    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        if (num_rows := self._all_here) is not None:
            return hop.run(size=(num_rows, num_rows))
        if self._gathers_scores(hop):
            # scores travel along with the rows of the sum, and each rank computes all weights from them
            return hop.run()
        fetched = self.fetcher.rows_of(hop, self._rows)  # weights are computed here, of this rank's edges
        size = (self._rows.num_sources, self._rows.num_rows)
        return replace(hop, weights_unseen=False).run(rows=fetched, size=size)

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        if self._slices is not None:
            return x
        return torch.cat([x, self.communicator.exchange_rows(x, self.shard.plan, label="node values")])

    @property
    @override
    def num_rows(self) -> int:
        return self.shard.num_owned if self._slices is None else self._slices

    @property
    def fetcher(self) -> Fetcher:
        """The object that fetches source rows for edge values that this rank computes itself."""
        if self._fetcher is None:
            options = FetchOptions(overlap=self.overlap)
            self._fetcher = Fetcher(self.shard, self.communicator, options, lambda: self.kept.first_hop.results)
        return self._fetcher

    @property
    def _rows(self) -> HopRows:
        return HopRows.of_shard(self.shard, self._hop)

    # -- all nodes -----------------------------------------------------------------------------------------------------

    def _sliced(self, layer: MessagePassing, edges: Adjacency, label: str) -> SlicedEdges:
        """Return the edges of all ranks for a hop that is one sparse product; ``edges`` are this rank's."""
        topology, tensors = self._nodes.topology(edges, (layer, self._hop)), self._edge_tensors
        weights = EdgeReader(layer, "edge_weight", topology, f"{layer_name(layer)}, edge weights")
        return SlicedEdges(
            edges=cast(Adjacency, topology.edges),
            layout=self._nodes.layout,
            label=label,
            weights_of_all=partial(tensors.share, weights),
            kept_weights_of_all=partial(tensors.share_constant, weights),
            factors_of_all=partial(tensors.factors, weights, edges),
            num_chunks=self.num_chunks,
            runs_in_one_chunk=partial(self._warn_of_one_chunk, layer),
        )

    @property
    def _edge_tensors(self) -> EdgeTensors:
        if self._shared is None:
            self._shared = EdgeTensors(self._nodes)
        return self._shared

    @property
    def _nodes(self) -> AllNodes:
        if self._all is None:
            with torch.inference_mode(False), torch.no_grad():
                shard, ranks = self.shard, self.communicator
                spill = overflow_of(shard, ranks, self._sizes, memory_gib=self.memory_gib, device=self.device)
                self._all = AllNodes(shard, ranks, spill, overlap=self.overlap)
        return self._all

    @property
    def _alone(self) -> bool:
        """True if no other rank takes part, and all columns fit in memory."""
        return self.communicator.world_size == 1 and self._nodes.layout.overflow is None

    @property
    def _all_here(self) -> int | None:
        """Rows of a layer that needs no other rank; ``None`` if its hops need some."""
        return self.shard.num_owned if self._slices is None and self._alone else self._slices

    @property
    @override
    def drops_alike(self) -> bool:
        return not self._alone and self._nodes.draws_alike and self._nodes.layout.overflow is None

    def _gathers_scores(self, hop: Hop) -> bool:
        """True if scores of nodes travel, not weights of edges: nothing but the sum reads these, and they are more."""
        if not hop.weights_unseen or not isinstance(hop.layer, GATConv) or hop.kernel is None:
            return False
        if hop.arguments.get("edge_attr") is not None or target_of(hop.arguments["alpha"]) is None:
            return False
        return scores_are_fewer(self._nodes, self._nodes.topology(hop.edge_index, (hop.layer, self._hop)))

    def _columns(self, hop: Hop) -> Columns:
        """Return how ranks share out the arguments of a hop.

        Raises:
            InputError: If that is not known.
        """
        try:
            names, tried = _names(hop), columns_of_hops(hop.layer)
        except InputError as error:  # hooks may have come since it was distributed
            raise InputError(f"{self._label(hop)}: {error}") from error
        if names not in tried:
            raise InputError(
                f"{hop.layer_name}: propagate({', '.join(sorted(names))}) did not run when the layer was tried on a "
                f"few nodes, so it is not known whether it mixes columns; {advice()}"
            )
        return tried[names]

    def _warn_of_one_chunk(self, layer: MessagePassing) -> None:
        """Say, once for a class of layers, that ``num_chunks`` is not for one of its hops."""
        name = layer_name(layer)
        if self._warned is None:
            self._warned = set()
        if (self.num_chunks or 1) > 1 and self._nodes.layout.overflow is None and name not in self._warned:
            self._warned.add(name)
            if self.communicator.rank == 0:
                warnings.warn(
                    f"num_chunks={self.num_chunks} is for one sum or mean by weights without gradient; {name} has "
                    "other hops, which run in one chunk, or with memory_gib in as many as fit",
                    stacklevel=2,
                )

    def _label(self, hop: Hop) -> str:
        return self._rows.label(hop)


def _names(hop: Hop) -> frozenset[str]:
    """Names of the hop's arguments that are not ``None``."""
    return frozenset(name for name, value in hop.arguments.items() if value is not None)
