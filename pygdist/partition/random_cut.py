"""A hash of both ends of an edge: the baseline of vertex-cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.vertex_cut import EdgePartitioner, Place, VertexCut, marked

__all__ = ["RandomEdgePartitioner"]


@dataclass(frozen=True, kw_only=True)
class RandomEdgePartitioner(EdgePartitioner):
    """Gives each edge to the part that a hash of its two ends names: an edge and its reverse lie together.

    PowerGraph's random placement (Gonzalez et al., OSDI 2012, Sec. 5.1).

    Args:
        seed: Another seed, another assignment.
    """

    name: ClassVar[str] = "random"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call("place_random", chunk, cut.num_parts, self.seed, part)

        return marked(cut, place)
