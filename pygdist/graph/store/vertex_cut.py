"""The placement *edges*: each edge is in one part, and a node has a row in every part that has an edge of its own.

A node's row at its owner is the root, the rows in other parts are leaves (DistGNN, Sec. 5.1 and 5.2). Self-loops are at
the root's part. Everything follows from the part of each edge and the owner of each node, one part at a time. Memory
grows with the number of nodes, and with the edges of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.store.nodes import NodeParts, Placement, by_target, merged
from pygdist.graph.store.replicas import values_of
from pygdist.graph.streams.arrays import forget_pages, write_rows
from pygdist.graph.streams.progress import enter_stage, watched
from pygdist.graph.streams.sorting import grouped
from pygdist.graph.streams.spill import Spill
from pygdist.memory.mapped import new_array

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The rows of a part, and which of its leaves have edges here.

    Attributes:
        n_id: Global ids of the rows: roots (ascending), then leaves by owner, ascending inside an owner.
        num_owned: Number of roots, n.
        recv_counts: Leaves of each owner, ``(P,)``.
        has_in: Leaves with an in-edge here; bool of shape ``(h,)``.
        has_out: Leaves with an out-edge here.
    """

    n_id: Ids
    num_owned: int
    recv_counts: Ids
    has_in: NDArray[np.bool_]
    has_out: NDArray[np.bool_]

    def counts(self, chosen: NDArray[np.bool_]) -> list[int]:
        """Count the chosen leaves of each owner."""
        ends = np.cumsum(self.recv_counts)
        summed = np.concatenate([[0], np.cumsum(chosen)])
        return [int(count) for count in summed[ends] - summed[ends - self.recv_counts]]


def _write(graph: WholeGraph, parts: NodeParts, folders: Sequence[Path], num_hops: int) -> list[dict[str, Any]]:
    edges, place = graph.edges, folders[0].parent
    kept = _kept(graph, parts, place) if graph.merge else None
    weight = graph.fields.get("edge_weight")
    in_degree = new_array(place / "in_degree.tmp", np.float64, (edges.num_nodes, 2 if weight is None else 5))
    enter_stage(edges.progress, "sorting edges by part")
    written, entries = [], []
    # edges that gave way to parallel ones are in a group of their own, which nobody reads
    with Spill(place / "edges.tmp", edges, partial(_parts_of, parts, kept), parts.num_parts + 1) as spill:
        enter_stage(edges.progress, "writing parts")
        with watched(edges.progress, edges.num_edges) as advance:
            for number, folder in enumerate(folders):
                folder.mkdir()
                part, entry = _write_part(graph, parts, number, spill, folder, in_degree)
                written.append(part)
                entries.append(entry)
                advance(spill.num_edges_of(number))
    is_split = np.zeros(edges.num_nodes, dtype=bool)
    for part in written:
        is_split[part.n_id[part.num_owned :]] = True
    for part, folder, entry in zip(written, folders, entries, strict=True):
        entry["num_split"] = int(np.count_nonzero(is_split[part.n_id[: part.num_owned]]))
        entry["files"]["in_degree"] = write_rows(folder / "in_degree.npy", in_degree, part.n_id)
        forget_pages(in_degree)
    (place / "in_degree.tmp").unlink()
    _write_receivers(written, folders, entries)
    return entries


def _parts_of(parts: NodeParts, kept: NDArray[np.bool_] | None, chunk: Ids, edges: slice) -> NDArray[Any]:
    """Return the part of each edge of a chunk; the number of parts for those that are not kept."""
    assert parts.edge_part is not None
    part = np.array(parts.edge_part[edges])
    loops = np.flatnonzero(chunk[0] == chunk[1])
    part[loops] = parts.owner[chunk[0, loops]]
    if kept is not None:
        part[~kept[edges]] = parts.num_parts
    return part


def _kept(graph: WholeGraph, parts: NodeParts, place: Path) -> NDArray[np.bool_]:
    """Merge parallel edges, which may be in several parts; return a mask of those that stay, ``(E,)``."""
    enter_stage(graph.edges.progress, "merging edges")
    kept = np.zeros(graph.edges.num_edges, dtype=bool)
    with Spill(place / "merged.tmp", graph.edges, by_target(parts), parts.num_parts) as spill:
        for part in range(parts.num_parts):
            source, target, e_id = spill.edges_of(part)
            kept[e_id[merged(graph, target.astype(np.int64) * graph.edges.num_nodes + source, e_id)]] = True
    return kept


def _write_part(
    graph: WholeGraph, parts: NodeParts, number: int, spill: Spill, folder: Path, in_degree: NDArray[np.float64]
) -> tuple[_Part, dict[str, Any]]:
    """Write a part's rows and edges, and add its edges to the in-degrees of all nodes."""
    source, target, e_id = spill.edges_of(number)
    owned = parts.owned(number)
    num_cut = int(np.count_nonzero(parts.owner[source] != parts.owner[target]))
    leaves, recv_counts = parts.by_owner(parts.unseen([source, target], owned))
    n_id = np.concatenate([owned, leaves])
    parts.index(n_id)
    src = parts.indexed(source)
    del source
    row = parts.indexed(target)
    del target
    _add_degrees(graph, in_degree, n_id, src, row, e_id)
    indptr, order = grouped(row, len(n_id))
    del row
    has_out = np.zeros(len(n_id), dtype=bool)
    has_out[src] = True
    part = _Part(
        n_id=n_id, num_owned=len(owned), recv_counts=recv_counts, has_in=np.diff(indptr)[len(owned) :] > 0,
        has_out=has_out[len(owned) :],
    )  # fmt: skip
    rows = {"n_id": n_id, "indptr": indptr, "recv_counts": recv_counts[None]}
    rows |= {"has_in": part.has_in, "has_out": part.has_out}
    files = {name: write_rows(folder / f"{name}.npy", value) for name, value in rows.items()}
    for name, value in (("src", src), ("e_id", e_id)):
        files[name] = write_rows(folder / f"{name}.npy", value, order)
    entry = {
        "num_owned": len(owned),
        "num_halo": len(leaves),
        "halo_per_hop": [len(leaves)],
        "num_edges": len(e_id),
        "num_cut": num_cut,
        "recv_counts": recv_counts.tolist(),
        "up_counts": part.counts(part.has_in),
        "down_counts": part.counts(part.has_out),
        "files": files,
    }
    return part, entry


def _add_degrees(
    graph: WholeGraph, in_degree: NDArray[np.float64], n_id: Ids, src: NDArray[Any], row: NDArray[Any], e_id: Ids
) -> None:
    """Add the in-edges of a part to the ``in_degree`` (:mod:`pygdist.graph.store.meta`) of the nodes of its rows."""
    weight, loops = graph.fields.get("edge_weight"), np.flatnonzero(src == row)
    columns: list[NDArray[Any]] = [np.bincount(row, minlength=len(n_id)), np.bincount(row[loops], minlength=len(n_id))]
    if weight is not None:
        values = values_of(weight, e_id, graph.dtypes["edge_weight"])
        last = np.zeros(len(n_id))
        last[row[loops]] = values[loops]  # numpy keeps the last of several; loops are all at the root's part
        columns.append(np.bincount(row, weights=values, minlength=len(n_id)))
        columns += [np.bincount(row[loops], weights=values[loops], minlength=len(n_id)), last]
    in_degree[n_id] += np.stack(columns, axis=1)
    forget_pages(in_degree)


def _write_receivers(written: Sequence[_Part], folders: Sequence[Path], entries: Sequence[dict[str, Any]]) -> None:
    """Write, for each row that a part sends, if the part that receives it has in-edges and out-edges of it."""
    starts = [np.cumsum(part.recv_counts) - part.recv_counts for part in written]
    for sender, (folder, entry) in enumerate(zip(folders, entries, strict=True)):
        for name in ("has_in", "has_out"):
            chosen = [
                getattr(part, name)[start[sender] :][: part.recv_counts[sender]]
                for part, start in zip(written, starts, strict=True)
            ]
            entry["files"][f"send_{name}"] = write_rows(folder / f"send_{name}.npy", np.concatenate(chosen))


EDGES = Placement(name="edges", write=_write, most_hops=1, has_surroundings=True, splits_nodes=True)
