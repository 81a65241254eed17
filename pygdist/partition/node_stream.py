"""What LDG and Fennel share: nodes come one by one, each with its neighbours, and stay where they are put."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.base import check_num_parts
from pygdist.partition.neighbours import neighbour_lists

__all__ = ["place_nodes"]


def place_nodes(
    name: str, edges: EdgeStream, num_parts: int, *, balance: float, fennel: bool, alpha: float = 0, gamma: float = 0
) -> NDArray[np.int32]:
    """The part of each node, in the order of their ids.

    Args:
        name: The partitioner, for messages.
        edges: The graph; directions do not count.
        num_parts: Number of parts.
        balance: The most nodes of a part, over the mean.
        fennel: Subtract the cost of a full part; else multiply by the share that is left of it.
        alpha: Weight of the cost.
        gamma: Exponent of the cost.

    Returns:
        int32 of shape ``(N,)``.
    """
    check_num_parts(edges.num_nodes, num_parts)
    require(name, edges.num_nodes)
    capacity = min(math.ceil(balance * edges.num_nodes / num_parts), edges.num_nodes)
    part = np.full(edges.num_nodes, -1, dtype=np.int32)
    load = np.zeros(num_parts, dtype=np.int64)
    for first, indptr, neighbour in neighbour_lists(edges):
        rule = (num_parts, capacity, int(fennel), alpha, gamma)
        call("place_nodes", None, first, len(indptr) - 1, indptr, neighbour, *rule, load, part)
    return part
