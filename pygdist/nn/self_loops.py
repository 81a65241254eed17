"""Self-loops for layers that add their own: an :class:`~pygdist.graph.Adjacency` stays one.

PyG's functions append the loops to the edges, which then are no longer sorted by destination, and forget that they
were. The result is kept: on a fixed graph the loops are added once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.self_loops import insert_self_loops, is_self_loop, keep_entries

__all__ = ["KeptSelfLoops"]

_MOST_KEPT = 16  # results; what is kept longest goes first


class KeptSelfLoops:
    """PyG's functions that remove and add self-loops, with the edges of an adjacency in its own order."""

    def __init__(self) -> None:
        # by what was asked: the adjacency, kept so that its id stays its own, its successor, and which edges stayed
        self._kept: dict[tuple[object, ...], tuple[Adjacency, Adjacency, Tensor]] = {}
        # attributes without those of loops, by their identity and the edges', both kept, so that these stay their own
        self._attributes: dict[tuple[object, ...], tuple[Any, Tensor, Tensor]] = {}

    def clear(self) -> None:
        """Forget what was kept; called when the backend gets another graph."""
        self._kept.clear()
        self._attributes.clear()

    def remove(self, edge_index: Any, edge_attr: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """The edges between different nodes, and their attributes; see PyG."""
        if not isinstance(edge_index, Adjacency):
            result: tuple[Any, Tensor | None] = remove_self_loops(edge_index, edge_attr)
            return result
        slot = (id(edge_index), "remove")
        if slot not in self._kept:
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                csr = edge_index.csr()
                keep = ~is_self_loop(csr)
                without = edge_index if bool(keep.all()) else Adjacency.from_csr(keep_entries(csr, keep))
            self._keep(slot, (edge_index, without, keep))
        _, without, keep = self._kept[slot]
        if edge_attr is None or without is edge_index:
            return without, edge_attr
        return without, self._without_loops(edge_index, edge_attr, keep)

    def _without_loops(self, edge_index: Adjacency, edge_attr: Tensor, keep: Tensor) -> Tensor:
        """The same tensor for the same attributes, as on a rank without loops: what is kept for it is kept by all."""
        if not fixable(edge_attr):
            return edge_attr[keep]
        key = id(edge_index), *identity_of(edge_attr)
        if key not in self._attributes:
            if len(self._attributes) >= _MOST_KEPT:
                self._attributes.pop(next(iter(self._attributes)))
            with torch.inference_mode(False), torch.no_grad():
                self._attributes[key] = edge_index, edge_attr.detach(), edge_attr[keep]
        return self._attributes[key][2]

    def add(
        self, edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: Any = None
    ) -> tuple[Any, Tensor | None]:
        """The edges and a self-loop at each node, and their attributes; see PyG.

        Raises:
            InputError: If it is not said how many nodes there are.
        """
        return self._with_loops(add_self_loops, edge_index, edge_attr, fill_value, num_nodes)

    def add_remaining(
        self, edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: Any = None
    ) -> tuple[Any, Tensor | None]:
        """The edges and a self-loop at each node that has none, and their attributes; see PyG.

        Raises:
            InputError: If it is not said how many nodes there are.
        """
        return self._with_loops(add_remaining_self_loops, edge_index, edge_attr, fill_value, num_nodes)

    def _with_loops(
        self, pyg: Callable[..., Any], edge_index: Any, edge_attr: Tensor | None, fill_value: Any, num_nodes: Any
    ) -> tuple[Any, Tensor | None]:
        if num_nodes is None:
            raise InputError(
                f"{pyg.__name__} without num_nodes takes the highest node of all edges for the last one, which no rank "
                "knows; pass num_nodes=x.size(0)"
            )
        if not isinstance(edge_index, Adjacency) or not isinstance(num_nodes, int):
            result: tuple[Any, Tensor | None] = pyg(edge_index, edge_attr, fill_value, num_nodes)
            return result
        slot = (id(edge_index), pyg, num_nodes)
        if slot not in self._kept:
            with torch.inference_mode(False):
                csr = edge_index.csr()
                csr = csr if pyg is add_self_loops else keep_entries(csr, ~is_self_loop(csr))
                csr, is_loop = insert_self_loops(csr, num_nodes)
                looped = Adjacency.from_csr(csr)
            self._keep(slot, (edge_index, looped, is_loop))
        _, adjacency, is_loop = self._kept[slot]
        if edge_attr is None:
            return adjacency, None
        _, appended = pyg(edge_index.as_tensor(), edge_attr, fill_value, num_nodes)
        ordered = torch.empty_like(appended)
        ordered[~is_loop], ordered[is_loop] = appended[: -num_nodes or None], appended[appended.size(0) - num_nodes :]
        return adjacency, ordered

    def _keep(self, slot: tuple[object, ...], result: tuple[Adjacency, Adjacency, Tensor]) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[slot] = result
