"""2PS-L: clusters the nodes, then assigns each edge to the part of a cluster of its nodes, in linear time."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.graph.streams.arrays import forget_pages
from pygdist.memory.mapped import take_room
from pygdist.partition._native import PlaceEdges, call, require
from pygdist.partition.base import check_number
from pygdist.partition.clustering import cluster, spread
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, VertexCut

_IN_MEMORY_BYTES = 1 << 27


@dataclass(frozen=True, kw_only=True)
class TwoPSLPartitioner(BalancedEdgePartitioner):
    """Assigns each edge to one of the two parts that hold its nodes' clusters.

    2PS-L (Mayer et al., ICDE 2022) assigns clusters (:mod:`pygdist.partition.clustering`) to parts, the largest first,
    each to the part of least volume; a volume is a sum of degrees. If both clusters of an edge are in one part, the
    edge goes to this part, as long as the part is not full. For other edges the method scores both parts by replicas,
    degrees and volumes, so the time does not grow with the number of parts. If both parts are full, a hash of the end
    of higher degree draws a part; if this part is full too, the part with fewest edges gets the edge. There are four
    passes over the edges: one for degrees, one for clusters, and two that place edges.

    Args:
        seed: Seed of the hash, and of the draw of each node's owner.
        balance: Largest number of edges in a part, relative to the mean; at least 1.
        volume: Largest volume (sum of degrees) of a cluster, relative to the mean volume of a part. At the default of
            0.5, clusters fill the parts evenly.
    """

    volume: float = 0.5

    name: ClassVar[str] = "2ps-l"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "volume", 0, above=True)

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        require(self.name, edges.num_nodes)
        clusters = cluster(edges, self.volume * 2 * edges.num_edges / cut.num_parts, strict=True, richest=False)
        part_of_cluster = spread(clusters.volume, cut.num_parts)
        state = cut.native(self.capacity(edges, cut.num_parts))
        inputs = (state, clusters.degree, clusters.cluster, clusters.volume, part_of_cluster, self.seed)
        placed = _scratch(edges.num_edges, np.min_scalar_type(-cut.num_parts))
        start = 0
        for chunk in edges.chunks():
            part = np.empty(chunk.shape[1], dtype=np.int32)
            call("place_2psl", chunk, *inputs, 0, part)
            placed[start : start + len(part)] = part
            start += len(part)
            forget_pages(placed)
        start = 0

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            nonlocal start
            part[:] = placed[start : start + len(part)]
            start += len(part)
            forget_pages(placed)
            call("place_2psl", chunk, *inputs, 1, part)

        return place


def _scratch(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Make an array for one run: in memory if it is small, otherwise in a file without a name."""
    if count * dtype.itemsize <= _IN_MEMORY_BYTES:
        return np.empty(count, dtype=dtype)
    try:
        with tempfile.TemporaryFile() as file:  # mapped, it outlives its closing
            take_room(file.fileno(), count * dtype.itemsize, tempfile.gettempdir())
            return np.memmap(file, dtype=dtype, shape=(count,), mode="r+")
    except OSError as error:
        raise InputError(f"2ps-l: no room for {count} edges in {tempfile.gettempdir()} ({error})") from error
