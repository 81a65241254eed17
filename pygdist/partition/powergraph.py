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
    """Assigns each edge to a part with both its nodes, or else to one with the node that has more edges to come.

    This is the greedy heuristic of PowerGraph (Gonzalez et al., OSDI 2012, Sec. 5.1): of two nodes in different parts,
    the one with more edges to come will be split again, so the edge goes to a part of that one. Among several parts the
    least loaded is taken. It takes two passes, the first to count degrees. The bound on a part's edges is not in the
    paper, as for Libra.

    Args:
        seed: Seed of the draw of each node's owner.
        balance: Most edges of a part relative to the mean; at least 1.
    """

    name: ClassVar[str] = "powergraph"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        return cut.placer("place_powergraph", cut.native(self.capacity(edges, cut.num_parts)), count_degrees(edges))
