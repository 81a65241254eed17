"""Degree-based hashing: an edge goes where its end of lower degree is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import PlaceEdges, count_degrees, require
from pygdist.partition.vertex_cut import EdgePartitioner, VertexCut


@dataclass(frozen=True, kw_only=True)
class DBHPartitioner(EdgePartitioner):
    """Assigns each edge to a part by a hash of its end of lower degree (of equal degrees, the end of lower id).

    DBH (Xie et al., NIPS 2014) splits nodes with many edges, which on a power-law graph are in many parts with any
    method. It takes two passes over the edges, the first to count degrees.

    Args:
        seed: Seed of the hash.
    """

    name: ClassVar[str] = "dbh"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        return cut.placer("place_dbh", count_degrees(edges), cut.num_parts, self.seed, adds=True)
