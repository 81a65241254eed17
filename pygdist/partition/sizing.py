"""Finds the smallest number of parts that fit the memory of the devices (CATGNN, Sec. 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph import EdgeStream, WholeGraph
from pygdist.partition.metrics import PartitionMetrics

_GIB = 2**30
_TABLE_BYTES = 1 << 28
_DEGREE_BYTES = 5 * 8  # of a row of `in_degree`
_LEAST_GROWTH = 1.25  # of the number of parts from one try to the next
# give up after _PATIENCE tries in a row that each leave more than _LEAST_GAIN of the excess over the budget
_LEAST_GAIN, _PATIENCE = 0.9, 3


@dataclass(frozen=True, kw_only=True)
class GraphBytes:
    """The memory that a graph takes on a rank.

    Attributes:
        per_node: Bytes of an owned row: features, label, masks, id and offset.
        per_halo: Bytes of a halo row: features and id.
        per_edge: Bytes of an edge: source, position, values.
    """

    per_node: int
    per_halo: int
    per_edge: int

    @classmethod
    def of(cls, graph: WholeGraph) -> GraphBytes:
        """Compute the memory of a graph as the store will hold it; duplicate edges, to be merged, count separately."""
        fields = graph.fields.items()
        types = graph.dtypes
        width = {name: types[name].itemsize * math.prod(value.shape[1:]) for name, value in fields}
        of_edges = sum(width.get(name, 0) for name in ("edge_weight", "edge_attr", "edge_type"))
        per_node = sum(width.values()) - of_edges + 16
        return cls(per_node=per_node, per_halo=width.get("x", 0) + 8, per_edge=of_edges + 12)

    def whole(self, num_nodes: int, num_edges: int) -> int:
        """Return the bytes of the whole graph."""
        return num_nodes * self.per_node + num_edges * self.per_edge

    def largest(self, metrics: PartitionMetrics, *, with_rim: bool = False) -> int:
        """Return the bytes of the largest part with its halo of one hop.

        ``with_rim`` adds in-degrees and edges into the halo, for the placement *replicas*. These edges are estimated:
        as many as cut edges, shared out by the size of halos. For more hops see :meth:`largest_around`.
        """
        num_halo, num_edges = metrics.num_halo, metrics.num_edges.astype(float)
        rows = metrics.num_nodes * self.per_node + num_halo * self.per_halo
        if with_rim:
            rows = rows + (metrics.num_nodes + num_halo) * _DEGREE_BYTES
            num_edges += metrics.edge_cut * num_halo / max(num_halo.sum(), 1)
        return int((rows + num_edges * self.per_edge).max())

    def largest_around(self, num_nodes: NDArray[np.int64], num_rows: NDArray[np.int64], num_edges: NDArray[Any]) -> int:
        """Return the bytes of the largest part in the placement *replicas*, with a halo of any number of hops.

        ``num_nodes`` are the owned nodes of each part; :func:`surroundings` counts all rows and edges.
        """
        rows = num_nodes * self.per_node + (num_rows - num_nodes) * self.per_halo + num_rows * _DEGREE_BYTES
        return int((rows + num_edges * self.per_edge).max())


def surroundings(
    edges: EdgeStream, part: NDArray[Any], num_parts: int, num_hops: int, *, table_bytes: int = _TABLE_BYTES
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the rows (owned ones included) and edges of each part with the nodes within ``num_hops >= 1`` hops.

    The counts are exact: a pass over the edges for each hop finds the rows, and one more pass counts the edges. Of the
    edges into the outermost rows, only edges from nearer rows and self-loops count (``Surroundings`` has no others).

    Args:
        edges: The graph.
        part: Owner of each node, integers of shape ``(N,)``.
        num_parts: Number of parts, P; both results are int64 of shape ``(P,)``.
        num_hops: Number of hops.
        table_bytes: Largest memory for tables of ``2 N P`` bytes. If the tables are larger, each pass over the stream
            counts only some of the parts.
    """
    num_rows, num_edges = np.zeros((2, num_parts), dtype=np.int64)
    width = max(1, min(num_parts, table_bytes // max(2 * edges.num_nodes, 1)))
    for first in range(0, num_parts, width):
        group = np.arange(first, min(first + width, num_parts))
        reached = inner = part == group[:, None]
        for _ in range(num_hops):
            inner, reached = reached, reached.copy()
            for source, target in edges.chunks():
                for inside, rows in zip(inner, reached, strict=True):
                    rows[source[inside[target]]] = True
        num_rows[group] = reached.sum(axis=1)
        for source, target in edges.chunks():
            loop = source == target
            for number, inside, rows in zip(group, inner, reached, strict=True):
                num_edges[number] += np.count_nonzero(inside[target] | (rows[target] & (inside[source] | loop)))
    return num_rows, num_edges


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of the devices that will hold a graph.

    Args:
        devices: Number of devices (q in the paper).
        bytes: Memory of each device, in bytes (M).
        reserve: Share of this memory that is kept free for training (T / M).

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> partition_graph(data, "parts", num_parts=DeviceMemory(devices=4, bytes=16 * 2**30))
    """

    devices: int
    bytes: int
    reserve: float = 2 / 3

    def __post_init__(self) -> None:
        if self.devices < 1 or self.bytes < 1 or not 0 <= self.reserve < 1:
            raise InputError(
                f"devices is {self.devices}, their memory {self.bytes} bytes, reserve {self.reserve}; expected at "
                "least 1 device, memory above 0, and reserve from 0 to below 1"
            )

    @property
    def budget(self) -> float:
        """Bytes that a part may take (M - T)."""
        return self.bytes * (1 - self.reserve)

    def fewest(self, num_bytes: int, num_nodes: int) -> int:
        """Return the number of parts by the paper's rule: one for each device, or more if the graph needs more memory.

        ``num_bytes`` is the size of the graph and its features.

        Raises:
            InputError: If there would be more parts than nodes.
        """
        if self.devices > num_nodes:
            raise InputError(f"devices is {self.devices}, but the graph has {num_nodes} nodes; use fewer devices")
        num_parts = max(self.devices, math.ceil(num_bytes / self.budget))
        if num_parts > num_nodes:
            raise InputError(
                f"parts: the graph takes {num_bytes / _GIB:.3g} GiB, more than {num_nodes} parts (one for each node) "
                f"hold in {self._budget_text()} each; use devices with more memory, or a smaller reserve"
            )
        return num_parts

    def search(self, num_bytes: int, num_nodes: int, largest_of: Callable[[int], float]) -> int:
        """Find the smallest number of parts with which each part and its halo fit; each try partitions the graph.

        The search starts with the number by the paper's rule, and increases the number, at most twofold at a time,
        until the parts fit. A bisection between the last two numbers then finds the smallest. The search can miss a
        smaller number if the largest part does not shrink with each added part.

        Args:
            num_bytes: Bytes of the graph and its features.
            num_nodes: Number of nodes.
            largest_of: Partitions the graph into a number of parts, and returns the bytes of the largest part.

        Raises:
            InputError: If no number fits: halos have stopped shrinking, or there would be more parts than nodes.
        """
        num_parts = self.fewest(num_bytes, num_nodes)
        largest = largest_of(num_parts)
        below, stuck = num_parts - 1, 0
        while largest > self.budget:
            factor = min(max(largest / self.budget, _LEAST_GROWTH), 2)
            if num_parts == num_nodes or stuck == _PATIENCE:
                raise InputError(
                    f"parts: with {num_parts} parts the largest takes {largest / _GIB:.3g} GiB with its halo, and more "
                    f"parts do not help to fit {self._budget_text()}; use devices with more memory, a smaller reserve, "
                    "or a method that replicates less"
                )
            below, num_parts, before = num_parts, min(math.ceil(num_parts * factor), num_nodes), largest
            largest = largest_of(num_parts)
            stuck = stuck + 1 if largest - self.budget > _LEAST_GAIN * (before - self.budget) else 0
        while num_parts - below > 1:
            middle = (below + num_parts) // 2
            if largest_of(middle) <= self.budget:
                num_parts = middle
            else:
                below = middle
        return num_parts

    def _budget_text(self) -> str:
        return f"{self.budget / _GIB:.3g} GiB ({self.bytes / _GIB:.3g} GiB less {self.reserve:.0%} for training)"
