"""Libra: the least loaded of the parts that know the nodes of an edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, Place, VertexCut

__all__ = ["LibraPartitioner"]


@dataclass(frozen=True, kw_only=True)
class LibraPartitioner(BalancedEdgePartitioner):
    """Gives each edge to the least loaded relevant part: one that holds both its nodes, else one that holds either.

    The partitioner of DistGNN (Md et al., SC 2021, Sec. 5.1). One pass. The bound on a part's edges is ours: without it
    a stream that follows the structure, as one sorted by node does, ends in one part.

    Args:
        seed: Of the draw of each node's owner.
        balance: The most edges of a part, over the mean; at least 1.
    """

    name: ClassVar[str] = "libra"

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)
        state = cut.native(self.capacity(edges, cut.num_parts))

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call("place_libra", chunk, state, part)

        return place
