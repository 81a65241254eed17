"""The edges of one relation, for layers that go through relations: an :class:`~pygdist.graph.Adjacency` stays one.

PyG's function picks them from a list of edges in every epoch. Here they are picked once, and stay sorted by
destination, so that a relation's mean is one sparse product.

Types that change may leave a relation of one rank as it is, whose edges stay the same object there alone. Whether a
relation's edges are those of before is therefore asked of all ranks, by who decides by it what is exchanged
(:func:`of_relation`).
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index

from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.graph.memo import Memo
from pygdist.graph.self_loops import keep_entries
from pygdist.kernels import CSR

__all__ = ["KeptRelations", "of_relation"]

_OF_RELATION = Slot[bool]("picked for a relation")
_RELATIONS = Slot[Memo[Adjacency]]("edges of each relation")
_MOST_KEPT = 1024  # relations


class KeptRelations:
    """PyG's ``masked_edge_index`` on a shard's edges.

    Relations of which a rank has no edge look the same to it, but are as many to other ranks: each has edges of its
    own, told apart by the order in which a layer asks, so that ranks agree on what they have met before.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[int, bytes], int] = {}  # by the running layer: how often for the same edges

    def begin_layer(self) -> None:
        """Called before each ``forward`` of a layer."""
        self._asked.clear()

    def pick(self, edge_index: Any, edge_mask: Tensor) -> Any:
        """The edges where ``edge_mask``, ``(E,)`` bool, is true.

        Those of an adjacency are an adjacency in the same order, and are kept with it.
        """
        if not isinstance(edge_index, Adjacency) or edge_index.value is not None:
            return masked_edge_index(edge_index, edge_mask)
        mask = hashlib.blake2b(edge_mask.cpu().numpy().tobytes()).digest()
        turn = self._asked[id(edge_index.origin), mask] = self._asked.get((id(edge_index.origin), mask), -1) + 1
        relations = edge_index.slot(_RELATIONS, lambda: Memo(_MOST_KEPT))
        return relations.get((mask, turn), (), lambda: _picked(edge_index.csr(), edge_mask))


def _picked(csr: CSR, edge_mask: Tensor) -> Adjacency:
    edges = Adjacency.from_csr(keep_entries(csr, edge_mask))
    edges.slot(_OF_RELATION, lambda: True)
    return edges


def of_relation(edge_index: Any) -> bool:
    """Whether edges were picked, by what ranks may see different changes of."""
    return isinstance(edge_index, Adjacency) and edge_index.slot(_OF_RELATION) is not None
