"""PowerGraph's greedy vertex-cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, count_degrees, require
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, Place, VertexCut

__all__ = ["PowerGraphPartitioner"]


@dataclass(frozen=True, kw_only=True)
class PowerGraphPartitioner(BalancedEdgePartitioner):
    """Gives each edge to a part that holds both its nodes; else one that holds the node with more edges to come.

    The greedy heuristic of PowerGraph (Gonzalez et al., OSDI 2012, Sec. 5.1): of two nodes in different parts the one
    with more edges to come will be cut again, so the edge goes where that one is. Among several parts the least loaded
    counts. Two passes; degrees are counted in the first. The bound on a part's edges is ours, as for Libra.

    Args:
        seed: Of the draw of each node's owner.
        balance: The most edges of a part, over the mean; at least 1.
    """

    name: ClassVar[str] = "powergraph"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)
        left = count_degrees(edges)
        state = cut.native(self.capacity(edges, cut.num_parts))

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call("place_powergraph", chunk, state, left, part)

        return place
