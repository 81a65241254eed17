"""SPRING: streaming clusters, merged through the richest neighbours of their nodes."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.base import Assignment, Partitioner, check_num_parts, check_number
from pygdist.partition.clustering import cluster, spread

_SHARE_OF_A_PART = 0.25


@dataclass(frozen=True, kw_only=True)
class SpringPartitioner(Partitioner):
    """Clusters the nodes of a stream of edges, merges small clusters into adjacent ones, and assigns them to parts.

    This is SPRING, the partitioner of CATGNN (Algorithm 1). First, nodes are clustered, with a limit on the volume of a
    cluster, which is the sum of its nodes' degrees. Then each cluster, the smallest first, is merged into the cluster
    that holds the neighbour of highest degree of its nodes, if the merged cluster fits a part. Last, each cluster, the
    largest first, is assigned to the part with fewest nodes. The method takes two passes over the edges.

    Args:
        volume: Largest volume (sum of degrees) of a cluster before merging, as a share of the sum of all degrees; the
            paper states no value. The default is 1 / (4 P) for P parts, a quarter of a mean part's volume. With 1 / P,
            parts get up to 2.5 times the mean; below the default, the replication factor no longer changes
            (``experiments/catgnn``).
        balance: Largest number of nodes in a merged cluster, relative to the mean part; at least 1. A part gets whole
            clusters, and larger clusters are not split, so a part may have more nodes.
    """

    volume: float | None = None
    balance: float = 1.05

    name: ClassVar[str] = "spring"

    def __post_init__(self) -> None:
        if self.volume is not None:
            check_number(self, "volume", 0, above=True)
        check_number(self, "balance", 1)

    @override
    def run(self, edges: EdgeStream, num_parts: int) -> Assignment:
        check_num_parts(edges.num_nodes, num_parts)
        require(self.name, edges.num_nodes)
        share = _SHARE_OF_A_PART / num_parts if self.volume is None else self.volume
        clusters = cluster(edges, share * 2 * edges.num_edges, strict=False, richest=True)
        before, after = ctypes.c_int32(0), ctypes.c_int32(clusters.num_clusters)
        limit = min(math.floor(self.balance * edges.num_nodes / num_parts), edges.num_nodes)
        sizes = (edges.num_nodes, clusters.degree, clusters.richest, limit)
        call("merge_clusters", None, *sizes, clusters.cluster, after, before)
        part = dealt(clusters.cluster, after.value, num_parts)
        figures = {"num_clusters": before.value, "num_merged_clusters": after.value, "volume_share": share}
        return Assignment(part=part, figures=figures)

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        return self.run(edges, num_parts).part


def dealt(cluster: NDArray[np.int32], num_clusters: int, num_parts: int) -> NDArray[np.int32]:
    """Assign clusters, the largest first, each to the part with fewest nodes; then nodes without a cluster (-1).

    ``cluster`` and the result, the part of each node, are int32 of shape ``(N,)``.
    """
    seen = cluster >= 0
    part_of_cluster = spread(np.bincount(cluster[seen], minlength=num_clusters), num_parts)
    part = np.empty(len(cluster), dtype=np.int32)
    part[seen] = part_of_cluster[cluster[seen]]
    # assigning nodes one by one to the emptiest part is the same as filling the parts up to one level
    counts = np.bincount(part[seen], minlength=num_parts)
    part[~seen] = np.repeat(np.arange(num_parts), filled(counts, int(np.count_nonzero(~seen))))
    return part


def filled(counts: NDArray[np.int64], added: int) -> NDArray[np.int64]:
    """Return the number of nodes that each part gets if ``added`` nodes go, one by one, to the emptiest part."""
    order = np.argsort(counts, kind="stable")
    level = counts[order]
    reached = np.cumsum(level)
    # raise the k emptiest parts to one height, for the largest k whose parts lie below it
    below = np.arange(1, len(level) + 1)
    heights = (reached + added) / below
    k = int(np.flatnonzero(level <= heights)[-1]) + 1
    total = int(reached[k - 1]) + added
    target = np.full(k, total // k)
    target[: total % k] += 1
    gained = np.zeros(len(level), dtype=np.int64)
    raised = np.sort(order[:k])  # of equal parts the first one gets more
    gained[raised] = target - counts[raised]
    return gained
