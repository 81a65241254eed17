"""Edges read as a stream: chunks of bounded size, any number of passes.

Partitioners see a graph only through :class:`EdgeStream`, so that one algorithm serves a graph in memory and a
memory-mapped file alike. A stream repeats itself: every pass yields the same edges in the same order, and no result
may depend on where the chunks are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from pygdist.errors import InputError

__all__ = ["EdgeStream"]

_CHUNK_EDGES = 1 << 20  # 16 MiB of int64: small beside any graph, large beside the cost of a Python call


class EdgeStream:
    """The edges of a graph whose nodes are numbered ``0 .. num_nodes - 1``.

    Args:
        edge_index: Integer array of shape ``(2, E)``, in memory or memory-mapped, of any layout and integer type.
        num_nodes: Number of nodes, isolated ones included.
        chunk_edges: Most edges in a chunk.

    Attributes:
        num_nodes: Number of nodes.
        num_edges: Number of directed edges, duplicates and self-loops included.

    Example:
        >>> edges = EdgeStream(np.array([[0, 1, 2], [1, 2, 0]]), num_nodes=3, chunk_edges=2)
        >>> [chunk.shape for chunk in edges.chunks()]
        [(2, 2), (2, 1)]
    """

    def __init__(self, edge_index: NDArray[Any], *, num_nodes: int, chunk_edges: int = _CHUNK_EDGES) -> None:
        if edge_index.ndim != 2 or edge_index.shape[0] != 2:
            raise ValueError(f"edge_index: expected shape (2, E), got {edge_index.shape}")
        if chunk_edges < 1:
            raise ValueError(f"chunk_edges: expected at least 1, got {chunk_edges}")
        self.num_nodes = num_nodes
        self.num_edges = int(edge_index.shape[1])
        self._edge_index = edge_index
        self._chunk_edges = chunk_edges

    @classmethod
    def from_data(cls, data: Data, *, chunk_edges: int = _CHUNK_EDGES) -> EdgeStream:
        """The stream over ``data.edge_index``, without a copy of it.

        Args:
            data: A graph on the CPU, as :func:`pygdist.graph.prepare` returns it.
            chunk_edges: Most edges in a chunk.
        """
        assert data.edge_index is not None
        assert data.num_nodes is not None
        return cls(data.edge_index.numpy(), num_nodes=int(data.num_nodes), chunk_edges=chunk_edges)

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """One pass over the edges.

        Raises:
            InputError: At an id that no node has.

        Yields:
            int64 arrays of shape ``(2, k)``, C-contiguous, row 0 the sources and row 1 the targets. An array is the
            caller's to keep and to change.
        """
        for start in range(0, self.num_edges, self._chunk_edges):
            chunk = np.array(self._edge_index[:, start : start + self._chunk_edges], dtype=np.int64, order="C")
            if int(chunk.min()) < 0 or int(chunk.max()) >= self.num_nodes:
                column = int(np.flatnonzero(((chunk < 0) | (chunk >= self.num_nodes)).any(axis=0))[0])
                raise InputError(
                    f"edge_index: edge {start + column} joins nodes {chunk[0, column]} and {chunk[1, column]}, but the "
                    f"graph has nodes 0 to {self.num_nodes - 1}"
                )
            yield chunk
