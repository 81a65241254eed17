"""What each part holds under the placement *nodes*: its own nodes, all their in-edges, and the rows to fetch.

Everything is derived from the edges of a part and the owner of each node, one part at a time, without a loop over nodes
or edges. Two parts never have to be in memory together: the rows that a part sends follow from what the others listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.streams.sorting import grouped

__all__ = ["NodeParts", "Topology"]

_INT32_MAX = np.iinfo(np.int32).max

Edges = Callable[[], tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The edges of one part in local ids; a local id is a position in ``n_id``.

    Edges are as they came; ``order`` puts them target by target, in the order of ``e_id`` inside a target, so that sums
    and order-dependent aggregations meet their messages in the order that one process meets them.

    Attributes:
        n_id: Global ids of the rows: owned (ascending), then halo by owner part, ascending inside an owner;
            int64 of shape ``(n + h,)``.
        indptr: Where the in-edges of each owned row start in ``order``; int64 of shape ``(n + 1,)``.
        order: Positions of edges; of shape ``(e,)``.
        src: Source rows; int32 of shape ``(e,)``, int64 where the graph has 2^31 nodes or more.
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
    """The nodes of a graph by their owner; memory grows with the nodes, not with the edges.

    Args:
        part: Owner of each node, of shape ``(N,)``.
        num_parts: Number of parts, some of which may own nothing.

    Attributes:
        num_parts: Number of parts.
        narrow: The type of local ids: int32 where the ids of all nodes fit.
    """

    def __init__(self, part: NDArray[Any], num_parts: int) -> None:
        self.num_parts = num_parts
        self._part = part.astype(np.uint16 if num_parts <= 1 << 16 else np.int32)
        self._node_start, nodes = grouped(self._part, num_parts)
        self.narrow = narrow = np.int32 if len(part) <= _INT32_MAX else np.int64
        self._nodes = nodes.astype(narrow, copy=False)
        del nodes
        self._position = np.empty(len(part), dtype=narrow)  # of each node among its owner's
        for one in range(num_parts):
            owned = self.owned(one)
            self._position[owned] = np.arange(len(owned))
        # scratch, of the part at hand
        self._local: NDArray[Any] = np.full(len(part), -1, dtype=narrow)
        self._indexed = np.empty(0, dtype=np.int64)
        self._wanted = np.zeros(len(part), dtype=bool)

    @property
    def owner(self) -> NDArray[Any]:
        """Owner of each node, in a narrow type."""
        return self._part

    def owned(self, part: int) -> NDArray[Any]:
        """Global ids of the nodes that a part owns, ascending."""
        return self._nodes[self._node_start[part] : self._node_start[part + 1]]

    def topology(self, part: int, edges: Edges, *, merge: bool = False) -> Topology:
        """The edges of a part in local ids, and the rows at their ends.

        Args:
            part: Which part.
            edges: Gives its edges: sources, targets, and their positions in the whole graph, ascending.
            merge: Keep the first edge of each source and target.
        """
        source, target, e_id = edges()  # called here, so that nobody else holds what is let go of below
        owned, row = self.owned(part), self._position[target]
        del target
        if merge:
            key = row.astype(np.int64) * len(self._part) + source
            first = np.sort(np.unique(key, return_index=True)[1])
            source, row, e_id = source[first], row[first], e_id[first]
            del key, first
        halo, recv_counts = self.by_owner(self.unseen([source], owned))
        n_id = np.concatenate([owned, halo])
        self.index(n_id)
        src = self.indexed(source)
        del source
        indptr, order = grouped(row, len(owned))
        return Topology(n_id=n_id, indptr=indptr, order=order, src=src, e_id=e_id, recv_counts=recv_counts)

    def unseen(self, nodes: Iterable[NDArray[Any]], known: NDArray[Any]) -> NDArray[np.int64]:
        """The distinct ones of ``nodes`` that are not ``known``, ascending."""
        for some in nodes:
            self._wanted[some] = True
        self._wanted[known] = False
        found = np.flatnonzero(self._wanted)
        self._wanted[found] = False
        return found

    def by_owner(self, nodes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Nodes grouped by their owner, in the order given inside a group, and how many there are of each."""
        start, order = grouped(self._part[nodes], self.num_parts)
        return nodes[order], np.diff(start)

    def index(self, n_id: NDArray[np.int64]) -> None:
        """Note where each node is in ``n_id``, for :meth:`indexed`."""
        self._local[self._indexed] = -1
        self._indexed = n_id
        self._local[n_id] = np.arange(len(n_id))

    def indexed(self, nodes: NDArray[Any]) -> NDArray[Any]:
        """Where nodes are in the last ``n_id`` that :meth:`index` was given, -1 if nowhere; of type ``narrow``."""
        return np.asarray(self._local[nodes])

    def owned_rows(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that nodes have at their owner, in the order given: what the owner packs for whoever lists them."""
        return self._position[nodes].astype(np.int64)
