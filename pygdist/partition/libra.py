"""Libra: an edge goes to the part with fewest edges among the parts that hold its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, count_degrees, require
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class LibraPartitioner(BalancedEdgePartitioner):
    """Assigns each edge to the part with fewest edges among the parts that hold both its nodes, or else one of them.

    This is the partitioner of DistGNN (Md et al., SC 2021, Sec. 5.1). If no part holds both nodes, the edge goes to a
    part of the node with lower degree, as in the authors' code; for this case the paper asks only for a part with few
    edges. The method takes two passes over the edges, the first to count degrees. The limit on a part's edges is not in
    the paper: without it, all edges of a stream that is sorted by node would go to one part.

    Args:
        by_degree: If no part holds both nodes of an edge, take a part of the node with lower degree. With ``False``,
            take the part with fewest edges that holds either node; this needs one pass less, and splits more nodes.
        seed: Seed of the hash that draws each node's owner from the node's parts.
        balance: Largest number of edges in a part, relative to the mean; at least 1.
    """

    name: ClassVar[str] = "libra"
    by_degree: bool = True

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        degree = count_degrees(edges) if self.by_degree else None
        return cut.placer("place_libra", cut.native(self.capacity(edges, cut.num_parts)), degree)
