"""Finds hops over edges that are not the graph's: turned round, made by the model, or of nodes that it adds.

Edges of the graph, some of them, and self-loops are distributed. A rank holds the in-edges of its own nodes, so no rank
has all of any others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.hops.arguments import node_dim, tensors_of

TURNED = (
    "edges that are turned round, as by edge_index.flip(0) or to_undirected, but a rank holds the in-edges of its own "
    "nodes and not their reverses; pass edge_index as it is, and turn or mirror the edges in the graph before it is "
    "partitioned (torch_geometric.transforms.ToUndirected)"
)
MADE = (
    "edges that the graph does not have, but only edges of the graph, and self-loops, are distributed; put them into "
    "the graph before it is partitioned, and read out all nodes by MeanAggregation() or SumAggregation() as a module "
    "of the model"
)
OF_MORE_NODES = (
    "edges of nodes that the model adds, such as one that is joined to all others, but only the graph's own nodes "
    "are distributed; add such a node to the graph before it is partitioned (torch_geometric.transforms.VirtualNode), "
    "or use MeanAggregation() or SumAggregation() as a module of the model instead"
)
OF_COLUMNS = (
    "edges between columns, as its node_dim is the dimension of features, but only hops between nodes are distributed; "
    "a product with a matrix of these edges (x @ matrix) does the same in each row"
)


def reason_against(layer: MessagePassing, given: tuple[Any, ...], edges: Tensor, num_nodes: int) -> str:
    """Return a clause about edges that a hop gets and the graph does not have; empty if there are none.

    Args:
        layer: The layer.
        given: What the layer passes to ``propagate``: ``edge_index``, ``size``, and a dictionary of other arguments.
        edges: The edges of the graph, ``(2, E)``.
        num_nodes: Nodes of the graph.
    """
    edge_index, _, arguments = given
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided or edge_index.is_floating_point():
        return ""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.size(1) == 0:
        return ""
    if any(_has_nodes_elsewhere(layer, one, num_nodes) for one in tensors_of(arguments)):
        return OF_COLUMNS
    source, target = edge_index.to(edges.device)
    if int(edge_index.max()) >= num_nodes:
        return OF_MORE_NODES
    of_graph = edges[0] * num_nodes + edges[1]
    missing = ~torch.isin(source * num_nodes + target, of_graph) & (source != target)
    if not missing.any():
        return ""
    turned = torch.isin(target * num_nodes + source, of_graph)
    return TURNED if bool(turned[missing].all()) else MADE


def _has_nodes_elsewhere(layer: MessagePassing, rows: Tensor, num_nodes: int) -> bool:
    """True if a tensor has a row for each node, but not where its layer looks for nodes."""
    return rows.dim() > 1 and rows.size(0) == num_nodes != rows.size(node_dim(layer, rows))
