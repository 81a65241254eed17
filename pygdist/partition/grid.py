"""Two-dimensional hashing: no node is in more parts than a row and a column of a grid have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.vertex_cut import EdgePartitioner, Place, VertexCut, marked

__all__ = ["GridPartitioner"]


@dataclass(frozen=True, kw_only=True)
class GridPartitioner(EdgePartitioner):
    """Parts form a grid; a node's hash names one of them, and its edges lie in that one's row and column.

    The constrained placement of GraphBuilder (Jain et al., GRADES 2013), which bounds a node's replicas by rows +
    columns - 1. An edge goes to one of the parts that both ends' rows and columns share, drawn by its own hash. The
    grid has the most rows, at most as many as columns, that divide the number of parts: for a prime it is one row, and
    the bound says nothing.

    Args:
        seed: Another seed, another assignment.
    """

    name: ClassVar[str] = "grid"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)
        rows = next(rows for rows in range(int(cut.num_parts**0.5), 0, -1) if cut.num_parts % rows == 0)

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call("place_grid", chunk, rows, cut.num_parts // rows, self.seed, part)

        return marked(cut, place)
