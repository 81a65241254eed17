"""The placement *replicas*: a part has the features and in-edges of its halo rows too, and so can compute them itself.

The arrays are made from those of *nodes*, which are on disk: the in-edges of a row are at its owner, so each hop reads
some rows of every other part, once to find the rows of the next hop and once to write. Memory holds a few numbers for
each row, and the edges that come from one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.store.nodes import NODES, NodeParts, Placement
from pygdist.graph.streams.arrays import ArrayWriter, forget_pages, write_rows
from pygdist.memory.mapped import new_array

_BLOCK_EDGES = 1 << 20
_SUFFIX = ".extended"  # of files that replace those of nodes once every part has read these

Ids = NDArray[np.int64]


def _write(graph: WholeGraph, parts: NodeParts, folders: Sequence[Path], num_hops: int) -> list[dict[str, Any]]:
    entries = NODES.write(graph, parts, folders, 1)
    weight, scratch = graph.fields.get("edge_weight"), folders[0].parent / "in_degree.tmp"
    dtype = graph.dtypes.get("edge_weight", np.dtype(np.float64))
    in_degree = _write_in_degrees(parts, folders, scratch, weight=weight, dtype=dtype)
    for part, entry in enumerate(entries):
        entry["files"], counts = _write_surroundings(parts, part, folders, num_hops, in_degree)
        entry["halo_per_hop"] = counts.sum(axis=1).tolist()
    scratch.unlink()
    for folder in folders:
        for path in folder.glob(f"*{_SUFFIX}"):
            path.rename(path.with_suffix(".npy"))
    return entries


def _write_surroundings(
    parts: NodeParts, part: int, folders: Sequence[Path], num_hops: int, in_degree: NDArray[np.float64]
) -> tuple[dict[str, Any], Ids]:
    """Write the arrays of one part beside those of *nodes*; describe each file, and count rows by hop and owner.

    Rows are owned, then by hop; a node is listed at the first hop that reaches it. Rows of the last hop, the rim, have
    the in-edges that begin at rows of fewer hops, and their self-loops; the other rows have all their in-edges.
    """
    folder = folders[part]
    n_id, indptr = _array(folder, "n_id"), _array(folder, "indptr")
    counts, frontier = [np.array(_array(folder, "recv_counts"))], n_id[len(indptr) - 1 :]
    with (
        ArrayWriter(folder / f"src{_SUFFIX}", parts.narrow) as sources,
        ArrayWriter(folder / f"e_id{_SUFFIX}", np.int64) as positions,
    ):
        sources.append(_array(folder, "src"))
        positions.append(_array(folder, "e_id"))
        starts = [indptr]
        for _ in range(1, num_hops):
            ends = (source for _, source, _ in _in_edges(parts, frontier, counts[-1], folders))
            following, count = parts.by_owner(parts.unseen(ends, n_id))
            n_id = np.concatenate([n_id, following])
            parts.index(n_id)
            for degree, source, position in _in_edges(parts, frontier, counts[-1], folders):
                starts.append(sources.count + np.cumsum(degree))
                sources.append(parts.indexed(source))
                positions.append(position)
            counts.append(count)
            frontier = following
        parts.index(n_id)
        for degree, source, position in _edges_of_rim(parts, frontier, counts[-1], folders, len(n_id)):
            starts.append(sources.count + np.cumsum(degree))
            sources.append(source)
            positions.append(position)
    recv_counts = np.stack(counts)
    files = {"src": sources.described(), "e_id": positions.described()}
    for name, value in (("n_id", n_id), ("indptr", np.concatenate(starts)), ("recv_counts", recv_counts)):
        files[name] = write_rows(folder / f"{name}{_SUFFIX}", value)
    files["in_degree"] = write_rows(folder / f"in_degree{_SUFFIX}", in_degree, n_id)
    return files, recv_counts


def _edges_of_rim(
    parts: NodeParts, rim: Ids, counts: Ids, folders: Sequence[Path], num_rows: int
) -> Iterator[tuple[Ids, NDArray[Any], Ids]]:
    """Yield the edges of the last rows that are kept: in-degrees, sources in local ids, positions in the graph."""
    row = num_inner = num_rows - len(rim)
    for degree, source, position in _in_edges(parts, rim, counts, folders):
        local, row_of = parts.indexed(source), np.repeat(np.arange(row, row + len(degree)), degree)
        keep = ((local >= 0) & (local < num_inner)) | (local == row_of)
        yield np.bincount(row_of[keep] - row, minlength=len(degree)), local[keep], position[keep]
        row += len(degree)


def _write_in_degrees(
    parts: NodeParts, folders: Sequence[Path], path: Path, *, weight: NDArray[Any] | None, dtype: DTypeLike
) -> NDArray[np.float64]:
    """Write the ``in_degree`` of every node (:mod:`pygdist.graph.store.meta`) to ``path``, part by part, and map it.

    The file must exist as long as the result is used. ``weight`` belongs to the edges of the whole graph.
    """
    width = 2 if weight is None else 5
    in_degree = new_array(path, np.float64, (len(parts.owner), width))
    for part, folder in enumerate(folders):
        indptr, src = _array(folder, "indptr"), _array(folder, "src")
        degree = np.diff(indptr)
        row = np.repeat(np.arange(len(degree)), degree)
        loops = np.flatnonzero(src == row)
        columns = [degree, np.bincount(row[loops], minlength=len(degree))]
        if weight is not None:
            values = values_of(weight, _array(folder, "e_id"), dtype)
            last = np.zeros(len(degree))
            last[row[loops]] = values[loops]  # numpy keeps the last of several
            columns.append(np.bincount(row, weights=values, minlength=len(degree)))
            columns += [np.bincount(row[loops], weights=values[loops], minlength=len(degree)), last]
        in_degree[parts.owned(part)] = np.stack(columns, axis=1)
        forget_pages(in_degree)
    return in_degree


def values_of(weight: NDArray[Any], e_id: Ids, dtype: DTypeLike) -> NDArray[Any]:
    """Return the weights of some edges in the type of a store."""
    values = np.empty(len(e_id), dtype=dtype)
    for start in range(0, len(e_id), _BLOCK_EDGES):
        block = slice(start, start + _BLOCK_EDGES)
        values[block] = weight[e_id[block]]
        forget_pages(weight)
    return values


def _in_edges(parts: NodeParts, nodes: Ids, counts: Ids, folders: Sequence[Path]) -> Iterator[tuple[Ids, Ids, Ids]]:
    """Yield, for each owner in turn, the in-edges of its nodes: in-degrees, sources, and positions in the graph.

    ``nodes`` are grouped by owner; ``counts`` are the sizes of the groups.
    """
    for owner, owned in enumerate(np.split(nodes, np.cumsum(counts)[:-1])):
        indptr, rows = _array(folders[owner], "indptr"), parts.owned_rows(owned)
        degree = indptr[rows + 1] - indptr[rows]
        edges = np.repeat(indptr[rows] - (np.cumsum(degree) - degree), degree) + np.arange(int(degree.sum()))
        sources = _array(folders[owner], "n_id")[_array(folders[owner], "src")[edges]]
        yield degree, sources, _array(folders[owner], "e_id")[edges]


def _array(folder: Path, name: str) -> Ids:
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))


REPLICAS = Placement(name="replicas", write=_write, has_surroundings=True)
