"""Small graphs that reveal bugs: directed, skewed, with isolated nodes, empty parts, parts without training nodes."""

from __future__ import annotations

import numpy as np
import torch
from torch_geometric.data import Data


def random_graph(
    kind: str = "directed", *, num_nodes: int = 37, num_features: int = 5, num_classes: int = 3, seed: int = 0
) -> tuple[Data, dict[int, np.ndarray]]:
    """Make a graph and, for each world size up to 5, the part of each node.

    Args:
        kind: One of :data:`GRAPHS`. ``directed``: uniform random edges with self-loops and duplicates; ``power-law``:
            symmetric with hubs; ``isolated``: a third of the nodes has no edge; ``empty-part``: the last part of each
            partition owns no node; ``no-train-part``: the last part owns no training node.
        num_nodes: Number of nodes.
        num_features: Number of columns of ``x``, which is float64.
        num_classes: Number of classes of the labels; some nodes are unlabelled (-1).
        seed: Seed of all random numbers.

    Returns:
        The graph, and ``{world_size: part}`` with ``part`` of shape ``(num_nodes,)``. The graph has ``edge_weight``
        ``(E,)``, ``edge_attr`` ``(E, 4)`` and two edge types. Its edges are sorted by destination, because the results
        of some aggregations (LSTM) depend on the order of messages.

    Raises:
        ValueError: If ``kind`` is unknown.
    """
    if kind not in GRAPHS:
        raise ValueError(f"kind is '{kind}', expected one of {', '.join(GRAPHS)}")
    rng = np.random.default_rng([seed, GRAPHS.index(kind)])
    num_edges = 4 * num_nodes
    if kind == "power-law":
        skew = np.arange(1, num_nodes + 1) ** -0.8
        ends = rng.choice(num_nodes, (2, num_edges // 2), p=skew / skew.sum())
        edges = np.concatenate([ends, ends[::-1]], axis=1)
    else:
        nodes = num_nodes * 2 // 3 if kind == "isolated" else num_nodes
        edges = rng.integers(0, max(nodes, 1), (2, num_edges))
    edges = edges[:, np.argsort(edges[1], kind="stable")]
    part = {world_size: rng.integers(0, world_size, num_nodes) for world_size in (1, 2, 3, 4)}
    train = rng.random(num_nodes) < 0.6
    train[rng.integers(num_nodes)] = True
    y = rng.integers(0, num_classes, num_nodes)
    y[(rng.random(num_nodes) < 0.1) & ~train] = -1
    edge_attr = torch.from_numpy(rng.standard_normal((num_edges, 4)))
    data = Data(
        x=torch.from_numpy(rng.standard_normal((num_nodes, num_features))),
        edge_index=torch.from_numpy(edges),
        edge_weight=torch.from_numpy(rng.random(num_edges) + 0.1),
        edge_attr=edge_attr,
        edge_type=(edge_attr[:, 0] > 0).long(),
        y=torch.from_numpy(y),
        train_mask=torch.from_numpy(train),
        val_mask=torch.from_numpy(~train & (y >= 0)),
        test_mask=torch.from_numpy(~train & (y >= 0)),
        num_nodes=num_nodes,
    )
    part[5] = rng.integers(0, 5, num_nodes)
    for world_size, owner in part.items():
        if kind == "empty-part" and world_size > 1:
            owner[owner == world_size - 1] = 0
    if kind == "no-train-part":
        for world_size in (2, 3, 4, 5):
            part[world_size] = np.where(train, part[world_size] % (world_size - 1), world_size - 1)
    return data, part


def random_edge_part(kind: str, num_edges: int, world_size: int, *, seed: int = 0) -> np.ndarray:
    """Draw the part of each edge, for graphs of :func:`random_graph`; with ``no-train-part`` the last part has none."""
    parts = world_size - 1 if kind == "no-train-part" and world_size > 1 else world_size
    return np.random.default_rng([seed, world_size]).integers(0, parts, num_edges)


#: Largest world size of :func:`random_graph`.
MOST_RANKS = 5

#: Kinds of graphs for :func:`random_graph`.
GRAPHS = ("directed", "power-law", "isolated", "empty-part", "no-train-part")
