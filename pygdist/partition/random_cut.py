"""Random placement of edges, the baseline of vertex-cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, require
from pygdist.partition.vertex_cut import EdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class RandomEdgePartitioner(EdgePartitioner):
    """Assigns each edge to a part by a hash of its two ends; an edge and its reverse go to the same part.

    This is PowerGraph's random placement (Gonzalez et al., OSDI 2012, Sec. 5.1).

    Args:
        seed: Seed of the hash.
    """

    name: ClassVar[str] = "random"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        return cut.placer("place_random", cut.num_parts, self.seed, adds=True)
