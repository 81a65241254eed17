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
    """Arranges parts in a grid, draws a cell for each node, and keeps the node's edges in the cell's row and column.

    This is the constrained placement of GraphBuilder (Jain et al., GRADES 2013): at most rows + columns - 1 parts hold
    a node. A hash of the node draws its cell. A hash of the edge draws one of the parts that the rows and columns of
    both ends share. The grid is as square as the number of parts allows. For a prime number of parts the grid is one
    row, and does not limit the parts of a node.

    Args:
        seed: Seed of the hashes.
    """

    name: ClassVar[str] = "grid"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        rows = next(rows for rows in range(int(cut.num_parts**0.5), 0, -1) if cut.num_parts % rows == 0)
        return cut.placer("place_grid", rows, cut.num_parts // rows, self.seed, adds=True)
