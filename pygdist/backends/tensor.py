"""``tensor``: every rank aggregates a slice of the columns over the whole topology (NeutronTP, Sec. 3).

Exact. Around each aggregation rows become columns and columns rows again, in one exchange each way; whatever the graph
looks like, ranks aggregate over the same edges and send the same bytes. What a layer does with whole rows (its weights,
attention scores of edges) it does on those of this rank.
"""

from __future__ import annotations

import inspect
import os
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, MessagePassing
from typing_extensions import override

from pygdist.backends.base import Inner
from pygdist.backends.fetching.backend import FetchingBackend
from pygdist.backends.slicing.adjacency import SlicedAdjacency, SlicedEdges, sum_of_slices
from pygdist.backends.slicing.any_hop import SlicedHop, gathered
from pygdist.backends.slicing.attention import (
    attention_in_chunks,
    propagate_attention,
    scores_are_fewer,
    split_with_scores,
    split_with_weights,
    sum_of_values,
    weights_of_scores,
)
from pygdist.backends.slicing.chunked_hop import Ranks
from pygdist.backends.slicing.columns import TRIED_WITH, Columns, acts_on_columns, columns_of_hops
from pygdist.backends.slicing.edge_tensors import EdgeTensors
from pygdist.backends.slicing.everyone import Everyone, Topology
from pygdist.comm.slices import columns_of, gather_columns, split_columns, with_phantom_column
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.fused_attention import TransformerParts, Unweighted, attention_hop, transformer_parts
from pygdist.hops.layer import fused_arguments, fuses, hooked, layer_name, with_phantom_edge
from pygdist.memory.overflow import Overflow, beyond_memory, writable
from pygdist.nn.decoupled import AttentionPropagation, Propagation

__all__ = ["TensorBackend"]

_GIB = 2**30
_NO_SHAPE = nn.UninitializedParameter
_INDEX_COPIES = 5  # of each edge: source and weight, forward and backward, and where the weight is
_SLICE_COPIES = 4  # of slices: forward and backward, what is read and what is summed


class TensorBackend(FetchingBackend):
    """Slice the columns of all nodes (tensor parallelism; NeutronTP, PVLDB 2024, Sec. 3 and 4.1.1).

    Layers whose message or aggregation mixes columns are refused when the model is distributed.

    Args:
        num_chunks: In how many chunks of destinations sums are made (Sec. 4.2.1), or in more, if memory asks for them;
            a few by default, where slices are large.
        overlap: Split the sources of one chunk and gather the results of another while a third is computed
            (Sec. 4.2.2); without, all sources are split first, and chunks gathered one after the other.
        memory_gib: Most memory that edges, slices and what travels may take on the device, on each rank. Those of one
            chunk are there; the others wait in the host's memory or, where the device is the host, in files beside the
            partitioned graph. No limit by default on the host; on a GPU half of what is free, shared by the ranks that
            have it, if edges and slices of the widest rows need more.
            It bounds sums and means by weights without gradient, and all other hops (attention, maxima, messages of a
            layer's own), whose chunks are computed once more in the backward pass; what such messages take is an
            estimate. Layers with hooks on their hops are refused there (elsewhere hooks see this rank's columns), and
            where several chunks are needed those whose messages depend on the edges into other nodes. What a rank has
            of its own rows and edges is not counted: its part of the graph, weights that it computes for its own edges,
            and for those of ``GATv2Conv`` and ``TransformerConv`` the rows of their sources.
        device: Where hops are computed, for example ``cuda`` while the model runs on the host, within half of its free
            memory unless ``memory_gib`` says how much; where the model is by default. Layers that compute messages of
            their own are refused, as their parameters are where the model is.
    """

    name = "tensor"

    def __init__(
        self,
        num_chunks: int | None = None,
        *,
        overlap: bool = True,
        memory_gib: float | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(overlap=overlap)
        if num_chunks is not None and num_chunks < 1:
            raise InputError(f"num_chunks is {num_chunks}, expected at least 1")
        if memory_gib is not None and memory_gib <= 0:
            raise InputError(f"memory_gib is {memory_gib}, expected a positive number")
        self.num_chunks, self.memory_gib, self.device = num_chunks, memory_gib, device
        self._widest, self._heads = 0, 1  # of the layers' rows and attention
        self._told: set[str] = set()  # layers that somebody was warned of
        self._forget_graph()

    def _forget_graph(self) -> None:
        self._all: Everyone | None = None
        self._slicing = False  # a layer runs on slices of all nodes
        self._splits: dict[int, tuple[Tensor, int, Tensor]] = {}  # of the layer that runs
        self._shared: EdgeTensors | None = None

    @override
    def unbind(self) -> None:
        super().unbind()
        self._forget_graph()

    @override
    def forget_model(self, model: nn.Module) -> None:
        super().forget_model(model)
        self._widest, self._heads = _most(model)
        self._shared = None
        if self._all is not None:
            self._all.forget()

    @override
    def _pickled_state(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        TensorBackend._forget_graph(fresh)
        return {**super()._pickled_state(), **vars(fresh)}

    @override
    def refuse(self, layer: MessagePassing) -> str | None:
        if transformer_parts(layer) is not None:
            return super().refuse(layer)
        try:
            columns_of_hops(layer)
        except InputError as error:
            return str(error)
        return super().refuse(layer)

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        shared = not self._alone
        if isinstance(layer, AttentionPropagation) and shared and not (hooked(layer) or hooked(layer.propagation)):
            given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
            if isinstance(given["edge_index"], Adjacency):
                self._warn_of_one_chunk(layer)
                return propagate_attention(
                    layer, self._everyone, self.communicator, overlap=self.overlap, label=layer_name(layer), **given
                )
        if self._slicing or self._alone or not self._runs_on_slices(layer, forward, args, kwargs):
            self._splits = {}
            try:
                return super().run_layer(layer, forward, args, kwargs)
            finally:
                self._splits = {}
        everyone, label = self._everyone, layer_name(layer)
        given = inspect.signature(forward).bind(layer, *args, **kwargs).arguments
        edges, x = given["edge_index"], given["x"]
        topology = everyone.topology(edges, (layer, self._hop))
        if isinstance(layer, Propagation) and not hooked(layer):
            sliced, weight, mean = self._sliced(layer, edges, topology), given.get("edge_weight"), layer.aggr == "mean"
            own = layer.own_factors()
            if sliced.sums(x, weight) and (own is None or not mean):
                return sum_of_slices(x, sliced, label=label, value=weight, mean=mean, rounds=layer.rounds, own=own)
        if everyone.overflow is not None:
            return super().run_layer(layer, forward, args, kwargs)
        self._warn_of_one_chunk(layer)

        def changed(name: str, value: Any) -> Any:
            if isinstance(value, Adjacency):
                return topology.edges
            if not isinstance(value, Tensor):
                return value
            if name in ("x", "x_0"):
                rows = value.movedim(layer.node_dim, 0)
                rows = split_columns(rows, everyone.counts, self.communicator, label=label)
                return with_phantom_column(rows).movedim(0, layer.node_dim)
            return self._edge_tensors.of_all(layer, name, value, topology, label=f"{label}, {name}")

        cut = {name: changed(name, value) for name, value in given.items()}
        self._slicing = True
        try:
            out = forward(**cut)
        finally:
            self._slicing = False
        return gathered(layer, out, x.size(-1), everyone.counts, self.communicator, label=label)

    def _runs_on_slices(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a layer may go from rows to columns and back once for all its hops."""
        given = inspect.signature(forward).bind(layer, *args, **kwargs).arguments
        edges, x = given.get("edge_index"), given.get("x")
        known = all(value is None or name in (*TRIED_WITH, "self") for name, value in given.items())
        if not known or not isinstance(edges, Adjacency) or edges.value is not None or not isinstance(x, Tensor):
            return False
        # what a layer keeps of its own edges is that of another mode, or the other way round
        return not getattr(layer, "cached", False) and acts_on_columns(layer)

    def _sliced(self, layer: MessagePassing, own: Adjacency, topology: Topology) -> SlicedEdges:
        """How a hop runs over the edges of all ranks, if it is one sparse product."""
        everyone = self._everyone

        label, tensors = f"{layer_name(layer)}, edge weights", self._edge_tensors
        facts: dict[str, Any] = {"label": label, "overflow": everyone.overflow}

        def weights_of_all(value: Tensor, dtype: torch.dtype) -> Tensor:
            return tensors.of_all(layer, "edge_weight", value, topology, dtype=dtype, **facts)

        def kept_weights_of_all(value: Tensor, dtype: torch.dtype) -> Tensor | None:
            return tensors.kept_of_all(layer, "edge_weight", value, topology, dtype=dtype, **facts)

        def factors_of_all(value: Tensor) -> Tensor | None:
            label = f"{layer_name(layer)}, factors of edge weights"
            return tensors.factors_of_all(layer, value, own, topology, everyone, label=label)

        return SlicedEdges(
            edges=cast(Adjacency, topology.edges),
            counts=everyone.counts,
            communicator=self.communicator,
            weights_of_all=weights_of_all,
            kept_weights_of_all=kept_weights_of_all,
            factors_of_all=factors_of_all,
            num_chunks=self.num_chunks,
            overlap=self.overlap,
            overflow=everyone.overflow,
            runs_in_one_chunk=partial(self._warn_of_one_chunk, layer),
        )

    @property
    def _edge_tensors(self) -> EdgeTensors:
        if self._shared is None:
            self._shared = EdgeTensors(self.communicator)
        return self._shared

    @property
    def _everyone(self) -> Everyone:
        if self._all is None:
            with torch.inference_mode(False), torch.no_grad():
                self._all = Everyone(self.shard, self.communicator, self._overflow())
        return self._all

    @property
    def _alone(self) -> bool:
        """Whether there is nobody to share columns with, and memory for all of them."""
        return self.communicator.world_size == 1 and self._everyone.overflow is None

    def _overflow(self) -> Overflow | None:
        """Where edges and slices wait that may not all be on the device; the same on all ranks."""
        shard, here = self.shard, self.shard.n_id.device
        device = _device_of(self.device, here)
        folder = writable(shard.folder) if device.type == "cpu" else None
        if self.memory_gib is not None:
            return Overflow(device, int(self.memory_gib * _GIB), folder)
        if device.type != "cuda":
            return None
        free = float(torch.cuda.mem_get_info(device)[0]) / 2
        name = float(zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode()))  # ranks may share it
        width = -(-max(shard.x.size(-1), self._widest) // self.communicator.world_size)
        held = (_INDEX_COPIES + self._heads - 1) * 4 * shard.num_edges
        held += _SLICE_COPIES * shard.num_nodes * width * shard.x.element_size()
        found = self.communicator.gather([free, float(held), name])
        budgets = found[:, 0] / (found[:, 2:] == found[:, 2]).sum(dim=1)
        short = device != here or bool((found[:, 1] > budgets).any())
        return Overflow(device, int(budgets.min()), folder) if short else None

    @override
    def propagate(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._slicing:
            if edge_index.size(1) == 0:
                return with_phantom_edge(layer, inner, (self.num_rows,) * 2, kwargs, edges=False)
            return inner(edge_index, size=size, **kwargs)
        if self._alone:
            return super().propagate(layer, inner, edge_index, size, kwargs)
        if self._everyone.overflow is not None and not isinstance(edge_index, Adjacency):
            raise beyond_memory(self._label(layer))
        parts = transformer_parts(layer)
        if parts is not None and isinstance(edge_index, Adjacency):
            self._warn_of_one_chunk(layer)
            return self._transformer(layer, parts, edge_index, **kwargs)
        topology = self._everyone.topology(edge_index, (layer, self._hop))
        if isinstance(kwargs.get("alpha"), Unweighted):
            self._warn_of_one_chunk(layer)
            return self._attention(layer, topology, kwargs["x"], kwargs["alpha"])
        if fuses(layer, edge_index, kwargs) and fused_arguments(layer, kwargs) is not None:
            x = kwargs["x"][0] if isinstance(kwargs["x"], (tuple, list)) else kwargs["x"]
            self._check_rows(layer, "x", x)
            sliced, known = (
                self._sliced(layer, cast(Adjacency, edge_index), topology),
                columns_of_hops(layer).get(_given(kwargs)),
            )
            if known is not None and known.repeated and sliced.overflow is None:
                sliced = replace(sliced, splits=self._splits)
            return inner(
                SlicedAdjacency.over(cast(Adjacency, edge_index), sliced, self._label(layer)), size=size, **kwargs
            )
        self._warn_of_one_chunk(layer)
        hop = SlicedHop(
            layer=layer,
            inner=inner,
            columns=self._columns(layer, kwargs),
            topology=topology,
            everyone=self._everyone,
            communicator=self.communicator,
            edge_tensors=self._edge_tensors,
            check_rows=self._check_rows,
            fused_attention=self.savings.fused_attention,
            overlap=self.overlap,
            label=self._label(layer),
        )
        return hop.run(kwargs)

    @override
    def edge_updater(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._slicing:
            if edge_index.size(1) == 0:
                return with_phantom_edge(layer, inner, (self.num_rows,) * 2, kwargs, edges=True)
            return inner(edge_index, size=size, **kwargs)
        if self._alone:
            return super().edge_updater(layer, inner, edge_index, size, kwargs)
        if self._gathers_scores(layer, edge_index, kwargs):
            # scores travel along with the rows of the sum, and each rank computes all weights from them
            return inner(edge_index, size=size, **kwargs)
        unseen, self.weights_unseen = self.weights_unseen, False  # they are computed here, of this rank's edges
        try:
            return super().edge_updater(layer, inner, edge_index, size, kwargs)
        finally:
            self.weights_unseen = unseen

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return x if self._slicing else super().source_rows(x)

    @property
    @override
    def num_rows(self) -> int:
        return self._everyone.num_rows if self._slicing else super().num_rows

    @property
    @override
    def drops_alike(self) -> bool:
        return not self._alone and self._everyone.draws_alike and self._everyone.overflow is None

    def _gathers_scores(self, layer: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether scores of nodes travel instead of weights of edges: if nobody sees the weights, and they are more."""
        if self._alone or not self.weights_unseen or not self.savings.fused_attention:
            return False
        if not isinstance(layer, GATConv) or attention_hop(layer, "edge_updater", edge_index, kwargs) is None:
            return False
        if kwargs.get("edge_attr") is not None or kwargs["alpha"][1] is None:
            return False
        return scores_are_fewer(self._everyone, self._everyone.topology(edge_index, (layer, self._hop)).counts)

    def _columns(self, layer: MessagePassing, kwargs: dict[str, Any]) -> Columns:
        try:
            given, known = _given(kwargs), columns_of_hops(layer)
        except InputError as error:  # hooks may have come since it was distributed
            raise InputError(f"{self._label(layer)}: {error}") from error
        if given not in known:
            raise InputError(
                f"{layer_name(layer)}: propagate({', '.join(sorted(given))}) did not run when the layer was tried on a "
                "few nodes, so it is not known whether it mixes columns; 'comm', 'cache' and 'hybrid' run it"
            )
        return known[given]

    def _attention(self, layer: MessagePassing, topology: Topology, x: Any, alpha: Unweighted) -> Tensor:
        """A sum of ``GATConv`` whose weights are computed on slices, from the scores of all nodes."""
        value = x[0] if isinstance(x, (tuple, list)) else x
        self._check_rows(layer, "x", value)
        everyone, ranks, label = self._everyone, self.communicator, self._label(layer)
        edges, slope = cast(Adjacency, topology.edges), alpha.layer.negative_slope
        width = value.size(-1)
        if everyone.overflow is not None:
            assert alpha.dropout == 0, "chunks drop nothing"
            scores, chunked = (alpha.source, alpha.target), self._in_chunks(everyone.overflow)
            return attention_in_chunks(value, edges, chunked, scores=scores, negative_slope=slope, label=label)
        rows, source, target = split_with_scores(value, alpha.source, alpha.target, everyone, ranks, label=label)
        if alpha.dropout > 0:
            weights = weights_of_scores(source, target, topology, ranks, negative_slope=slope, dropout=alpha.dropout)
            return sum_of_values(rows, weights, edges, everyone, ranks, width=width, label=label)
        out = edges.attend(rows, source, target, slope)
        own = columns_of(width, ranks.rank, ranks.world_size)
        return gather_columns(out[..., : own.stop - own.start], everyone.counts, width, ranks, label=label)

    def _transformer(
        self,
        layer: MessagePassing,
        parts: TransformerParts,
        adjacency: Adjacency,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edge_attr: Tensor | None,
    ) -> Tensor:
        """Weights of this rank's edges from whole rows, then the sum on slices."""
        everyone, label = self._everyone, self._label(layer)
        topology = everyone.topology(adjacency, (layer, self._hop))
        weights, extra = parts(layer, adjacency, query, self._fetch(layer, {"key": key})["key"], edge_attr)
        edges, width, ranks = cast(Adjacency, topology.edges), value.size(-1), self.communicator
        if everyone.overflow is not None:
            chunked = self._in_chunks(everyone.overflow)
            out = attention_in_chunks(value, edges, chunked, weights=weights, label=label)
        else:
            rows, weights = split_with_weights(value, weights, topology, everyone, ranks, label=label)
            out = sum_of_values(rows, weights, edges, everyone, ranks, width=width, label=label)
        return out if extra is None else out + extra

    def _in_chunks(self, overflow: Overflow) -> Ranks:
        """Who runs a hop by chunks."""
        counts = self._everyone.counts
        return Ranks(communicator=self.communicator, counts=counts, overflow=overflow, overlap=self.overlap)

    def _warn_of_one_chunk(self, layer: MessagePassing) -> None:
        """Say, once for a class of layers, that ``num_chunks`` is not for one of its hops."""
        name = layer_name(layer)
        if (self.num_chunks or 1) > 1 and self._everyone.overflow is None and name not in self._told:
            self._told.add(name)
            if self.communicator.rank == 0:
                warnings.warn(
                    f"num_chunks={self.num_chunks} is for one sum or mean by weights without gradient; {name} has "
                    "other hops, which run in one chunk, or with memory_gib in as many as fit",
                    stacklevel=2,
                )

    def _label(self, layer: MessagePassing) -> str:
        return f"hop {self._hop} of {layer_name(layer)}"


def _given(kwargs: dict[str, Any]) -> frozenset[str]:
    """The names of the arguments of a hop that are there."""
    return frozenset(name for name, value in kwargs.items() if value is not None)


def _most(model: nn.Module) -> tuple[int, int]:
    """How wide the rows of a model are at most, as far as its parameters tell, and the most heads of attention."""
    modules = [one for one in model.modules() if not isinstance(one, nn.Embedding)]  # whose rows are looked up
    matrices = [p for one in modules for p in one.parameters(recurse=False) if not isinstance(p, _NO_SHAPE)]
    heads = [found * _copies_of_weights(one) for one in modules if isinstance(found := getattr(one, "heads", 1), int)]
    return max((size for one in matrices if one.dim() > 1 for size in one.shape[-2:]), default=0), max(heads, default=1)


def _copies_of_weights(layer: nn.Module) -> int:
    """Weights of attention are held before and after some are dropped, and which these are."""
    dropout = getattr(layer, "dropout", 0.0)
    return 3 if isinstance(dropout, float) and dropout > 0 else 1


def _device_of(said: str | None, here: torch.device) -> torch.device:
    """A device with its number: of several GPUs a rank whose model is on the host takes that of its local rank."""
    found = here if said is None else torch.device(said)
    if found.type != "cuda" or ":" in str(found):
        return found
    if here.type == "cuda":
        return here
    return torch.device(
        "cuda",
        int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))) % max(torch.cuda.device_count(), 1),
    )
