"""New numbers for nodes whose ids have large gaps: from 0, in the order of the ids.

The map is one sorted array, stored with the parts: entry i is the original id of node i.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.streams.sorting import distinct
from pygdist.graph.streams.stream import EdgeStream

_TABLE_IDS = 1 << 30  # below, a byte for each possible id takes less memory than sorting


def id_range(edges: EdgeStream) -> tuple[int, int]:
    """Return the smallest and the largest id of a stream, -1 and -1 if it has no edges. One pass."""
    ranges = [(int(chunk.min()), int(chunk.max())) for chunk in edges.chunks()]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else (-1, -1)


def distinct_ids(edges: EdgeStream, largest: int) -> NDArray[np.int64]:
    """Return the ids that occur, ascending; int64. One pass; ``largest`` is the largest one."""
    if largest < _TABLE_IDS:
        seen = np.zeros(largest + 1, dtype=bool)
        for chunk in edges.chunks():
            seen[chunk] = True
        return np.flatnonzero(seen)
    ids, pile, waiting = np.empty(0, dtype=np.int64), [], 0
    for chunk in edges.chunks():
        pile.append(distinct(chunk))
        waiting += len(pile[-1])
        if waiting > max(len(ids), 1 << 24):  # wait until a merge may double the ids, so that merges are few
            ids, pile, waiting = distinct(np.concatenate([ids, *pile])), [], 0
    return distinct(np.concatenate([ids, *pile]))


def renumbered(chunk: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a chunk of edges in new numbers: the number of an id is its position in ``ids``, which ascend."""
    sorted_ids, place = np.unique(chunk, return_inverse=True)  # looked up in the order of memory
    return np.searchsorted(ids, sorted_ids)[place].reshape(chunk.shape)
