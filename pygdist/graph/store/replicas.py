"""The surroundings of a part: rows some hops away, and the in-edges by which a rank computes these itself.

They are made from the parts with one hop, which lie on disk: the in-edges of a row are at its owner, so each hop reads
some rows of each other part, twice: for the rows of the next hop, and to write. In memory are some numbers for each
row, and the edges that come from one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pygdist.graph.store.nodes import NodeParts
from pygdist.graph.streams.folder import ArrayWriter, forget_pages, write_rows

__all__ = ["write_in_degrees", "write_surroundings"]

_BLOCK_EDGES = 1 << 20

Ids = NDArray[np.int64]


def write_surroundings(
    parts: NodeParts,
    part: int,
    folders: Sequence[Path],
    num_hops: int,
    *,
    in_degree: NDArray[np.float64],
    suffix: str,
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Write one part with the rows and edges of the placement *replicas*.

    Rows are owned, then by hop; a node is listed at the first hop that reaches it. Rows of the last hop, the rim, have
    those in-edges that begin at rows of fewer hops, and their self-loops; the others have all.

    Args:
        parts: The owners.
        part: Which part.
        folders: For each part where the arrays of its one-hop :class:`~pygdist.graph.store.nodes.Topology` are.
        num_hops: How far, at least 1.
        in_degree: What :func:`write_in_degrees` found, of all nodes.
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
        parts.index(known)
        row = num_inner = len(known) - len(frontier)
        for degree, source, position in _in_edges(parts, frontier, counts[-1], folders):
            local, row_of = parts.indexed(source), np.repeat(np.arange(row, row + len(degree)), degree)
            kept = ((local >= 0) & (local < num_inner)) | (local == row_of)
            starts.append(sources.count + np.cumsum(np.bincount(row_of[kept] - row, minlength=len(degree))))
            sources.append(local[kept])
            positions.append(position[kept])
            row += len(degree)
    recv_counts = np.stack(counts)
    files = {"src": sources.described(), "e_id": positions.described()}
    for name, value in (("n_id", known), ("indptr", np.concatenate(starts)), ("recv_counts", recv_counts)):
        files[name] = write_rows(here / f"{name}{suffix}", value)
    files["in_degree"] = write_rows(here / f"in_degree{suffix}", in_degree, known)
    return files, recv_counts


def write_in_degrees(
    parts: NodeParts, folders: Sequence[Path], path: Path, *, weight: NDArray[Any] | None, dtype: DTypeLike
) -> NDArray[np.float64]:
    """What the degree normalisations of a node need to know of all its in-edges, one part after the other.

    Args:
        parts: The owners.
        folders: For each part where the arrays of its one-hop :class:`~pygdist.graph.store.nodes.Topology` are.
        path: The file to write, for as long as the result is used.
        weight: Weight of each edge of the whole graph; ``None`` if it has none.
        dtype: The type of weights in a store.

    Returns:
        Of each node the number of in-edges and of self-loops; with weights also their sum, that of the self-loops, and
        the weight of the last self-loop or 0. Of shape ``(N, 5)`` or ``(N, 2)``, mapped from the file.
    """
    width = 2 if weight is None else 5
    found = np.lib.format.open_memmap(path, "w+", np.float64, (len(parts.owner), width))
    for part, folder in enumerate(folders):
        indptr, src = _array(folder, "indptr"), _array(folder, "src")
        degree = np.diff(indptr)
        row = np.repeat(np.arange(len(degree)), degree)
        loops = np.flatnonzero(src == row)
        columns = [degree, np.bincount(row[loops], minlength=len(degree))]
        if weight is not None:
            values = _values(weight, _array(folder, "e_id"), dtype)
            last = np.zeros(len(degree))
            last[row[loops]] = values[loops]  # of several, numpy keeps the last
            columns.append(np.bincount(row, weights=values, minlength=len(degree)))
            columns += [np.bincount(row[loops], weights=values[loops], minlength=len(degree)), last]
        found[parts.owned(part)] = np.stack(columns, axis=1)
        forget_pages(found)
    return found


def _values(weight: NDArray[Any], e_id: Ids, dtype: DTypeLike) -> NDArray[Any]:
    """Weights of some edges, as a store has them."""
    values = np.empty(len(e_id), dtype=dtype)
    for start in range(0, len(e_id), _BLOCK_EDGES):
        here = slice(start, start + _BLOCK_EDGES)
        values[here] = weight[e_id[here]]
        forget_pages(weight)
    return values


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
