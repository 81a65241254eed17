"""Self-loops for layers that add their own: an :class:`~pygdist.graph.Adjacency` stays one.

PyG's functions append the loops to the edges, which then are no longer sorted by destination, and forget that they
were. The result is kept: on a fixed graph the loops are added, and the edges sorted, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_self_loops, remove_self_loops

from pygdist.graph import Adjacency

__all__ = ["KeptSelfLoops"]


class KeptSelfLoops:
    """PyG's ``remove_self_loops`` and ``add_self_loops``, with the edges of an adjacency in its own order."""

    def __init__(self) -> None:
        # the adjacency that was asked about is kept too, so that its id stays its own
        self._kept: dict[tuple[object, ...], tuple[Adjacency, Adjacency, Tensor]] = {}

    def clear(self) -> None:
        """Forget what was kept; called when the backend gets another graph."""
        self._kept.clear()

    def remove(self, edge_index: Any, edge_attr: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """The edges between different nodes, and their attributes; see PyG."""
        if not isinstance(edge_index, Adjacency):
            result: tuple[Any, Tensor | None] = remove_self_loops(edge_index, edge_attr)
            return result
        slot = (id(edge_index), "remove")
        if slot not in self._kept:
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                edges = edge_index.as_tensor()
                chosen = (edges[0] != edges[1]).nonzero().squeeze(1)
                kept = edge_index
                if chosen.numel() < edges.size(1):
                    kept = Adjacency(edges[:, chosen], num_src=edge_index.num_src, num_dst=edge_index.num_dst)
                self._kept[slot] = (edge_index, kept, chosen if kept is not edge_index else chosen[:0])
        _, kept, chosen = self._kept[slot]
        return kept, edge_attr if edge_attr is None or kept is edge_index else edge_attr.index_select(0, chosen)

    def add(
        self, edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: Any = None
    ) -> tuple[Any, Tensor | None]:
        """The edges and a self-loop at each node, and their attributes; see PyG."""
        if not isinstance(edge_index, Adjacency) or not isinstance(num_nodes, int):
            result: tuple[Any, Tensor | None] = add_self_loops(edge_index, edge_attr, fill_value, num_nodes)
            return result
        slot = (id(edge_index), "add", num_nodes)
        if slot not in self._kept:
            with torch.inference_mode(False):
                edges, _ = add_self_loops(edge_index.as_tensor(), num_nodes=num_nodes)
                sizes = {"num_src": edge_index.num_src, "num_dst": edge_index.num_dst}
                self._kept[slot] = (edge_index, *Adjacency.from_unsorted(edges, **sizes))
        _, adjacency, perm = self._kept[slot]
        if edge_attr is not None:
            _, edge_attr = add_self_loops(edge_index.as_tensor(), edge_attr, fill_value, num_nodes)
            edge_attr = None if edge_attr is None else edge_attr.index_select(0, perm)
        return adjacency, edge_attr
