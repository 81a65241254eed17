"""The placement *nodes*: a part has its own nodes, all their in-edges, and the plan to fetch the halo rows.

Everything follows from the edges of a part and the owner of each node, one part at a time, without a loop over nodes or
edges. No two parts have to be in memory together: what a part sends follows from the rows that the others list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.sources.edges import merge_edges
from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.streams.arrays import write_rows
from pygdist.graph.streams.progress import enter_stage, watched
from pygdist.graph.streams.sorting import grouped
from pygdist.graph.streams.spill import PartsOf, Spill

_INT32_MAX = np.iinfo(np.int32).max

Edges = Callable[[], tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]]
Merge = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The content of a part.

    Attributes:
        name: Its name in ``meta.json`` and in arguments.
        write: Called as ``write(graph, parts, folders, num_hops)``. Writes the rows and edges of each part into its
            folder, and returns the entry of each in ``meta.json``, with counts and files.
        most_hops: Number of hops that halos can reach; ``None`` for any.
        has_surroundings: True if a part also has the features of its halo rows, and edges into them.
        splits_nodes: True if a part has some of the edges of a node, and other parts the others.
        splits_features: True if a part has some columns of the features of all nodes, not all of its own nodes'.
    """

    name: str
    write: Callable[[WholeGraph, NodeParts, Sequence[Path], int], list[dict[str, Any]]]
    most_hops: int | None = None
    has_surroundings: bool = False
    splits_nodes: bool = False
    splits_features: bool = False


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The edges of one part in local ids; a local id is a position in ``n_id``.

    Edges are as they came. ``order`` sorts them by target, and by ``e_id`` within a target, so that sums and
    order-dependent aggregations take messages in the order in which one process takes them.

    Attributes:
        n_id: Global ids of the rows: owned (ascending), then halo by owner part, ascending inside an owner;
            int64 of shape ``(n + h,)``.
        indptr: Start of each owned row's in-edges in ``order``; int64 of shape ``(n + 1,)``.
        order: Positions of edges; of shape ``(e,)``.
        src: Source rows; int32 of shape ``(e,)``, int64 if the graph has 2^31 nodes or more.
        e_id: Position of each edge in the whole graph; int64 of shape ``(e,)``.
        recv_counts: Halo rows of each owner part, 0 for the part itself; int64 of shape ``(num_parts,)``.
    """

    n_id: NDArray[np.int64]
    indptr: NDArray[np.int64]
    order: NDArray[Any]
    src: NDArray[Any]
    e_id: NDArray[np.int64]
    recv_counts: NDArray[np.int64]


class NodeParts:
    """The nodes of a graph by their owner. Memory grows with the number of nodes, not with that of edges.

    Args:
        part: Owner of each node, of shape ``(N,)``.
        num_parts: Number of parts; a part may own nothing.
        edge_part: The part of each edge, ``(E,)``, where edges are assigned to parts too.

    Attributes:
        narrow: The type of local ids: int32 if the ids of all nodes fit, else int64.
    """

    def __init__(self, part: NDArray[Any], num_parts: int, edge_part: NDArray[Any] | None = None) -> None:
        self.num_parts, self.edge_part = num_parts, edge_part
        self._part = part.astype(np.uint16 if num_parts <= 1 << 16 else np.int32)
        self._node_start, nodes = grouped(self._part, num_parts)
        self.narrow = narrow = np.int32 if len(part) <= _INT32_MAX else np.int64
        self._nodes = nodes.astype(narrow, copy=False)
        del nodes
        self._position = np.empty(len(part), dtype=narrow)  # of each node among its owner's
        for one in range(num_parts):
            owned = self.owned(one)
            self._position[owned] = np.arange(len(owned))
        # scratch memory for one part at a time
        self._local: NDArray[Any] = np.full(len(part), -1, dtype=narrow)
        self._indexed = np.empty(0, dtype=np.int64)
        self._wanted = np.zeros(len(part), dtype=bool)

    @property
    def owner(self) -> NDArray[Any]:
        """Owner of each node, in a narrow type."""
        return self._part

    def owned(self, part: int) -> NDArray[Any]:
        """Return the global ids of the nodes that a part owns, ascending."""
        return self._nodes[self._node_start[part] : self._node_start[part + 1]]

    def topology(self, part: int, edges: Edges, *, merge: Merge | None = None) -> Topology:
        """Return the edges of a part in local ids, and the rows at their ends.

        ``edges`` returns the part's edges: sources, targets, and their positions in the whole graph, ascending.
        ``merge`` is called with a number for each source and target, the same if these are, and with the positions of
        the edges; it returns those to keep, ascending, as places in these two. By default all are kept.
        """
        source, target, e_id = edges()  # called here, so that no caller holds what is deleted below
        owned, row = self.owned(part), self._position[target]
        del target
        if merge is not None:
            first = merge(row.astype(np.int64) * len(self._part) + source, e_id)
            source, row, e_id = source[first], row[first], e_id[first]
            del first
        halo, recv_counts = self.by_owner(self.unseen([source], owned))
        n_id = np.concatenate([owned, halo])
        self.index(n_id)
        src = self.indexed(source)
        del source
        indptr, order = grouped(row, len(owned))
        return Topology(n_id=n_id, indptr=indptr, order=order, src=src, e_id=e_id, recv_counts=recv_counts)

    def unseen(self, nodes: Iterable[NDArray[Any]], seen: NDArray[Any]) -> NDArray[np.int64]:
        """Return the distinct ones of ``nodes`` that are not in ``seen``, ascending."""
        for some in nodes:
            self._wanted[some] = True
        self._wanted[seen] = False
        unseen = np.flatnonzero(self._wanted)
        self._wanted[unseen] = False
        return unseen

    def by_owner(self, nodes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Group nodes by their owner, keeping their order within a group; also return the size of each group."""
        start, order = grouped(self._part[nodes], self.num_parts)
        return nodes[order], np.diff(start)

    def index(self, n_id: NDArray[np.int64]) -> None:
        """Note the position of each node in ``n_id``, for :meth:`indexed`."""
        self._local[self._indexed] = -1
        self._indexed = n_id
        self._local[n_id] = np.arange(len(n_id))

    def indexed(self, nodes: NDArray[Any]) -> NDArray[Any]:
        """Return positions of nodes in the last ``n_id`` given to :meth:`index`, -1 if not there; type ``narrow``."""
        return np.asarray(self._local[nodes])

    def owned_rows(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each node at its owner, in the given order, int64: the rows that an owner sends."""
        return self._position[nodes].astype(np.int64)


def _write(graph: WholeGraph, parts: NodeParts, folders: Sequence[Path], num_hops: int) -> list[dict[str, Any]]:
    entries, edges = [], graph.edges
    merge = partial(merged, graph) if graph.merge else None
    enter_stage(edges.progress, "sorting edges by part")
    with Spill(folders[0].parent / "edges.tmp", edges, by_target(parts), parts.num_parts) as spill:
        enter_stage(edges.progress, "writing parts")
        with watched(edges.progress, edges.num_edges) as advance:
            for part, folder in enumerate(folders):
                folder.mkdir()
                topology = parts.topology(part, partial(spill.edges_of, part), merge=merge)
                entries.append(_write_topology(topology, folder))
                advance(spill.num_edges_of(part))
    return entries


def by_target(parts: NodeParts) -> PartsOf:
    """Return the function that gives each edge to the owner of its target."""
    return lambda chunk, _: parts.owner[chunk[1]]


def merged(graph: WholeGraph, key: NDArray[np.int64], e_id: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge edges of the same key, and their values; if the graph is mirrored, reverse edges give way to others.

    Returns:
        The places of those that stay, ascending.
    """
    values = {name: graph.fields[name] for name in ("edge_weight", "edge_attr") if name in graph.fields}

    def refuse(name: str, *_: int) -> InputError:
        return InputError(
            f"{name}: edges with the same ends have other {values[name].dtype} attributes, of which there is no "
            "average; merge these edges before, or set float_features"
        )

    return merge_edges(key, e_id, values, refuse, added=e_id % 2 if graph.mirrored else None)


def _write_topology(topology: Topology, folder: Path) -> dict[str, Any]:
    num_owned = len(topology.indptr) - 1
    files = {
        name: write_rows(folder / f"{name}.npy", getattr(topology, name)) for name in ("n_id", "indptr", "recv_counts")
    }
    for name in ("src", "e_id"):
        files[name] = write_rows(folder / f"{name}.npy", getattr(topology, name), topology.order)
    return {
        "num_owned": num_owned,
        "num_halo": len(topology.n_id) - num_owned,
        "halo_per_hop": [len(topology.n_id) - num_owned],
        "num_edges": len(topology.src),
        "num_cut": int(np.count_nonzero(topology.src >= num_owned)),
        "recv_counts": topology.recv_counts.tolist(),
        "files": files,
    }


NODES = Placement(name="nodes", write=_write, most_hops=1)
