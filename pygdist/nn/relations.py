"""The edges of one relation, for layers that go through relations: an :class:`~pygdist.graph.Adjacency` stays one.

PyG's function picks them from a list of edges in every epoch. Here they are picked once, and stay sorted by
destination, so that a relation's mean is one sparse product.

Types that change may leave a relation of one rank as it is, whose edges stay the same object there alone. Whether a
relation's edges are those of before is therefore asked of all ranks, by who decides by it what is exchanged
(:func:`of_relation`).
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index

from pygdist.graph import Adjacency
from pygdist.graph.self_loops import keep_entries

__all__ = ["KeptRelations", "of_relation"]

_OF_RELATION = "of a relation"
_MOST_KEPT = 1024  # relations; what is kept longest goes first


class KeptRelations:
    """PyG's ``masked_edge_index`` on a shard's edges.

    Relations of which a rank has no edge look the same to it, but are as many to other ranks: each has edges of its
    own, told apart by the order in which a layer asks, so that ranks agree on what they have met before.
    """

    def __init__(self) -> None:
        self._asked: dict[tuple[int, int], int] = {}  # by the running layer: how often for the same edges

    def begin_layer(self) -> None:
        """Called before each ``forward`` of a layer."""
        self._asked.clear()

    def pick(self, edge_index: Any, edge_mask: Tensor) -> Any:
        """The edges where ``edge_mask``, ``(E,)`` bool, is true.

        Those of an adjacency are an adjacency in the same order, and are kept with it.
        """
        if not isinstance(edge_index, Adjacency) or edge_index.value is not None:
            return masked_edge_index(edge_index, edge_mask)
        known: dict[tuple[int, int], tuple[Tensor, Adjacency]] = edge_index.derived.setdefault("relations", {})
        mask = zlib.crc32(edge_mask.cpu().numpy().tobytes())
        turn = self._asked[id(edge_index.origin), mask] = self._asked.get((id(edge_index.origin), mask), -1) + 1
        slot = mask, turn
        if slot not in known or not torch.equal(known[slot][0], edge_mask):
            if slot not in known and len(known) >= _MOST_KEPT:
                known.pop(next(iter(known)))
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                made = Adjacency.from_csr(keep_entries(edge_index.csr(), edge_mask))
                made.derived[_OF_RELATION] = True
                known[slot] = edge_mask.clone(), made
        return known[slot][1]


def of_relation(edge_index: Any) -> bool:
    """Whether edges were picked, by what ranks may see different changes of."""
    return isinstance(edge_index, Adjacency) and _OF_RELATION in edge_index.origin.derived
