"""The surroundings of a part: rows several hops away, and all in-edges of those that are less far.

They are made from the parts with one hop, which lie on disk: the in-edges of a row are at its owner, so each hop reads
some rows of each other part, twice: for the rows of the next hop, and to write. In memory are some numbers for each
row, and the edges that come from one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.folder import ArrayWriter, write_rows
from pygdist.graph.node_parts import NodeParts

__all__ = ["write_surroundings"]

Ids = NDArray[np.int64]


def write_surroundings(
    parts: NodeParts, part: int, folders: Sequence[Path], num_hops: int, suffix: str
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Write one part with a halo of several hops.

    Rows are owned, then by hop; a node is listed at the first hop that reaches it.

    Args:
        parts: The owners.
        part: Which part.
        folders: For each part where the arrays of its one-hop :class:`~pygdist.graph.node_parts.Topology` are.
        num_hops: How far, at least 2.
        suffix: Of the files to write beside them, in place of ``.npy``.

    Returns:
        What a reader can hold the files to, and the rows of each hop and owner, of shape ``(num_hops, num_parts)``.
    """
    here = folders[part]
    known, src, indptr, e_id = (_array(here, name) for name in ("n_id", "src", "indptr", "e_id"))
    starts, counts = [indptr], [np.array(_array(here, "recv_counts"))]
    frontier = known[len(indptr) - 1 :]
    with (
        ArrayWriter(here / f"src{suffix}", parts.narrow) as sources,
        ArrayWriter(here / f"e_id{suffix}", np.int64) as positions,
    ):
        sources.append(src)
        positions.append(e_id)
        for _ in range(1, num_hops):
            found = parts.unseen((source for _, source, _ in _in_edges(parts, frontier, counts[-1], folders)), known)
            following, count = parts.by_owner(found)
            known = np.concatenate([known, following])
            parts.index(known)
            for degree, source, position in _in_edges(parts, frontier, counts[-1], folders):
                starts.append(sources.count + np.cumsum(degree))
                sources.append(parts.indexed(source))
                positions.append(position)
            counts.append(count)
            frontier = following
    recv_counts = np.stack(counts)
    files = {"src": sources.described(), "e_id": positions.described()}
    for name, value in (("n_id", known), ("indptr", np.concatenate(starts)), ("recv_counts", recv_counts)):
        files[name] = write_rows(here / f"{name}{suffix}", value)
    return files, recv_counts


def _in_edges(parts: NodeParts, nodes: Ids, counts: Ids, folders: Sequence[Path]) -> Iterator[tuple[Ids, Ids, Ids]]:
    """For nodes grouped by owner, owner after owner: in-degrees, sources of the in-edges, and where these are."""
    for owner, mine in enumerate(np.split(nodes, np.cumsum(counts)[:-1])):
        indptr, rows = _array(folders[owner], "indptr"), parts.owned_rows(mine)
        degree = indptr[rows + 1] - indptr[rows]
        at = np.repeat(indptr[rows] - (np.cumsum(degree) - degree), degree) + np.arange(int(degree.sum()))
        sources = _array(folders[owner], "n_id")[_array(folders[owner], "src")[at]]
        yield degree, sources, _array(folders[owner], "e_id")[at]


def _array(folder: Path, name: str) -> Ids:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
