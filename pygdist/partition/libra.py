"""Libra: an edge goes to the least loaded of the parts that hold its nodes; nodes with many edges are split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, count_degrees, require
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class LibraPartitioner(BalancedEdgePartitioner):
    """Assigns each edge to the least loaded part that holds both its nodes, or, if there is none, one of them.

    This is the partitioner of DistGNN (Md et al., SC 2021, Sec. 5.1). If no part has both nodes, an edge goes to a part
    that has the node with fewer edges, as in the authors' code; the paper says of this case only that the part is least
    loaded. It takes two passes, the first to count degrees. The bound on a part's edges is not in the paper: without it
    a stream that is sorted by node ends up in one part.

    Args:
        by_degree: ``False`` takes the least loaded part of either node instead, in one pass; more nodes are split.
        seed: Seed of the draw of each node's owner.
        balance: Most edges of a part relative to the mean; at least 1.
    """

    name: ClassVar[str] = "libra"
    by_degree: bool = True

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        degree = count_degrees(edges) if self.by_degree else None
        return cut.placer("place_libra", cut.native(self.capacity(edges, cut.num_parts)), degree)
