"""PyG's functions that count the edges of nodes, for ranks that have only some of the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric import utils
from torch_geometric.utils import degree

from pygdist.errors import InputError
from pygdist.graph.adjacency import Slot, edges_of
from pygdist.graph.memo import Memo
from pygdist.nn.norms import Ranks

_DEGREES = Slot[Memo[Tensor]]("degrees")


class Degrees:
    """PyG's ``degree``. A node's owner has all its in-edges, so degrees of other rows come from the owners."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def count(self, index: Tensor, num_nodes: Any = None, dtype: Any = None) -> Tensor:
        """Count the in-edges of nodes; see PyG's ``degree``."""
        edges = edges_of(index)
        if edges is None:
            here: Tensor = degree(index, num_nodes, dtype)
            return here
        slot = (num_nodes, dtype, self._ranks.alone)
        counted = edges.slot(_DEGREES, Memo).get(
            slot, (), lambda: self._ranks.whole_degrees(degree(index, num_nodes, dtype))
        )
        return counted.clone()  # people write into degrees: deg.pow_(-0.5)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(
            f"torch_geometric.utils.{name} tells something of all edges, but a rank has the in-edges of its own nodes; "
            "ask it of the whole graph before training"
        )

    return refuse


WHOLE_GRAPH: dict[Any, Callable[..., Any]] = {
    getattr(utils, name): _refused(name)
    for name in ("is_undirected", "contains_isolated_nodes", "contains_self_loops", "homophily", "assortativity")
}
"""PyG's functions that give one answer for the whole graph, and those that refuse in their place."""
