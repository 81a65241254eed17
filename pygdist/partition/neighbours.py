"""Neighbour lists from a stream of edges, one window of nodes at a time, for partitioners that place node by node."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from pygdist.graph import EdgeStream
from pygdist.kernels.csr import row_blocks
from pygdist.partition._native import call, count_degrees

_WINDOW_ENDS = 1 << 27  # edge ends at a time: 512 MiB


def neighbour_lists(
    edges: EdgeStream, *, window_ends: int = _WINDOW_ENDS
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int32]]]:
    """Yield the neighbours of all nodes, in the order of the nodes; one pass to count, and one for each window.

    The graph is taken as undirected: a self-loop appears twice in its node's list, and an edge and its reverse both
    appear. Memory holds ``window_ends`` edge ends at a time, but at least the ends of one node.

    Yields:
        The first node of a window; the beginning of each of its nodes' lists, int64 of shape ``(n + 1,)``; and the
        neighbours, int32, in the order of the stream. The arrays are valid until the next window.
    """
    offsets = np.zeros(edges.num_nodes + 1, dtype=np.int64)
    np.cumsum(count_degrees(edges), out=offsets[1:])
    windows = list(row_blocks(torch.from_numpy(offsets), window_ends))
    lists = np.empty(max((ends.stop - ends.start for _, ends in windows), default=0), dtype=np.int32)
    for nodes, ends in windows:
        indptr = offsets[nodes.start : nodes.stop + 1] - ends.start
        neighbour = lists[: int(indptr[-1])]
        place = indptr[:-1].copy()
        for chunk in edges.chunks():
            call("fill_neighbours", chunk, nodes.start, nodes.stop, place, neighbour)
        yield nodes.start, indptr, neighbour
