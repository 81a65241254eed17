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
    r"""Assigns each edge to the part of highest score: for holding its nodes (low degrees count more), and for room.

    HDRF (Petroni et al., CIKM 2015) scores with the degrees seen so far:

    .. math::
        C(u, v, p) = g(u, p) + g(v, p) + \lambda \frac{\max_q |p_q| - |p|}{1 + \max_q |p_q| - \min_q |p_q|}, \quad
        g(u, p) = [u \in p] \left(1 + \frac{d_v}{d_u + d_v}\right)

    It takes one pass. The bound on a part's edges is not in the paper; with :math:`\lambda > 1` it rarely matters.

    Args:
        seed: Seed of the draw of each node's owner.
        balance: Most edges of a part relative to the mean; at least 1.
        balance_weight: Weight :math:`\lambda` of a part's room, relative to the nodes that it holds already.
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
