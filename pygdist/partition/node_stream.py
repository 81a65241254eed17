"""The loop of LDG and Fennel: nodes come one by one, each with its neighbours, and are assigned once."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from pygdist.graph import EdgeStream
from pygdist.partition._native import call, require
from pygdist.partition.base import check_num_parts
from pygdist.partition.neighbours import neighbour_lists


def place_nodes(
    name: str, edges: EdgeStream, num_parts: int, *, balance: float, fennel: bool, alpha: float = 0, gamma: float = 0
) -> NDArray[np.int32]:
    """Assign nodes in the order of their ids; return the part of each, int32 of shape ``(N,)``.

    The graph is taken as undirected. ``balance`` is the largest number of nodes in a part, relative to the mean. A
    part's score starts as the number of neighbours in the part. With ``fennel``, a cost of the part's size, with weight
    ``alpha`` and exponent ``gamma``, is subtracted (Fennel). Otherwise the score is multiplied by the free share of the
    part (LDG).
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
