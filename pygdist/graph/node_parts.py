"""What each part holds under the placement *nodes*: its own nodes, all their in-edges, and the rows to fetch.

Everything is derived from the edges and the owner of each node, one part at a time, without a loop over nodes or
edges. Two parts never have to be in memory together: the rows that a part sends follow from what the others listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["NodeParts", "Topology"]

_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The edges of one part in local ids; a local id is a position in ``n_id``.

    Attributes:
        n_id: Global ids of the rows: owned (ascending), then halo by owner part, ascending inside an owner;
            int64 of shape ``(n + h,)``.
        indptr: Where the in-edges of each owned row start; int64 of shape ``(n + 1,)``.
        src: Source rows, for each target in the order of ``e_id``, so that sums and order-dependent aggregations meet
            their messages in the order that one process meets them; int32 of shape ``(e,)`` where
            ids fit, else int64.
        e_id: Position of each edge in the whole graph; int64 of shape ``(e,)``.
        recv_counts: Halo rows of each owner part, 0 for the part itself; int64 of shape ``(num_parts,)``.
    """

    n_id: NDArray[np.int64]
    indptr: NDArray[np.int64]
    src: NDArray[np.int32] | NDArray[np.int64]
    e_id: NDArray[np.int64]
    recv_counts: NDArray[np.int64]


class NodeParts:
    """Cuts a graph into parts by the owner of each node.

    Args:
        edge_index: Edges of shape ``(2, E)``, sources and targets; duplicates and self-loops are kept.
        part: Owner of each node, of shape ``(N,)``.
        num_parts: Number of parts, some of which may own nothing.
    """

    def __init__(self, edge_index: NDArray[Any], part: NDArray[Any], num_parts: int) -> None:
        self._source, self._target = edge_index
        # numpy sorts 16-bit keys by radix, several times faster than wider ones
        self._part = part.astype(np.uint16 if num_parts <= 1 << 16 else np.int32)
        self.num_parts = num_parts
        self._nodes, self._node_start = _group(self._part, num_parts)
        self._edges, self._edge_start = _group(self._part[self._target], num_parts)
        self._position = np.empty(len(part), dtype=np.int64)
        self._position[self._nodes] = np.arange(len(part)) - self._node_start[self._part[self._nodes]]
        self._local = np.empty(len(part), dtype=np.int64)  # scratch: only entries of the part at hand are read

    def owned(self, part: int) -> NDArray[np.int64]:
        """Global ids of the nodes that a part owns, ascending."""
        return self._nodes[self._node_start[part] : self._node_start[part + 1]]

    def topology(self, part: int) -> Topology:
        """The edges of a part, those into its own nodes, and the rows at their ends."""
        owned = self.owned(part)
        e_id = self._edges[self._edge_start[part] : self._edge_start[part + 1]]
        source, target = self._source[e_id], self._position[self._target[e_id]]
        halo = np.unique(source[self._part[source] != part]).astype(np.int64)
        owner = self._part[halo]
        halo = halo[np.argsort(owner, kind="stable")]
        n_id = np.concatenate([owned, halo])
        self._local[n_id] = np.arange(len(n_id))
        src = self._local[source]
        order = np.argsort(target, kind="stable")
        indptr = np.zeros(len(owned) + 1, dtype=np.int64)
        np.cumsum(np.bincount(target, minlength=len(owned)), out=indptr[1:])
        return Topology(
            n_id=n_id,
            indptr=indptr,
            src=src[order].astype(np.int32 if len(n_id) <= _INT32_MAX else np.int64),
            e_id=e_id[order],
            recv_counts=np.bincount(owner, minlength=self.num_parts).astype(np.int64),
        )

    def owned_rows(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows that nodes have at their owner, in the order given: what the owner packs for whoever lists them."""
        return self._position[nodes]


def _group(part: NDArray[Any], num_parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions grouped by part, ascending inside a part, and where each part starts."""
    start = np.zeros(num_parts + 1, dtype=np.int64)
    np.cumsum(np.bincount(part, minlength=num_parts), out=start[1:])
    return np.argsort(part, kind="stable"), start
