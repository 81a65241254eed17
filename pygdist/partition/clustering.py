"""Streaming clustering (Hollocou et al., 2017), the first step of SPRING and, in a stricter variant, of 2PS-L."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, count_degrees


@dataclass(kw_only=True)
class Clusters:
    """The clusters of a stream.

    Attributes:
        degree: Edge ends at each node; int32 of shape ``(N,)``.
        cluster: Cluster of each node, -1 for one without edges; int32 of shape ``(N,)``. Some numbers may be unused.
        num_clusters: Number of clusters, unused ones included.
        volume: Sum of the degrees in each cluster; int64 of shape ``(num_clusters,)``.
        richest: The neighbour of highest degree of each node, the first of equals, -1 if it has none; int32 of shape
            ``(N,)``.
    """

    degree: NDArray[np.int32]
    cluster: NDArray[np.int32]
    num_clusters: int
    volume: NDArray[np.int64]
    richest: NDArray[np.int32] | None


def cluster(edges: EdgeStream, max_volume: float, *, strict: bool, richest: bool) -> Clusters:
    """Cluster the nodes in one pass over the edges, after one that counts degrees.

    A node starts in a cluster of its own. The volume of a cluster is the sum of its nodes' degrees. If an edge joins
    two clusters of at most ``max_volume``, the edge's end in the smaller cluster moves to the larger one. With
    ``strict``, the two ends do not count in this comparison, and no cluster grows beyond ``max_volume``. With
    ``richest``, the neighbour of highest degree of each node is recorded.
    """
    num_nodes = edges.num_nodes
    degree = count_degrees(edges)
    assigned = np.full(num_nodes, -1, dtype=np.int32)
    volume = np.zeros(num_nodes, dtype=np.int64)
    neighbour = np.full(num_nodes, -1, dtype=np.int32) if richest else None
    count = ctypes.c_int32(0)
    limit = int(min(max_volume, 2**62))
    for chunk in edges.chunks():
        call("cluster", chunk, degree, limit, int(strict), assigned, volume, count, neighbour)
    return Clusters(
        degree=degree, cluster=assigned, num_clusters=count.value, volume=volume[: count.value], richest=neighbour
    )


def spread(size: NDArray[np.int64], num_parts: int) -> NDArray[np.int32]:
    """Assign clusters to parts, the largest first, each to the smallest part so far; int32 of shape ``(C,)``."""
    part = np.empty(len(size), dtype=np.int32)
    call("deal", None, np.ascontiguousarray(size, dtype=np.int64), len(size), num_parts, part)
    return part
