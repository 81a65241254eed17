"""New numbers for nodes whose ids have large gaps: from 0, in the order of the ids.

The map is one sorted array, stored with the parts: entry i is the original id of node i.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.edge_file import EdgeFile
from pygdist.graph.streams.progress import Progress, watched

__all__ = ["checked", "distinct_ids", "largest_id", "renumbered"]

_CHUNK_EDGES = 1 << 20
_TABLE_IDS = 1 << 30  # below, a byte for each possible id takes less memory than sorting


def largest_id(edges: EdgeFile, *, progress: Progress | None = None) -> int:
    """Return the largest id of a file, -1 if it has no edges. One pass.

    Raises:
        InputError: If an id is negative.
    """
    return max((int(chunk.max()) for chunk in checked(edges, None, progress=progress)), default=-1)


def checked(edges: EdgeFile, num_nodes: int | None, *, progress: Progress | None = None) -> Iterator[NDArray[np.int64]]:
    """Yield all edges in chunks.

    Raises:
        InputError: If an id is negative, or not below ``num_nodes`` where that is known.
    """
    for start, chunk in _chunks(edges, progress):
        wrong = chunk < 0 if num_nodes is None else (chunk < 0) | (chunk >= num_nodes)
        if wrong.any():
            edge = int(np.flatnonzero(wrong.any(axis=0))[0])
            allowed = "ids start at 0" if num_nodes is None else f"but the graph has nodes 0 to {num_nodes - 1}"
            raise InputError(f"{edges.path}: edge {start + edge} has id {chunk[:, edge][wrong[:, edge]][0]}, {allowed}")
        yield chunk


def distinct_ids(edges: EdgeFile, largest: int, *, progress: Progress | None = None) -> NDArray[np.int64]:
    """Return the ids that occur, ascending; int64. One pass.

    Args:
        edges: The file.
        largest: The largest id, from :func:`largest_id`.
        progress: Shows the pass.
    """
    if largest < _TABLE_IDS:
        seen = np.zeros(largest + 1, dtype=bool)
        for _, chunk in _chunks(edges, progress):
            seen[chunk] = True
        return np.flatnonzero(seen)
    ids, pile, waiting = np.empty(0, dtype=np.int64), [], 0
    for _, chunk in _chunks(edges, progress):
        pile.append(np.unique(chunk))
        waiting += len(pile[-1])
        if waiting > max(len(ids), 1 << 24):  # wait until a merge may double the ids, so that merges are few
            ids, pile, waiting = np.unique(np.concatenate([ids, *pile])), [], 0
    return np.unique(np.concatenate([ids, *pile]))


def renumbered(chunk: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a chunk of edges in new numbers.

    Args:
        chunk: Ids, all of which occur in ``ids``.
        ids: Ascending; the number of an id is its position.
    """
    sorted_ids, place = np.unique(chunk, return_inverse=True)  # looked up in the order of memory
    return np.searchsorted(ids, sorted_ids)[place].reshape(chunk.shape)


def _chunks(edges: EdgeFile, progress: Progress | None) -> Iterator[tuple[int, NDArray[np.int64]]]:
    with watched(progress, edges.num_edges) as advance:
        for start in range(0, edges.num_edges, _CHUNK_EDGES):
            chunk = edges.read(start, min(start + _CHUNK_EDGES, edges.num_edges))
            yield start, chunk
            advance(chunk.shape[1])
