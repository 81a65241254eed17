"""Degree-based hashing: cut the node that has many edges anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, count_degrees, require
from pygdist.partition.vertex_cut import EdgePartitioner, Place, VertexCut, marked

__all__ = ["DBHPartitioner"]


@dataclass(frozen=True, kw_only=True)
class DBHPartitioner(EdgePartitioner):
    """Gives each edge to the part that a hash of its end of lower degree names.

    DBH (Xie et al., NIPS 2014): the node with more edges is cut, as on a power-law graph it is in many parts anyway.
    Two passes; degrees are counted in the first. Of equal degrees the lower id counts.

    Args:
        seed: Another seed, another assignment.
    """

    name: ClassVar[str] = "dbh"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)
        degree = count_degrees(edges)

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call("place_dbh", chunk, degree, cut.num_parts, self.seed, part)

        return marked(cut, place)
