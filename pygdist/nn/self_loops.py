"""Self-loops for layers that add their own; an :class:`~pygdist.graph.Adjacency` with loops is an adjacency again.

PyG's functions append the loops, so the edges are no longer sorted by destination. The functions here keep the order.
Results are kept: on a fixed graph the loops are added once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops, scatter

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.memo import Memo
from pygdist.graph.self_loops import NO_LOOPS, insert_self_loops, is_self_loop, keep_entries
from pygdist.kernels.csr import narrowest
from pygdist.nn.norms import Ranks

_MOST_KEPT = 16  # results


class KeptSelfLoops:
    """PyG's functions that remove and add self-loops; the edges of an adjacency keep their order.

    Adding without ``num_nodes`` raises an :class:`~pygdist.errors.InputError`: no rank knows the largest id of all.

    A result is kept together with the edges from which it was made. Removing loops returns a new object on all ranks or
    on none: a rank without loops asks the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # by edges and function: the new edges, and a mask of the edges that stayed or were added
        self._edges = Memo[tuple[Adjacency, Tensor]](_MOST_KEPT)
        self._places = Memo[Tensor](_MOST_KEPT)  # of attributes, by mask: a GPU is not waited for again
        self._attributes = Memo[Tensor](_MOST_KEPT)  # of the edges without loops

    def clear(self) -> None:
        """Forget all results; called when the backend gets another graph."""
        self._edges.clear()
        self._places.clear()
        self._attributes.clear()

    def remove(self, edge_index: Any, edge_attr: Tensor | None = None) -> tuple[Any, Tensor | None]:
        """Remove self-loops from edges and their attributes; see PyG's ``remove_self_loops``."""
        if not isinstance(edge_index, Adjacency):
            result: tuple[Any, Tensor | None] = remove_self_loops(edge_index, edge_attr)
            return result
        slot = id(edge_index), "remove"
        without, stays = self._edges.get(slot, (edge_index,), lambda: self._without_loops(edge_index))
        if edge_attr is None:
            return without, None
        if without is edge_index:  # a copy, as of PyG: what changes it must not change the graph
            if not fixable(edge_attr):
                return without, edge_attr.clone()
            key = id(edge_index), *identity_of(edge_attr)
            return without, self._attributes.get(key, (edge_index, edge_attr), edge_attr.clone)
        places = self._places.get(slot, (stays,), lambda: _places_of(stays))
        if not fixable(edge_attr):
            return without, edge_attr.index_select(0, places)
        # the same attributes give the same tensor, as on ranks without loops, so that all ranks keep the same results
        key = id(edge_index), *identity_of(edge_attr)
        return without, self._attributes.get(key, (edge_index, edge_attr), lambda: edge_attr.index_select(0, places))

    def add(
        self, edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: Any = None
    ) -> tuple[Any, Tensor | None]:
        """Add a self-loop at each node; see PyG's ``add_self_loops``."""
        return self._with_loops(add_self_loops, edge_index, edge_attr, fill_value, num_nodes)

    def add_remaining(
        self, edge_index: Any, edge_attr: Tensor | None = None, fill_value: Any = None, num_nodes: Any = None
    ) -> tuple[Any, Tensor | None]:
        """Add a self-loop at each node that has none; see PyG's ``add_remaining_self_loops``."""
        return self._with_loops(add_remaining_self_loops, edge_index, edge_attr, fill_value, num_nodes)

    def _without_loops(self, edges: Adjacency) -> tuple[Adjacency, Tensor]:
        """Return the edges between different nodes, and the mask of these edges."""
        csr = edges.csr()
        stays = ~is_self_loop(csr)
        any_loops = self._ranks.max_over_ranks(int(not (edges.slot(NO_LOOPS) or stays.all()))) > 0
        return Adjacency.from_csr(keep_entries(csr, stays)) if any_loops else edges, stays

    def _with_loops(
        self, pyg: Callable[..., Any], edge_index: Any, edge_attr: Tensor | None, fill_value: Any, num_nodes: Any
    ) -> tuple[Any, Tensor | None]:
        if num_nodes is None:
            raise InputError(
                f"{pyg.__name__} without num_nodes takes the number of nodes from the largest id of all edges, which "
                "no rank knows; pass num_nodes=x.size(0)"
            )
        if not isinstance(edge_index, Adjacency) or not isinstance(num_nodes, int):
            if isinstance(num_nodes, int):
                num_nodes = num_rows_with_loops(self._ranks, num_nodes)
            result: tuple[Any, Tensor | None] = pyg(edge_index, edge_attr, fill_value, num_nodes)
            return result
        num_rows, num_nodes = num_nodes, num_rows_with_loops(self._ranks, num_nodes)
        slot = id(edge_index), pyg, num_nodes
        adjacency, is_loop = self._edges.get(
            slot, (edge_index,), lambda: _with_loops(edge_index, num_nodes, replace=pyg is add_remaining_self_loops)
        )
        if edge_attr is None:
            return adjacency, None
        whole = None
        if isinstance(fill_value, str) and self._ranks.splits_nodes:
            whole, fill_value = self._filled(edge_index, edge_attr, num_rows, fill_value)[:num_nodes], 0.0
        _, appended = pyg(edge_index.as_tensor(), edge_attr, fill_value, num_nodes)
        if whole is not None:
            appended = _with_values(appended, whole, edge_index, replaced=pyg is add_remaining_self_loops)
        places = self._places.get(slot, (is_loop,), lambda: _places_among(is_loop, num_nodes))
        return adjacency, appended.index_select(0, places)

    def _filled(self, edges: Adjacency, edge_attr: Tensor, num_rows: int, reduce: str) -> Tensor:
        """Reduce the attributes of each row's in-edges in all parts, as PyG does for loops that it adds."""
        if reduce not in ("add", "sum", "mean"):
            raise InputError(
                f"fill_value='{reduce}' of self-loops cannot be put together from the edges of several parts; "
                "'add' and 'mean' can"
            )
        target = edges.as_tensor()[1]
        total = self._ranks.sums_of_parts(scatter(edge_attr, target, 0, num_rows, "sum"))
        if reduce != "mean":
            return total
        count = self._ranks.sums_of_parts(edges.csr().indptr.diff().to(total.dtype))
        return total / count.clamp(min=1).view(-1, *[1] * (total.dim() - 1))


def num_rows_with_loops(ranks: Ranks, num_rows: int) -> int:
    """Return the number of rows, among the first ``num_rows``, that get a self-loop: all, or the owned ones.

    PyG adds one loop to each node. A split node has a row in each of its parts, so only the owner's row gets the loop.
    """
    split = ranks.splits_nodes and not ranks.alone
    return ranks.owned_rows(torch.empty(num_rows, 0)).size(0) if split else num_rows


def _with_values(appended: Tensor, values: Tensor, edges: Adjacency, *, replaced: bool) -> Tensor:
    """Give loops at the end of ``appended`` these values; ``replaced`` loops keep the attributes that they had."""
    new = torch.ones(values.size(0), dtype=torch.bool, device=values.device)
    if replaced:
        csr = edges.csr()
        new[csr.index[is_self_loop(csr)].long()] = False
    first = appended.size(0) - values.size(0)
    loops = torch.where(new.view(-1, *[1] * (values.dim() - 1)), values.to(appended), appended[first:])
    return torch.cat([appended[:first], loops])


def _with_loops(edges: Adjacency, num_nodes: int, *, replace: bool) -> tuple[Adjacency, Tensor]:
    """Add a self-loop at each node, and return the edges and the mask of new loops; ``replace`` drops existing ones."""
    csr = edges.csr()
    csr, is_loop = insert_self_loops(keep_entries(csr, ~is_self_loop(csr)) if replace else csr, num_nodes)
    return Adjacency.from_csr(csr), is_loop


def _places_of(mask: Tensor) -> Tensor:
    """Return the places where a mask is true, rising; the host waits for a GPU."""
    return mask.nonzero().squeeze(1).to(narrowest(mask.numel()))


def _places_among(is_loop: Tensor, num_loops: int) -> Tensor:
    """Return for each edge the place of its attribute in PyG's order, in which the loops that it adds come last."""
    num_others = is_loop.numel() - num_loops
    places = is_loop.new_empty(is_loop.numel(), dtype=narrowest(is_loop.numel()))
    places[~is_loop] = torch.arange(num_others, dtype=places.dtype, device=places.device)
    places[is_loop] = torch.arange(num_others, is_loop.numel(), dtype=places.dtype, device=places.device)
    return places
