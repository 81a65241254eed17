"""``replica``: a part is trained by itself, on its own nodes and the nodes around them (CATGNN).

Nothing is exchanged in a forward or backward pass: the part holds the features and some in-edges of the nodes around
it. A layer after the first reads rows of these halo nodes. Such a row is computed from the neighbours in the part, not
from all neighbours, unless the halo has as many hops as the model.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from pygdist.backends.base import Abilities, names_of
from pygdist.backends.passes.batch import BatchPass, num_nodes_of_batch
from pygdist.backends.passes.edge_norm import EDGE_NORM, EdgeNorm, in_degree_facts, in_degrees
from pygdist.backends.passes.rehearsal import Call, Kind
from pygdist.backends.passes.rows import Rows, leading
from pygdist.backends.recomputing.backend import Probe, RecomputingBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.identity import place_of
from pygdist.graph.loaded import LoadedFields
from pygdist.graph.memo import Memo
from pygdist.graph.surroundings import Surroundings
from pygdist.hops.arguments import edges_among
from pygdist.hops.layer import layer_name
from pygdist.kernels import CSR
from pygdist.kernels.csr import pointers

_WEIGHTED = Slot[Memo[Adjacency]]("with weights of the graph")
_MOST_WEIGHTED = 8


class ReplicaBackend(RecomputingBackend):
    """Train each part by itself, with the nodes around it (CATGNN, Sec. 3.2 and 4.2).

    Approximate. If ``hops`` is at least the number of the model's hops, the results are those of ``cache``, except that
    norms over nodes take the statistics of the part. A layer computes the rows that later layers need: rows of nodes up
    to ``hops`` hops away, or nearer if fewer hops follow. Nodes exactly ``hops`` hops away have only their self-loops
    and the in-edges from nearer nodes. GCN's weights use the degrees of the whole graph.

    Any partition works, and any number of parts: ranks never wait for each other in a pass. The trainer must average
    the models (:class:`~pygdist.lightning.ModelAveragingStrategy`) or the gradients.

    Args:
        hops: Number of hops around its own nodes that a part keeps, at most as many as the partitioned graph holds
            (``pygdist partition --placement replicas --hops K``); 0 drops all neighbours in other parts.
        scale_rim: Scale up the edge weights of nodes that lack some in-edges in the part. GCN and similar layers
            normalise by the degrees of the whole graph, so that without scaling, as in the paper, the sums at these
            nodes are too small.

    Raises:
        InputError: If ``hops`` is negative.
    """

    name = "replica"
    abilities = Abilities(
        exact=False,
        approximation="rows of other parts' nodes are computed from what is kept around a part, within 'hops' hops",
        placement="replicas",
        trains_parts=True,
        mini_batches=True,
        evaluates=False,
        reruns_layers=False,
    )
    per_graph = ("_part", "_loaded")
    _part: _OnPart | None = None
    _loaded: LoadedFields | None = None

    def __init__(self, *, hops: int = 1, scale_rim: bool = True) -> None:
        super().__init__(None)
        if hops < 0:
            raise InputError(f"hops is {hops}, expected 0 or more")
        self.hops, self.scale_rim = hops, scale_rim
        self.abilities = replace(self.abilities, num_hops=max(1, hops))  # the store has halos of no fewer
        self._warned: set[str] = set()  # names of layers

    @override
    def exact_case(self, num_hops: int) -> ReplicaBackend | None:
        if not self.hops:  # each part is a graph by itself
            return None
        backend = ReplicaBackend(hops=num_hops, scale_rim=self.scale_rim)
        backend.savings = self.savings
        return backend

    @override
    def bind(self, shard: Shard, communicator: Communicator) -> None:
        """Place the backend on a part. The communicator is not used, so there may be more or fewer ranks than parts.

        Raises:
            InputError: If the shard does not hold the nodes around it, or holds them for fewer than ``hops`` hops.
        """
        self._check_placement(shard)
        self._checked(shard)
        self.unbind()
        self._shard, self._communicator = shard, Communicator()
        self._loaded = LoadedFields(shard)

    def _checked(self, shard: Shard) -> Surroundings:
        around = shard.surroundings
        if around is None or around.num_hops < self.hops:
            has = "placement nodes" if around is None else f"halos of {around.num_hops} hops"
            raise InputError(
                f"backend 'replica' needs placement replicas with {self.abilities.num_hops} hops, but the graph was "
                f"partitioned with {has}; partition it with --placement replicas --hops {self.abilities.num_hops}"
            )
        return around

    def part_graph(self, shard: Shard) -> tuple[Data, CSR]:
        """Return a part and the nodes around it as one graph, from which mini-batches are drawn.

        Returns:
            The rows, own nodes first, and the in-edges of each row. Rows of other parts' nodes have features, but no
            labels, and are in no mask.

        Raises:
            InputError: As :meth:`bind`, or if features or edge values have changed since the part was loaded.
        """
        around, loaded = self._checked(shard), LoadedFields(shard)
        edges, num_rows = _part_edges(around, self.hops), around.ends[self.hops]
        fields = {"x": self._around_part(shard, loaded, "x")[:num_rows]}
        for name in (name for name in EDGE_FIELDS if getattr(shard, name) is not None):
            fields[name] = edges.values(name, self._around_part(shard, loaded, name))
        beside = num_rows - shard.num_owned
        for name in MASKS:
            mask = getattr(shard, name)
            if mask is not None:
                fields[name] = torch.cat([mask, mask.new_zeros(beside)])
        if shard.y is not None:
            missing = float("nan") if shard.y.is_floating_point() else -1
            fields["y"] = torch.cat([shard.y, shard.y.new_full((beside, *shard.y.shape[1:]), missing)])
        return Data(num_nodes=num_rows, **fields), edges.csr

    def _around_part(self, shard: Shard, loaded: LoadedFields, name: str) -> Tensor:
        """Return a field of a part with the values around it, which are those of other parts when they were loaded."""
        value: Tensor = getattr(shard, name)
        if self.hops == 0:
            return value
        if not loaded.has(name, value):
            raise InputError(
                f"shard.{name} of part {shard.rank} has changed since it was loaded, in place or as another tensor, "
                "but backend 'replica' has the values around a part as they were loaded; partition the graph with the "
                f"changed values, or use backend {_exact_backends()}",
                of_one_rank=True,
            )
        around: Tensor = getattr(shard.surroundings, name)
        return around

    @property
    def _around(self) -> Surroundings:
        return self._bound(self.shard.surroundings)

    @override
    def unbind(self) -> None:
        models = self._models  # a model makes the same hops on every part, and a rank may go from part to part
        super().unbind()
        self._models = models

    @property
    def _on_part(self) -> _OnPart:
        if self._part is None:
            self._part = _OnPart()
        return self._part

    # -- the model --------------------------------------------------------------------------------------------------

    @override
    def model_inputs(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        edges = edges_among(model.forward, args, kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        of_part = not tensors or any(value is self.shard.x for value in tensors)
        if any(value.csr() is self.shard.adjacency.csr() for value in edges) or (of_part and not edges):
            return super().model_inputs(model, args, kwargs)
        # a mini-batch of the part is a graph of its own
        norm = next((norm for edge in edges if (norm := edge.slot(EDGE_NORM)) is not None), None)
        in_weights = kwargs.get("edge_weight") is not None or (
            norm is not None and any(norm.is_weighted_by_graph(value) is not None for value in tensors)
        )
        num_rows = num_nodes_of_batch(model, args, kwargs)
        self._pass = BatchPass(num_rows, norm, in_weights=in_weights, without_norm=self._warn)
        return args, kwargs

    def _warn(self, layer: MessagePassing) -> None:
        """Warn, once for a class of layers, that nothing makes up for how edges were sampled."""
        name = layer_name(layer)
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} runs without GraphSAINT's normalisation of sums over neighbours, which exists for sums and "
                "means of rows, and for layers that take edge_weight and add or average; use such a layer, or accept "
                "the bias of the sampling",
                stacklevel=2,
            )

    @property
    def _batch(self) -> BatchPass | None:
        """The mini-batch that the model runs on; ``None`` if it runs on the part."""
        return self._pass if isinstance(self._pass, BatchPass) else None

    @override
    def rows_of(self, widths: tuple[int, ...], probe: Probe) -> Rows:
        ends, depth, edges = self._around.ends, len(widths), self._edges
        computed = tuple(ends[min(self.hops, depth - hop)] for hop in range(depth + 1))
        # of the rows that are as far away as the model sees, only the features are needed
        adjacency = leading(Adjacency.from_csr(edges.csr), computed[0], computed[min(1, depth)], computed[0])
        num_owned, n_id = self.shard.num_owned, self._around.n_id[: computed[0]]
        return Rows.all_here(n_id, num_owned, computed, adjacency, num_own_edges=int(edges.csr.indptr[num_owned]))

    @property
    def _edges(self) -> _PartEdges:
        on_part = self._on_part
        if on_part.edges is None:
            with torch.inference_mode(False):
                on_part.edges = _part_edges(self._around, self.hops)
        return on_part.edges

    @override
    def extended(self, call: Call, rows: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def extended(value: Any, kind: Kind) -> Any:
            if isinstance(value, Adjacency) and value.csr() is self.shard.adjacency.csr():
                weight = value.value
                return rows.adjacency if weight is None else self._weighted(rows, self._stored(weight, rows))
            return value if kind is None else self._stored(value, rows)

        return call.changed(extended)

    def _weighted(self, rows: Rows, weight: Tensor) -> Adjacency:
        """The edges with weights; the same object for the same weights, as results of hops are kept by that."""
        edges, place = rows.adjacency, place_of(weight)
        return edges.slot(_WEIGHTED, lambda: Memo(_MOST_WEIGHTED)).get(
            place, (weight,), lambda: edges.with_value(weight)
        )

    def _stored(self, value: Tensor, rows: Rows) -> Tensor:
        """Return a field of the graph for all rows and edges that the part keeps."""
        name = next((name for name in ("x", *EDGE_FIELDS) if getattr(self.shard, name) is value), None)
        if name is None:
            raise InputError(
                "backend 'replica' holds features and edge fields of the nodes around a part, but the model gets a "
                f"tensor of shape {tuple(value.shape)} that is neither, whose rows for these nodes are not here; pass "
                "shard.x, and edge fields of the shard"
            )
        stored = self._around_part(self.shard, self._bound(self._loaded), name)
        if name == "x":
            return stored[: rows.num_rows]
        values = self._edges.values(name, stored)
        if name == "edge_weight":
            self._on_part.graph_weights.add(values.data_ptr())
        return values[: rows.adjacency.size(1)]

    # -- rows -------------------------------------------------------------------------------------------------------

    @override
    def source_rows(self, x: Tensor) -> Tensor:
        return x

    @override
    def sums_at_owners(self, source: Tensor, value: Tensor, num_rows: int) -> Tensor:
        raise InputError(
            "backend 'replica' does not know out-degrees, which get_laplacian needs: a part has in-edges; use another "
            "backend"
        )

    @override
    def whole_degrees(self, degree: Tensor) -> Tensor:
        if self._alone or self._batch is not None or self.hops == 0:
            return degree
        degrees = in_degrees(self._around.in_degree, False, None)[: degree.size(0)].to(degree)
        owned = slice(0, self.shard.num_owned)
        # of other edges, such as those with loops, the rows at the rim count what is here
        return degrees if torch.equal(degrees[owned], degree[owned]) else degree

    @override
    def source_degrees(self, degree: Tensor, edge_weight: Tensor | None, loop_weight: float | None) -> Tensor | None:
        if self._batch is not None:
            return self._batch_degrees(self._batch.norm, edge_weight, loop_weight)
        if self._alone or self.hops == 0:
            return None  # all in-edges that count are here
        if (
            edge_weight is not None
            and edge_weight.data_ptr() not in self._on_part.graph_weights
            and edge_weight.numel()
        ):
            raise InputError(
                "backend 'replica' knows in-degrees by the graph's own edge weights, but the model normalises weights "
                "that it computes, and those of edges in other parts are not here; use the graph's weights, or another "
                "backend"
            )
        degrees = in_degrees(self._around.in_degree, edge_weight is not None, loop_weight)[
            : self._running().num_sources
        ]
        owned = slice(0, self.shard.num_owned)  # all their in-edges are here
        if not torch.allclose(degree[owned].to(degrees), degrees[owned], rtol=1000 * torch.finfo(degree.dtype).eps):
            raise InputError(
                "backend 'replica' knows in-degrees by all edges of the graph, but the model normalises other edges "
                "(some of them, or with self-loops of its own), and those in other parts are not here; use another "
                "backend"
            )
        return degrees

    def _batch_degrees(
        self, norm: EdgeNorm | None, edge_weight: Tensor | None, loop_weight: float | None
    ) -> Tensor | None:
        """In-degrees in the part of a mini-batch's rows; ``None`` (take the batch's own) if its norm is unknown."""
        by_graph = None if norm is None or edge_weight is None else norm.is_weighted_by_graph(edge_weight)
        if norm is None or norm.n_id is None or by_graph is None:
            return None
        facts = self._around.in_degree if self.hops else self._degrees_of_part()
        return in_degrees(facts[norm.n_id], by_graph, loop_weight)

    def _degrees_of_part(self) -> Tensor:
        edges, weight = self._edges, (self._around if self.hops else self.shard).edge_weight

        def count() -> Tensor:
            return in_degree_facts(edges.csr, None if weight is None else edges.values("edge_weight", weight))

        return self._on_part.degrees.get("degrees", (weight,), count)

    @override
    def rim_scale(self, *, weighted: bool) -> Tensor | None:
        if self._alone or self._batch is not None or self.hops == 0 or not self.scale_rim:
            return None
        of_part, column = self._degrees_of_part(), 2 if weighted else 0  # in-edges; self-loops are in the next column
        here, whole = (
            facts[: of_part.size(0), column] - facts[: of_part.size(0), column + 1]
            for facts in (of_part, self._around.in_degree)
        )
        return torch.where(here > 0, whole / here.where(here > 0, 1.0), 1.0)[: self._running().num_sources]

    @property
    @override
    def num_nodes(self) -> int:
        return self.shard.num_owned if self._batch is None else self._batch.num_rows


@dataclass
class _OnPart:
    """State of the backend on one part.

    Attributes:
        edges: The in-edges that the part keeps.
        degrees: Facts about the in-degrees by these edges; see :func:`in_degree_facts`.
        graph_weights: Addresses of the graph's own edge weights.
    """

    edges: _PartEdges | None = None
    degrees: Memo[Tensor] = field(default_factory=Memo)
    graph_weights: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _PartEdges:
    """In-edges of the rows that a part keeps, and the position of each among the edges of the surroundings."""

    csr: CSR
    position: Tensor | None  # ``None``: they are the leading ones
    _cut: Memo[Tensor] = field(default_factory=Memo)

    def values(self, name: str, stored: Tensor) -> Tensor:
        """Select the values of these edges; the same object for the same values."""
        position, end = self.position, self.csr.num_entries
        return self._cut.get(name, (stored,), lambda: stored[:end] if position is None else stored[position])


def _exact_backends() -> str:
    """Name the exact backends that need no other partition."""
    return names_of(lambda abilities: abilities.exact and abilities.placement == "nodes")


def _part_edges(around: Surroundings, hops: int) -> _PartEdges:
    """Cut surroundings to ``hops`` hops, as a partitioned graph with so many would hold them.

    The rows of the last hop keep only in-edges from nearer rows, and self-loops.
    """
    csr, end = around.adjacency.csr(), around.ends[hops]
    if hops == around.num_hops:
        return _PartEdges(csr, None)
    near = around.ends[max(hops - 1, 0)]
    row, index = csr.row_index(), csr.index[: int(csr.indptr[end])]
    row = row[: index.numel()]
    keep = (index < near) | (index == row)
    if hops:
        keep |= row < near
    position = keep.nonzero().squeeze(1)
    return _PartEdges(CSR(pointers(row[position], end), index[position].contiguous(), end), position)
