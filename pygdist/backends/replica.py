"""``replica``: a part is trained by itself, on its own nodes and those around them (CATGNN).

Nothing is exchanged in a forward or backward pass: of other parts' nodes the features and some in-edges are here, from
the partitioned graph. So a layer above the first reads rows of halo nodes that were computed from what is around them
here, not from all their neighbours, unless the halo reaches as far as the model sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Inner
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.passes.edge_norm import EDGE_NORM, EdgeNorm, in_degree_facts, in_degrees
from pygdist.backends.passes.rehearsal import Call, Kind
from pygdist.backends.passes.rows import Rows, leading
from pygdist.backends.recomputing.backend import Probe, RecomputingBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.surroundings import Surroundings
from pygdist.hops.layer import layer_name, options_of
from pygdist.kernels import CSR
from pygdist.kernels.csr import pointers

__all__ = ["ReplicaBackend"]


class ReplicaBackend(RecomputingBackend):
    """Train each part with its surroundings alone (CATGNN, Sec. 3.2 and 4.2).

    Approximate, and exact where ``hops`` is no less than the model's: then it computes what ``cache`` does, but norms
    over nodes take the statistics of the part. A layer computes the rows that later layers need: those within ``hops``
    hops, or as many as are left. Nodes ``hops`` away have the edges that the partitioned graph holds of them: in-edges
    from nodes that are nearer, and their self-loops. Degrees, for GCN's weights, are those of the whole graph.

    Any part of a graph will do, and any number of parts: ranks never wait for each other here. Whoever trains parts
    must average the models (:class:`~pygdist.lightning.ModelAveragingStrategy`) or the gradients.

    Args:
        hops: How many hops around the own nodes are kept, at most as many as the partitioned graph holds (``pygdist
            partition --placement replicas --hops K``); 0 drops all neighbours in other parts.
        scale_rim: Where GCN's and its relatives' weights are those of the whole graph, but some of a node's neighbours
            are not here, let the others stand for them: their weights are as much larger as they are fewer, or lighter.
            Without, as in the paper, sums at such nodes lack what is missing.

    Raises:
        InputError: If ``hops`` is negative.
    """

    name = "replica"
    exact = False
    approximation = "rows of other parts' nodes are computed from what is kept around a part, within 'hops' hops"
    placement = "replicas"

    def __init__(self, *, hops: int = 1, scale_rim: bool = True) -> None:
        super().__init__()  # nothing travels: how does not matter
        if hops < 0:
            raise InputError(f"hops is {hops}, expected 0 or more")
        self.hops, self.scale_rim = hops, scale_rim
        self._told: set[str] = set()  # layers that somebody was warned of

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        """Place the backend on a part. The communicator is not used, so there may be other numbers of ranks and parts.

        Raises:
            InputError: If the shard lacks its surroundings, or they reach less far than ``hops``.
        """
        self._checked(shard)
        self.unbind()
        self._shard, self._communicator = shard, Communicator()

    def _checked(self, shard: Shard) -> Surroundings:
        around = shard.surroundings
        if around is None or around.num_hops < self.hops:
            has = "placement nodes" if around is None else f"halos of {around.num_hops} hops"
            raise InputError(
                f"backend 'replica' needs placement replicas with {max(self.hops, 1)} hops, but the graph was "
                f"partitioned with {has}; partition it with --placement replicas --hops {max(self.hops, 1)}"
            )
        return around

    def part_graph(self, shard: Shard) -> tuple[Data, CSR]:
        """What is kept of a part as a graph of its own, to draw mini-batches from.

        Returns:
            Its rows, own nodes first, and the in-edges of each. Rows around have features; their labels are missing,
            and they are in no mask.
        """
        around = self._checked(shard)
        kept, num_rows = _kept(around, self.hops), around.ends[self.hops]
        fields = {"x": around.x[:num_rows]}
        for name in (name for name in EDGE_FIELDS if getattr(around, name) is not None):
            fields[name] = kept.values(name, getattr(around, name))
        beside = num_rows - shard.num_owned
        for name in MASKS:
            mask = getattr(shard, name)
            if mask is not None:
                fields[name] = torch.cat([mask, mask.new_zeros(beside)])
        if shard.y is not None:
            missing = -1 if shard.y.dim() == 1 else float("nan")
            fields["y"] = torch.cat([shard.y, shard.y.new_full((beside, *shard.y.shape[1:]), missing)])
        return Data(num_nodes=num_rows, **fields), kept.csr

    @property
    def _around(self) -> Surroundings:
        return self._bound(self.shard.surroundings)

    @override
    def _forget_graph(self) -> None:
        # which hops a model makes is the same on every part, and a rank may go from part to part in each epoch
        known = getattr(self, "_models", {})
        super()._forget_graph()
        self._models = known
        self._kept: _Kept | None = None
        self._sampled: int | None = None  # rows of the mini-batch that the model runs on
        self._norm: EdgeNorm | None = None  # of its edges
        self._in_weights = False  # whether weights of edges that layers have hold it
        self._part_degrees: Tensor | None = None  # facts of the in-edges that are here, if these were asked for
        self._weights: set[int] = set()  # where the graph's own edge weights begin in memory

    # -- the model --------------------------------------------------------------------------------------------------

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        edges = [value for value in (*args, *kwargs.values()) if isinstance(value, Adjacency)]
        if any(value.csr() is self.shard.adjacency.csr() for value in edges):
            return super().model_inputs(model, args, kwargs)
        # a mini-batch of the part is a graph of its own
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._sampled = given[0].size(0) if given else 0
        norm = self._norm = next((edge.derived[EDGE_NORM] for edge in edges if EDGE_NORM in edge.derived), None)
        self._in_weights = kwargs.get("edge_weight") is not None or (
            norm is not None and any(norm.is_weighted_by_graph(value) is not None for value in given)
        )
        return args, kwargs

    @override
    def end_forward(self) -> None:
        super().end_forward()
        self._sampled = self._norm = None

    @override
    def run_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._sampled is None:
            return super().run_layer(layer, forward, args, kwargs)
        options, in_weights = {"cached": False}, self._in_weights  # the next one is another graph
        if self._norm is not None:
            args, kwargs, alone = self._norm.to_layer(layer, forward, args, kwargs)
            self._in_weights |= alone
            if alone:
                options["improved"] = False  # PyG's self-loops count twice only beside weights
        try:
            with options_of(layer, **options):
                return forward(layer, *args, **kwargs)
        finally:
            self._in_weights = in_weights

    @override
    def propagate(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._sampled is None:
            return super().propagate(layer, inner, edge_index, size, kwargs)
        if self._norm is not None:
            edge_index, kwargs, made_up = self._norm.on(layer, edge_index, kwargs, in_weights=self._in_weights)
            if not made_up:
                self._tell(layer)
        return inner(edge_index, size=size, **kwargs)

    def _tell(self, layer: MessagePassing) -> None:
        """Warn, once for a class of layers, that nothing makes up for how edges were sampled."""
        name = layer_name(layer)
        if name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"GraphSAINT's normalisation of sums over neighbours is left out of {name}: it is for sums and means "
                "of rows, and for layers that take edge_weight and add or average",
                stacklevel=2,
            )

    @override
    def edge_updater(
        self, layer: MessagePassing, inner: Inner, edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        if self._sampled is not None:
            return inner(edge_index, size=size, **kwargs)
        return super().edge_updater(layer, inner, edge_index, size, kwargs)

    @override
    def rows_of(self, widths: tuple[int, ...], probe: Probe) -> Rows:
        ends, depth, kept = self._around.ends, len(widths), self._kept_edges
        computed = tuple(ends[min(self.hops, depth - hop)] for hop in range(depth + 1))
        # of rows as far away as the model sees nothing but the features is needed
        adjacency = leading(Adjacency.from_csr(kept.csr), computed[0], computed[min(1, depth)], computed[0])
        nothing = Arrival.nothing(adjacency.device)
        return Rows(
            n_id=self._around.n_id[: computed[0]],
            num_owned=self.shard.num_owned,
            computed=computed,
            num_sources=computed[:-1],
            adjacency=adjacency,
            fetched=(nothing,) * depth,
            inputs=nothing,
            everything=nothing,
            edges=nothing,
            num_own_edges=int(kept.csr.indptr[self.shard.num_owned]),
            exchanges=(False,) * depth,
        )

    @property
    def _kept_edges(self) -> _Kept:
        if self._kept is None:
            with torch.inference_mode(False):
                self._kept = _kept(self._around, self.hops)
        return self._kept

    @override
    def given(self, call: Call, rows: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def extended(value: Any, kind: Kind) -> Any:
            if isinstance(value, Adjacency) and value.csr() is self.shard.adjacency.csr():
                weight = value.value
                return rows.adjacency if weight is None else self._weighted(rows, self._stored(weight, rows))
            return value if kind is None else self._stored(value, rows)

        return call.changed(extended)

    def _weighted(self, rows: Rows, weight: Tensor) -> Adjacency:
        """The edges with their weights, the same object each time: what is kept of hops is kept by that."""
        derived = rows.adjacency.derived
        if "weighted" not in derived:
            derived["weighted"] = rows.adjacency.with_value(weight)
        found: Adjacency = derived["weighted"]
        return found

    def _stored(self, value: Tensor, rows: Rows) -> Tensor:
        """The same field of the graph for all rows and edges that are kept here."""
        name = next((name for name in ("x", *EDGE_FIELDS) if getattr(self.shard, name) is value), None)
        if name is None:
            raise InputError(
                "backend 'replica' holds the features and edge fields of nodes around a part; the model is given "
                f"another tensor of shape {tuple(value.shape)}, whose rows for those nodes nobody knows here"
            )
        found: Tensor = getattr(self._around, name)
        if name == "x":
            return found[: rows.num_rows]
        kept = self._kept_edges.values(name, found)
        if name == "edge_weight":
            self._weights.add(kept.data_ptr())
        return kept[: rows.adjacency.size(1)]

    # -- rows -------------------------------------------------------------------------------------------------------

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        # as many as are computed, where in-degrees are not known by heart
        return x

    @override
    def owned_rows(self, x: Tensor) -> Tensor:
        return x if self._sampled is not None else super().owned_rows(x)

    @property
    @override
    def num_rows(self) -> int:
        return super().num_rows if self._sampled is None else self._sampled

    @override
    def source_degrees(self, degree: Tensor, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        if self._sampled is not None:
            return self._sample_degrees(edge_weight, loop_weight)
        if self._alone or self.hops == 0:
            return None  # what is here is all there is
        if edge_weight is not None and edge_weight.data_ptr() not in self._weights and edge_weight.numel():
            raise InputError(
                "backend 'replica' knows in-degrees by the graph's own edge weights; the model normalises weights that "
                "it computes, and those of edges in other parts are not here"
            )
        found = in_degrees(self._around.in_degree, edge_weight is not None, loop_weight)[: self.num_sources]
        own = slice(0, self.shard.num_owned)  # all their in-edges are here
        if not torch.allclose(degree[own].to(found), found[own], rtol=1000 * torch.finfo(degree.dtype).eps):
            raise InputError(
                "backend 'replica' knows in-degrees by all edges of the graph; the model normalises others (some of "
                "them, or with self-loops of its own), and those in other parts are not here"
            )
        return found

    def _sample_degrees(self, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        """Those of a mini-batch's rows in the part, where it is known how edges were sampled; else the batch's own."""
        norm = self._norm
        by_graph = None if norm is None or edge_weight is None else norm.is_weighted_by_graph(edge_weight)
        if norm is None or norm.n_id is None or by_graph is None:
            return None
        facts = self._around.in_degree if self.hops else self._degrees_of_part()
        return in_degrees(facts[norm.n_id], by_graph, loop_weight)

    def _degrees_of_part(self) -> Tensor:
        if self._part_degrees is None:
            kept, weight = self._kept_edges, self._around.edge_weight
            with torch.inference_mode(False):
                weight = None if weight is None else kept.values("edge_weight", weight)
                self._part_degrees = in_degree_facts(kept.csr, weight)
        return self._part_degrees

    @override
    def neighbours_for_each(self, *, weighted: bool) -> Tensor | None:
        if self._alone or self._sampled is not None or self.hops == 0 or not self.scale_rim:
            return None
        found, number = self._degrees_of_part(), 2 if weighted else 0  # of in-edges, and of loops after it
        here, every = (
            facts[: found.size(0), number] - facts[: found.size(0), number + 1]
            for facts in (found, self._around.in_degree)
        )
        return torch.where(here > 0, every / here.where(here > 0, 1.0), 1.0)[: self.num_sources]

    @property
    @override
    def num_nodes(self) -> int:
        return self.shard.num_owned if self._sampled is None else self._sampled


@dataclass(frozen=True)
class _Kept:
    """In-edges of the rows within so many hops, and where each is among those of the surroundings."""

    csr: CSR
    position: Tensor | None  # as many leading ones, if there is none
    _cut: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def values(self, name: str, stored: Tensor) -> Tensor:
        """The values of these edges, the same object each time."""
        known = self._cut.get(name)
        if known is None or known[0] is not stored:
            values = stored[: self.csr.num_entries] if self.position is None else stored[self.position]
            known = self._cut[name] = (stored, values)
        return known[1]


def _kept(around: Surroundings, hops: int) -> _Kept:
    """The edges of a smaller part, as the partitioned graph would hold it: the last rows have those from nearer ones.

    Args:
        around: What is held.
        hops: How many hops are kept of it.
    """
    csr, end = around.adjacency.csr(), around.ends[hops]
    if hops == around.num_hops:
        return _Kept(csr, None)
    near = around.ends[max(hops - 1, 0)]
    row, index = csr.row_index(), csr.index[: int(csr.indptr[end])]
    row = row[: index.numel()]
    keep = (index < near) | (index == row)
    if hops:
        keep |= row < near
    position = keep.nonzero().squeeze(1)
    return _Kept(CSR(pointers(row[position], end), index[position].contiguous(), end), position)
