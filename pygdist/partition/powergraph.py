"""PowerGraph's greedy vertex-cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, count_degrees, require
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class PowerGraphPartitioner(BalancedEdgePartitioner):
    """Assigns each edge to a part with both its nodes, or else to a part of the node with more edges to come.

    This is the greedy heuristic of PowerGraph (Gonzalez et al., OSDI 2012, Sec. 5.1). If the two nodes are in different
    parts, the node with more edges to come has more chances to reach another part later, so the edge goes to a part of
    this node. Among several parts the edge goes to the part with fewest edges. The method takes two passes over the
    edges, the first to count degrees. The limit on a part's edges is not in the paper; Libra has the same limit.

    Args:
        seed: Seed of the hash that draws each node's owner from the node's parts.
        balance: Largest number of edges in a part, relative to the mean; at least 1.
    """

    name: ClassVar[str] = "powergraph"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        return cut.placer("place_powergraph", cut.native(self.capacity(edges, cut.num_parts)), count_degrees(edges))
