"""High-degree replicated first: a score for each part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, Place, VertexCut

__all__ = ["HDRFPartitioner"]


@dataclass(frozen=True, kw_only=True)
class HDRFPartitioner(BalancedEdgePartitioner):
    r"""Scores each part for an edge: for the replicas that it holds, those of low degree more, and for its room.

    HDRF (Petroni et al., CIKM 2015), with the degrees seen so far:

    .. math::
        C(u, v, p) = g(u, p) + g(v, p) + \lambda \frac{\max_q |p_q| - |p|}{1 + \max_q |p_q| - \min_q |p_q|}, \quad
        g(u, p) = [u \in p] \left(1 + \frac{d_v}{d_u + d_v}\right)

    One pass. The bound on a part's edges is ours; with :math:`\lambda > 1` it is hardly ever met.

    Args:
        seed: Of the draw of each node's owner.
        balance: The most edges of a part, over the mean; at least 1.
        balance_weight: The weight :math:`\lambda` of the room against the replicas.
    """

    balance_weight: float = 1.1

    name: ClassVar[str] = "hdrf"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.balance_weight < math.inf:
            raise InputError(f"hdrf: balance_weight is {self.balance_weight}, expected a finite number of at least 0")

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)
        seen = np.zeros(edges.num_nodes, dtype=np.int32)
        state = cut.native(self.capacity(edges, cut.num_parts))

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call("place_hdrf", chunk, state, self.balance_weight, seen, part)

        return place
