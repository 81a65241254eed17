"""Doubles of published graphs in memory, equal to the files that ``pygdist generate`` writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pygdist.errors import InputError
from pygdist.graph.generated.edges import EdgeGenerator
from pygdist.graph.generated.nodes import NodeGenerator
from pygdist.graph.generated.published import PUBLISHED, RelationFacts, published_graph

HOMOGENEOUS = tuple(name for name, graph in PUBLISHED.items() if not graph.is_heterogeneous)
HETEROGENEOUS = tuple(name for name, graph in PUBLISHED.items() if graph.is_heterogeneous)

_CHUNK_EDGES = 1 << 20
_NODES, _EDGES = 0x6E6F6465, 0x65646765  # keep the seeds of all types of nodes and edges apart


class GraphGenerator:
    """A random graph with the figures of a published graph at a scale; its arrays are generated while they are read.

    Edges are drawn independently, so some are duplicates, more of them in smaller graphs: of ``reddit-like`` 2% at
    scale 0.5, 6% at 0.1, 20% at 0.02; of ``products-like`` 0.5% at 0.2, 0.8% at 0.1, 3% at 0.02, 11% at 0.005; of
    ``papers-like`` 0.2% at 0.01. A few are loops: 0.07% and 0.03% of the first two at 0.1. The options
    ``remove_duplicates`` and ``remove_self_loops`` of :func:`pygdist.graph.prepare` remove them.

    The same arguments give the same numbers. A processor that rounds the last bit of a power differently moves about
    one end of an edge in a billion.

    Args:
        name: A name in :data:`pygdist.graph.generated.published.PUBLISHED`.
        scale: Factor on the published numbers of nodes and edges.
        seed: Seed, at least 0.
        features: Generate features.
        wrong_labels: Share of the nodes whose label is that of another class. With 0.07 a GCN is about as accurate on
            ``reddit-like`` as models are on Reddit, with 0.22 on ``products-like`` as on ogbn-products.

    Attributes:
        facts: The figures at that scale.
        nodes: Nodes by type.
        edges: Edges by type.
        arguments: Name, scale, seed, features and wrong labels, if any, which tell this graph from others.

    Raises:
        InputError: If an argument is out of range.
    """

    def __init__(
        self, name: str, *, scale: float = 1.0, seed: int = 0, features: bool = True, wrong_labels: float = 0.0
    ) -> None:
        if seed < 0:
            raise InputError(f"{name}: seed is {seed}, expected at least 0")
        if not 0 <= wrong_labels < 1:
            raise InputError(f"{name}: wrong_labels is {wrong_labels}, expected a share of the nodes from 0, below 1")
        self.facts = published_graph(name, scale)
        self.arguments: dict[str, Any] = {"name": name, "scale": float(scale), "seed": seed, "features": features}
        if wrong_labels:  # folders of before are those without
            self.arguments["wrong_labels"] = float(wrong_labels)
        self.nodes = {
            kind: NodeGenerator(facts, features=features, seed=_seed(seed, _NODES, number), wrong_labels=wrong_labels)
            for number, (kind, facts) in enumerate(self.facts.nodes.items())
        }
        self.edges = {relation.key: EdgeGenerator(**self.edge_arguments(relation)) for relation in self.facts.relations}

    def edge_arguments(self, relation: RelationFacts) -> dict[str, Any]:
        """Return the arguments of a relation's :class:`~pygdist.graph.EdgeGenerator`."""
        nodes = self.facts.nodes
        ends = nodes[relation.source].num_nodes, nodes[relation.target].num_nodes
        return {
            "num_nodes": ends,
            "num_edges": relation.num_edges,
            # a community for each class of the graph, or for each node if there are fewer nodes
            "num_communities": min(*ends, max(facts.num_classes for facts in nodes.values())),
            "inside": relation.inside,
            "exponent": relation.exponent,
            "undirected": relation.undirected,
            "seed": _seed(self.arguments["seed"], _EDGES, self.facts.relations.index(relation)),
        }


def generate_data(
    name: str, *, scale: float = 1.0, seed: int = 0, features: bool = True, wrong_labels: float = 0.0
) -> Data:
    """Generate an imitation of a published homogeneous graph; ``load_graph(name, ...)`` calls this function.

    Arguments and errors are those of :class:`GraphGenerator`.

    Returns:
        ``edge_index`` (int64, in no order), ``x`` (float32), ``y`` (int64, -1 = unlabelled), ``train_mask``,
        ``val_mask``, ``test_mask``.
    """
    graph = GraphGenerator(name, scale=scale, seed=seed, features=features, wrong_labels=wrong_labels)
    ((nodes,), (edges,)) = graph.nodes.values(), graph.edges.values()
    return Data(edge_index=_edge_index(edges), num_nodes=nodes.num_nodes, **_fields(nodes))


def generate_hetero(
    name: str, *, scale: float = 1.0, seed: int = 0, features: bool = True, wrong_labels: float = 0.0
) -> HeteroData:
    """Generate an imitation of a published heterogeneous graph; :func:`pygdist.graph.load_hetero` calls this function.

    Arguments and errors are those of :class:`GraphGenerator`.

    Returns:
        ``num_nodes`` of each type of nodes, and the arrays of :func:`generate_data` that the type has; ``edge_index``
        of each type of edges.
    """
    graph = GraphGenerator(name, scale=scale, seed=seed, features=features, wrong_labels=wrong_labels)
    data = HeteroData()
    for kind, nodes in graph.nodes.items():
        data[kind].num_nodes = nodes.num_nodes
        data[kind].update(_fields(nodes))
    for key, edges in graph.edges.items():
        data[key].edge_index = _edge_index(edges)
    return data


def _fields(nodes: NodeGenerator) -> dict[str, Tensor]:
    arrays = {name: np.empty(shape, dtype=dtype) for name, (dtype, shape) in nodes.arrays.items()}
    for start in nodes.starts:
        for name, block in nodes.read(start).items():
            arrays[name][start : start + len(block)] = block
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _edge_index(edges: EdgeGenerator) -> Tensor:
    edge_index = np.empty((2, edges.num_edges), dtype=np.int64)
    for start in range(0, edges.num_edges, _CHUNK_EDGES):
        stop = min(start + _CHUNK_EDGES, edges.num_edges)
        edge_index[:, start:stop] = edges.read(start, stop)
    return torch.from_numpy(edge_index)


def _seed(seed: int, tag: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, tag, number)).generate_state(1, np.uint64)[0])
