"""Vertex-cuts: each edge goes to one part, and a node is wherever its edges are. The extension point for such methods.

A vertex-cut becomes node ownership as CATGNN makes it (Sec. 3.2): one of the parts that hold a node, drawn by a hash,
is its owner, and what it lacks of the node's neighbours is added when the parts are written.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.native import NativePlacement, load
from pygdist.partition._native import call
from pygdist.partition.base import Assignment, Partitioner, check_num_parts
from pygdist.partition.hash import mix

__all__ = ["BalancedEdgePartitioner", "EdgePartitioner", "Place", "VertexCut", "marked"]

_NODES_AT_A_TIME = 1 << 20


@dataclass(kw_only=True)
class VertexCut:
    """Which parts hold each node, and how many edges each part has.

    Attributes:
        num_parts: Number of parts, P.
        replicas: One bit for each node and part; uint64 of shape ``(N, ceil(P / 64))``.
        num_edges: Edges of each part; int64 of shape ``(P,)``.
    """

    num_parts: int
    replicas: NDArray[np.uint64]
    num_edges: NDArray[np.int64]

    @classmethod
    def empty(cls, num_nodes: int, num_parts: int) -> VertexCut:
        """Before the first edge."""
        replicas = np.zeros((num_nodes, -(-num_parts // 64)), dtype=np.uint64)
        return cls(num_parts=num_parts, replicas=replicas, num_edges=np.zeros(num_parts, dtype=np.int64))

    def native(self, capacity: int) -> NativePlacement:
        """The view that the loops work on; ``capacity`` is the most edges that a part takes."""
        return NativePlacement(self.replicas.ctypes.data, self.num_edges.ctypes.data, self.num_parts, capacity)

    def add(self, chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
        """Note edges that were placed.

        Args:
            chunk: Edges, of shape ``(2, k)``.
            part: The part of each; int32 of shape ``(k,)``.
        """
        if load() is not None:
            call("mark_replicas", chunk, self.native(0), part)
            return
        bit = np.uint64(1) << (part % 64).astype(np.uint64)
        for ends in chunk:
            np.bitwise_or.at(self.replicas, (ends, part // 64), bit)
        self.num_edges += np.bincount(part, minlength=self.num_parts)

    def num_replicas(self) -> NDArray[np.int64]:
        """The number of parts that hold each node; int64 of shape ``(N,)``, 0 for nodes without edges."""
        return np.asarray(np.bitwise_count(self.replicas).sum(axis=1, dtype=np.int64))

    @property
    def replication_factor(self) -> float:
        """Mean number of parts that hold a node; one without edges is in one part, as its owner has it."""
        total = 0
        for start in range(0, len(self.replicas), _NODES_AT_A_TIME):
            rows = self.replicas[start : start + _NODES_AT_A_TIME]
            total += int(np.maximum(np.bitwise_count(rows).sum(axis=1, dtype=np.int64), 1).sum())
        return total / max(len(self.replicas), 1)

    def owners(self, seed: int) -> NDArray[np.int32]:
        """One of the parts that hold each node, drawn by a hash of its id; any part for a node without edges.

        Returns:
            int32 of shape ``(N,)``.
        """
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


Place = Callable[[NDArray[np.int64], NDArray[np.int32]], None]
"""Called with a chunk and the array for its parts, in the order of the stream."""


@dataclass(frozen=True, kw_only=True)
class EdgePartitioner(Partitioner):
    """Assigns every edge to a part.

    Subclass it as :class:`~pygdist.partition.Partitioner`, and write :meth:`placing` in place of ``assign``. The result
    must not depend on where the stream is cut into chunks.

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
        seed: Of the hashes, and of the draw of each node's owner.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"{self.name}: seed is {self.seed}, expected 0 to 2**64 - 1")

    @abstractmethod
    def placing(self, edges: EdgeStream, cut: VertexCut) -> Place:
        """What places the edges, chunk by chunk.

        Args:
            edges: The graph; any number of passes may come before the one that places.
            cut: To be filled in while the edges are placed (:meth:`VertexCut.add`).
        """

    def cut(self, edges: EdgeStream, num_parts: int, part: NDArray[Any] | None = None) -> VertexCut:
        """Place all edges.

        Args:
            edges: The graph.
            num_parts: Number of parts.
            part: Integers of shape ``(E,)``, memory-mapped if need be, that receive the part of each edge.

        Raises:
            InputError: If the graph cannot be cut into so many parts, or the method needs the native library and
                there is none.
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
    def run(self, edges: EdgeStream, num_parts: int) -> Assignment:
        cut = self.cut(edges, num_parts)
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
    """An edge partitioner that fills no part beyond a bound.

    Args:
        balance: The most edges of a part, over the mean; at least 1.
    """

    balance: float = 1.05

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.balance < math.inf:
            raise InputError(f"{self.name}: balance is {self.balance}, expected a finite number of at least 1")

    def capacity(self, edges: EdgeStream, num_parts: int) -> int:
        """The most edges of a part."""
        return max(min(math.ceil(self.balance * edges.num_edges / num_parts), edges.num_edges), 1)


def marked(cut: VertexCut, place: Place) -> Place:
    """``place``, which looks at no edge but its own, and what it means for the nodes noted in ``cut``."""

    def placed(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
        place(chunk, part)
        cut.add(chunk, part)

    return placed
