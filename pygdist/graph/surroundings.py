"""The surroundings of a part: rows several hops away, and all in-edges of those that are less far.

They are made from the parts with one hop, which lie on disk: the in-edges of a row are at its owner, so each hop reads
some rows of each other part, and no two parts are in memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.node_parts import NodeParts, Topology

__all__ = ["surroundings"]

Ids = NDArray[np.int64]


def surroundings(parts: NodeParts, part: int, folders: Sequence[Path], num_hops: int) -> Topology:
    """Extend one part.

    Args:
        parts: The owners.
        part: Which part.
        folders: For each part where the arrays of its one-hop :class:`~pygdist.graph.node_parts.Topology` are.
        num_hops: How far, at least 2.

    Returns:
        The extended topology. Rows are owned, then by hop; a node is listed at the first hop that reaches it.
    """
    n_id, src, indptr, e_id, recv_counts = (
        _array(folders[part], name) for name in ("n_id", "src", "indptr", "e_id", "recv_counts")
    )
    known, sources, starts, positions, counts = n_id, [n_id[src]], [indptr], [e_id], [recv_counts]
    frontier = n_id[len(indptr) - 1 :]
    for _ in range(1, num_hops):
        degree, source, position = _in_edges(parts, frontier, counts[-1], folders)
        starts.append(sum(map(len, positions)) + np.cumsum(degree))
        sources.append(source)
        positions.append(position)
        frontier, count = parts.by_owner(parts.unseen(source, known))
        counts.append(count)
        known = np.concatenate([known, frontier])
    return Topology(
        n_id=known,
        indptr=np.concatenate(starts),
        src=parts.positions(np.concatenate(sources), known),
        e_id=np.concatenate(positions),
        recv_counts=np.stack(counts),
    )


def _in_edges(parts: NodeParts, nodes: Ids, counts: Ids, folders: Sequence[Path]) -> tuple[Ids, Ids, Ids]:
    """In-degrees of nodes that are grouped by owner, the sources of their in-edges, and the positions of these."""
    degrees, sources, positions = [], [], []
    for owner, mine in enumerate(np.split(nodes, np.cumsum(counts)[:-1])):
        indptr, rows = _array(folders[owner], "indptr"), parts.owned_rows(mine)
        degree = indptr[rows + 1] - indptr[rows]
        first = np.cumsum(degree) - degree
        at = np.repeat(indptr[rows] - first, degree) + np.arange(int(degree.sum()))
        degrees.append(degree)
        sources.append(_array(folders[owner], "n_id")[_array(folders[owner], "src")[at]])
        positions.append(_array(folders[owner], "e_id")[at])
    return np.concatenate(degrees), np.concatenate(sources), np.concatenate(positions)


def _array(folder: Path, name: str) -> Ids:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
