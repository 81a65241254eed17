"""Edges read as a stream: chunks of bounded size, any number of passes.

Partitioners see a graph only through :class:`EdgeStream`, so one algorithm serves graphs in memory and files of any
length. Every pass yields the same edges in the same order, and no result may depend on the size of the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph.streams.progress import Progress, watched

_CHUNK_EDGES = 1 << 20  # 16 MiB of int64: small beside any graph, large beside the cost of a Python call


@runtime_checkable
class EdgeSource(Protocol):
    """An object that reads edges for a stream, such as :class:`~pygdist.graph.EdgeFile` or ``EdgeGenerator``."""

    num_edges: int

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return edges ``start`` to ``stop - 1``: a new int64 array of shape ``(2, stop - start)``, C-contiguous."""
        ...


class EdgeStream:
    """The edges of a graph whose nodes are numbered ``0 .. num_nodes - 1``.

    Args:
        edge_index: Integer array of shape ``(2, E)``, in memory or memory-mapped, of any layout and integer type; or
            an :class:`~pygdist.graph.EdgeSource`.
        num_nodes: Number of nodes, isolated ones included.
        chunk_edges: Largest number of edges in a chunk.
        name: Name of the edges in error messages.
        progress: Shows every pass over the edges.

    Attributes:
        num_edges: Number of directed edges, duplicates and self-loops included.
        name: Name of the edges in error messages.

    Raises:
        ValueError: If an array has another shape or no integers, or ``chunk_edges`` is below 1.

    Example:
        >>> edges = EdgeStream(np.array([[0, 1, 2], [1, 2, 0]]), num_nodes=3, chunk_edges=2)
        >>> [chunk.shape for chunk in edges.chunks()]
        [(2, 2), (2, 1)]
    """

    def __init__(
        self,
        edge_index: NDArray[Any] | EdgeSource,
        *,
        num_nodes: int,
        chunk_edges: int = _CHUNK_EDGES,
        name: str = "edge_index",
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(edge_index, EdgeSource) and (edge_index.ndim != 2 or edge_index.shape[0] != 2):
            raise ValueError(f"edge_index: expected shape (2, E), got {edge_index.shape}")
        if not isinstance(edge_index, EdgeSource) and edge_index.dtype.kind not in "iu":
            raise ValueError(f"edge_index: expected integers, got {edge_index.dtype}")
        if chunk_edges < 1:
            raise ValueError(f"chunk_edges: expected at least 1, got {chunk_edges}")
        self.num_nodes = num_nodes
        self.num_edges = edge_index.num_edges if isinstance(edge_index, EdgeSource) else int(edge_index.shape[1])
        self.chunk_edges = chunk_edges
        self.progress = progress
        self._edge_index = edge_index
        self.name = name

    @classmethod
    def from_data(cls, data: Data, *, chunk_edges: int = _CHUNK_EDGES, progress: Progress | None = None) -> EdgeStream:
        """Stream ``data.edge_index``, which must be on the CPU, without copying the edges."""
        assert data.edge_index is not None
        assert data.num_nodes is not None
        edge_index, num_nodes = data.edge_index.numpy(), int(data.num_nodes)
        return cls(edge_index, num_nodes=num_nodes, chunk_edges=chunk_edges, progress=progress)

    def chunks(self) -> Iterator[NDArray[np.int64]]:
        """Yield all edges once, chunk by chunk.

        Raises:
            InputError: If an id is not a node, or a file cannot be read.

        Yields:
            int64 arrays of shape ``(2, k)``, C-contiguous, row 0 the sources and row 1 the targets. Callers may keep
            and change them.
        """
        with watched(self.progress, self.num_edges) as advance:
            for start in range(0, self.num_edges, self.chunk_edges):
                chunk = self._read(start, min(start + self.chunk_edges, self.num_edges))
                self._check(chunk, start)
                yield chunk
                advance(chunk.shape[1])

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        if isinstance(self._edge_index, EdgeSource):
            return self._edge_index.read(start, stop)
        return np.array(self._edge_index[:, start:stop], dtype=np.int64, order="C")

    def _check(self, chunk: NDArray[np.int64], start: int) -> None:
        if int(chunk.min()) < 0 or int(chunk.max()) >= self.num_nodes:
            column = int(np.flatnonzero(((chunk < 0) | (chunk >= self.num_nodes)).any(axis=0))[0])
            source, target = chunk[:, column].tolist()
            last = self.num_nodes - 1
            nodes = "nodes start at 0" if self.num_nodes >= 1 << 63 else f"the graph has nodes 0 to {last}"
            raise InputError(f"{self.name}: edge {start + column} joins nodes {source} and {target}, but {nodes}")
