"""Two-dimensional hashing: the parts that hold a node are in one row and one column of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, require
from pygdist.partition.vertex_cut import EdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class GridPartitioner(EdgePartitioner):
    """Arranges parts in a grid; the edges of a node lie in the row and the column of a cell drawn by the node's hash.

    The constrained placement of GraphBuilder (Jain et al., GRADES 2013) bounds a node's replicas by rows + columns - 1.
    An edge goes to one of the parts that the rows and columns of both its ends share, drawn by the edge's hash. The
    grid is as square as the number of parts allows; for a prime it is one row, and the bound says nothing.

    Args:
        seed: Seed of the hashes.
    """

    name: ClassVar[str] = "grid"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        rows = next(rows for rows in range(int(cut.num_parts**0.5), 0, -1) if cut.num_parts % rows == 0)
        return cut.placer("place_grid", rows, cut.num_parts // rows, self.seed, adds=True)
