"""Vertex-cuts: each edge is assigned to one part, and a node is in every part that has one of its edges.

:class:`EdgePartitioner` is the base class of such methods. As in CATGNN (Sec. 3.2), a hash draws the owner of a node
among the parts that hold the node. With the placement *edges*, the store keeps each edge in the part of the
vertex-cut. With other placements, a part gets all in-edges of the nodes that it owns.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.native import NativePlacement, load
from pygdist.partition._native import Argument, PlaceEdges, call
from pygdist.partition.base import (
    Assignment,
    Partitioner,
    check_num_parts,
    check_number,
    check_seed,
    partitioners,
)
from pygdist.partition.hash import mix

_NODES_AT_A_TIME = 1 << 20


@dataclass(kw_only=True)
class VertexCut:
    """The parts that hold each node, and the number of edges of each part.

    Attributes:
        num_parts: Number of parts, P.
        replicas: One bit for each node and part, set if the part holds the node; uint64 of shape
            ``(N, ceil(P / 64))``.
        num_edges: Edges of each part; int64 of shape ``(P,)``.
    """

    num_parts: int
    replicas: NDArray[np.uint64]
    num_edges: NDArray[np.int64]

    @classmethod
    def empty(cls, num_nodes: int, num_parts: int) -> VertexCut:
        """Make the vertex-cut of no edges."""
        replicas = np.zeros((num_nodes, -(-num_parts // 64)), dtype=np.uint64)
        return cls(num_parts=num_parts, replicas=replicas, num_edges=np.zeros(num_parts, dtype=np.int64))

    def native(self, capacity: int) -> NativePlacement:
        """Return the structure by which the native library changes this object; ``capacity`` limits a part's edges."""
        return NativePlacement(self.replicas.ctypes.data, self.num_edges.ctypes.data, self.num_parts, capacity)

    def placer(self, function: str, *arguments: Argument, adds: bool = False) -> PlaceEdges:
        """Return a function ``(chunk, part)`` that calls ``pygdist_<function>`` with the chunk, the arguments and part.

        With ``adds`` the returned function then adds the edges to this object, for library functions that do not.
        """

        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            call(function, chunk, *arguments, part)
            if adds:
                self.add(chunk, part)

        return place

    def add(self, chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
        """Add placed edges: a chunk ``(2, k)``, and the part of each edge, int32 of shape ``(k,)``."""
        if load() is not None:
            call("mark_replicas", chunk, self.native(0), part)
            return
        bit = np.uint64(1) << (part % 64).astype(np.uint64)
        for ends in chunk:
            np.bitwise_or.at(self.replicas, (ends, part // 64), bit)
        self.num_edges += np.bincount(part, minlength=self.num_parts)

    def num_replicas(self) -> NDArray[np.int64]:
        """Count the parts that hold each node; int64 of shape ``(N,)``, 0 for nodes without edges."""
        return np.asarray(np.bitwise_count(self.replicas).sum(axis=1, dtype=np.int64))

    @property
    def replication_factor(self) -> float:
        """Mean number of parts that hold a node; a node without edges counts once, for its owner."""
        total = 0
        for start in range(0, len(self.replicas), _NODES_AT_A_TIME):
            rows = self.replicas[start : start + _NODES_AT_A_TIME]
            total += int(np.maximum(np.bitwise_count(rows).sum(axis=1, dtype=np.int64), 1).sum())
        return total / max(len(self.replicas), 1)

    def owners(self, seed: int) -> NDArray[np.int32]:
        """Draw each node's owner, int32 ``(N,)``, by a hash of its id: a part with the node, or any if none has it."""
        owner = np.empty(len(self.replicas), dtype=np.int32)
        for start in range(0, len(owner), _NODES_AT_A_TIME):
            rows = self.replicas[start : start + _NODES_AT_A_TIME]
            keys = mix(np.arange(start, start + len(rows), dtype=np.uint64), seed)
            counts = np.bitwise_count(rows).sum(axis=1, dtype=np.uint64)
            left = keys % np.maximum(counts, np.uint64(1))  # replicas to skip
            chosen = (keys % np.uint64(self.num_parts)).astype(np.int32)
            for part in range(self.num_parts):
                here = (rows[:, part // 64] >> np.uint64(part % 64)) & np.uint64(1) == 1
                chosen[here & (left == 0)] = part
                left[here] -= np.uint64(1)  # wraps below 0, and stays far from it
            owner[start : start + len(rows)] = chosen
        return owner


@dataclass(frozen=True, kw_only=True)
class EdgePartitioner(Partitioner):
    """Assigns every edge to a part.

    To write an edge partitioner, subclass this class like :class:`~pygdist.partition.Partitioner`, but write
    :meth:`placing` instead of ``assign``. The result must not depend on the division of the stream into chunks.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class BySource(EdgePartitioner):
        ...     name = "by-source"
        ...
        ...     def placing(self, edges, cut):
        ...         def place(chunk, part):
        ...             part[:] = chunk[0] % cut.num_parts
        ...             cut.add(chunk, part)
        ...
        ...         return place

    Args:
        seed: Seed of the hashes, and of the draw of each node's owner.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self, self.seed)

    @abstractmethod
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        """Return a function ``(chunk, part)`` that writes the part of each edge of a chunk into ``part``.

        The function must also add the placed edges to ``cut`` (:meth:`VertexCut.add`). ``placing`` itself may read the
        edges in any number of passes.
        """

    def cut(self, edges: EdgeStream, num_parts: int, part: NDArray[Any] | None = None) -> VertexCut:
        """Place all edges, and return the vertex-cut; ``part``, ``(E,)``, receives the part of each edge.

        ``part`` may be memory-mapped.

        Raises:
            InputError: If the graph cannot be divided into so many parts, or the method needs the native library and
                this library is missing.
        """
        check_num_parts(edges.num_nodes, num_parts)
        cut = VertexCut.empty(edges.num_nodes, num_parts)
        place, start = self.placing(edges, cut), 0
        for chunk in edges.chunks():
            placed = np.empty(chunk.shape[1], dtype=np.int32)
            place(chunk, placed)
            if part is not None:
                part[start : start + len(placed)] = placed
            start += len(placed)
        return cut

    @override
    def run(self, edges: EdgeStream, num_parts: int, part: NDArray[Any] | None = None) -> Assignment:
        """Place all edges, and draw the owner of each node; ``part``, ``(E,)``, receives the part of each edge."""
        cut = self.cut(edges, num_parts, part)
        figures = {
            "replication_factor": cut.replication_factor,
            "vertex_cut_edges_balance": float(cut.num_edges.max() / cut.num_edges.mean()) if edges.num_edges else 1.0,
        }
        return Assignment(part=cut.owners(self.seed), figures=figures)

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        return self.run(edges, num_parts).part


@dataclass(frozen=True, kw_only=True)
class BalancedEdgePartitioner(EdgePartitioner):
    """An edge partitioner with a limit on the edges of a part.

    Args:
        balance: Largest number of edges in a part, relative to the mean; at least 1.
    """

    balance: float = 1.05

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "balance", 1)

    def capacity(self, edges: EdgeStream, num_parts: int) -> int:
        """Return the largest number of edges that a part may get."""
        return max(min(math.ceil(self.balance * edges.num_edges / num_parts), edges.num_edges), 1)


def edge_partitioner_names() -> list[str]:
    """Return the registered names of the partitioners that assign edges to parts, sorted."""
    return [name for name in partitioners if issubclass(partitioners[name], EdgePartitioner)]
