"""High-degree replicated first: a score for each part and edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, require
from pygdist.partition.base import check_number
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class HDRFPartitioner(BalancedEdgePartitioner):
    r"""Assigns each edge to the part of highest score: for holding the edge's nodes, and for having few edges.

    HDRF (Petroni et al., CIKM 2015) computes the score from the degrees seen so far; a node of low degree counts more:

    .. math::
        C(u, v, p) = g(u, p) + g(v, p) + \lambda \frac{\max_q |p_q| - |p|}{1 + \max_q |p_q| - \min_q |p_q|}, \quad
        g(u, p) = [u \in p] \left(1 + \frac{d_v}{d_u + d_v}\right)

    It takes one pass over the edges. The limit on a part's edges is not in the paper, and rarely matters with
    :math:`\lambda > 1`.

    Args:
        seed: Seed of the hash that draws each node's owner from the node's parts.
        balance: Largest number of edges in a part, relative to the mean; at least 1.
        balance_weight: Weight :math:`\lambda` of balance in the score, relative to the weight of holding an edge's
            nodes.
    """

    balance_weight: float = 1.1

    name: ClassVar[str] = "hdrf"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "balance_weight", 0)

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        seen = np.zeros(edges.num_nodes, dtype=np.int32)
        return cut.placer("place_hdrf", cut.native(self.capacity(edges, cut.num_parts)), self.balance_weight, seen)
