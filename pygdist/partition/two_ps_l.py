"""2PS-L: clusters first, then edges to the parts of their nodes' clusters, in linear time."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.graph.streams.arrays import forget_pages
from pygdist.partition._native import call, require
from pygdist.partition.clustering import cluster, spread
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, Place, VertexCut

__all__ = ["TwoPSLPartitioner"]

_IN_MEMORY_BYTES = 1 << 27


@dataclass(frozen=True, kw_only=True)
class TwoPSLPartitioner(BalancedEdgePartitioner):
    """Places an edge in one of the two parts that its nodes' clusters lie in.

    2PS-L (Mayer et al., ICDE 2022). Clusters (:mod:`pygdist.partition.clustering`) go to the parts by volume, the
    largest first, each to the part with the least. Edges whose clusters share a part go there, as long as there is
    room; for the others both parts are scored by replicas, degrees and volumes, so that the time does not grow with the
    number of parts. Where both are full the hash of the end of higher degree decides, and then the least loaded part.
    Four passes: degrees, clusters, and two that place.

    Args:
        seed: Of the hash, and of the draw of each node's owner.
        balance: The most edges of a part, over the mean; at least 1.
        volume: The volume threshold of the clustering, over that of a part; 0.5 lets clusters be dealt out evenly.
    """

    volume: float = 0.5

    name: ClassVar[str] = "2ps-l"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.volume < math.inf:
            raise InputError(f"2ps-l: volume is {self.volume}, expected a finite number above 0")

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        require(self.name, edges.num_nodes)
        clusters = cluster(edges, self.volume * 2 * edges.num_edges / cut.num_parts, strict=True, richest=False)
        part_of = spread(clusters.volume, cut.num_parts)
        state = cut.native(self.capacity(edges, cut.num_parts))
        known = (clusters.degree, clusters.cluster, clusters.volume, part_of, self.seed)
        placed = _scratch(edges.num_edges, np.min_scalar_type(-cut.num_parts))
        start = 0
        for chunk in edges.chunks():
            part = np.empty(chunk.shape[1], dtype=np.int32)
            call("place_2psl", chunk, state, *known, 0, part)
            placed[start : start + len(part)] = part
            start += len(part)
            forget_pages(placed)
        start = 0

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            nonlocal start
            part[:] = placed[start : start + len(part)]
            start += len(part)
            forget_pages(placed)
            call("place_2psl", chunk, state, *known, 1, part)

        return place


def _scratch(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array for the length of one run: on disk, nameless, where it is large."""
    if count * dtype.itemsize <= _IN_MEMORY_BYTES:
        return np.empty(count, dtype=dtype)
    try:
        with tempfile.TemporaryFile() as file:  # mapped, it outlives its closing
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)  # a full disk is told here, not by a signal
            return np.memmap(file, dtype=dtype, shape=(count,), mode="r+")
    except OSError as error:
        raise InputError(f"2ps-l: no room for {count} edges in {tempfile.gettempdir()} ({error})") from error
