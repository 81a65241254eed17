"""The edges of one relation, for layers that loop over relations, as an :class:`~pygdist.graph.Adjacency`.

PyG's function picks them from the list of edges in every epoch. Here they are picked once, and stay sorted by
destination, so that a relation's mean is one sparse product.

If edge types change, some ranks may see the same edges of a relation as before, and others new ones. So code that
decides by the identity of a relation's edges what to exchange must ask all ranks (:func:`of_relation`).
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

_OF_RELATION = Slot[bool]("picked for a relation")
_RELATIONS = Slot[Memo[Adjacency]]("edges of each relation")
_MOST_KEPT = 1024  # relations


class KeptRelations:
    """PyG's ``masked_edge_index`` on a shard's edges.

    All relations without edges on a rank have the same mask, but other ranks may have edges of them. So equal masks in
    one ``forward`` of a layer get different adjacencies, by their order, and all ranks keep as many.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[int, bytes], int] = {}  # uses of the same edges and mask by the running layer, less one

    def begin_layer(self) -> None:
        """Start to count equal masks; called before each ``forward`` of a layer."""
        self._turns.clear()

    def pick(self, edge_index: Any, edge_mask: Tensor) -> Any:
        """Return the edges where ``edge_mask``, ``(E,)`` bool, is true.

        For an adjacency the result is an adjacency in the same order, which is kept with it.
        """
        if not isinstance(edge_index, Adjacency) or edge_index.value is not None:
            return masked_edge_index(edge_index, edge_mask)
        mask = hashlib.blake2b(edge_mask.cpu().numpy().tobytes()).digest()
        key = id(edge_index.origin), mask
        turn = self._turns[key] = self._turns.get(key, -1) + 1
        relations = edge_index.slot(_RELATIONS, lambda: Memo(_MOST_KEPT))
        return relations.get((mask, turn), (), lambda: _picked(edge_index.csr(), edge_mask))


def _picked(csr: CSR, edge_mask: Tensor) -> Adjacency:
    edges = Adjacency.from_csr(keep_entries(csr, edge_mask))
    edges.slot(_OF_RELATION, lambda: True)
    return edges


def of_relation(edge_index: Any) -> bool:
    """True for the edges of a relation, which may be the same as before on some ranks and new on others."""
    return isinstance(edge_index, Adjacency) and edge_index.slot(_OF_RELATION) is not None
