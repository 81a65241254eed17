"""All edges on disk, grouped by the part that aggregates them: written in one pass, read part by part.

Every chunk of the stream is sorted by part and appended to one file, so memory holds one chunk while writing, and the
edges of one part while reading.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pygdist.graph.streams.sorting import grouped
from pygdist.graph.streams.stream import EdgeStream

PartsOf: TypeAlias = Callable[[NDArray[Any], slice], NDArray[Any]]


class Spill:
    """Edges in a file, grouped by part; the file is removed when the ``with`` block ends.

    Args:
        path: The file.
        edges: All edges.
        parts_of: Returns the part of each edge of a chunk; it gets the chunk, ``(2, k)``, and its positions in the
            whole graph.
        num_parts: Number of parts.
    """

    def __init__(self, path: Path, edges: EdgeStream, parts_of: PartsOf, num_parts: int) -> None:
        self.path = path
        number = "<i4" if edges.num_nodes <= np.iinfo(np.int32).max else "<i8"
        self._record = np.dtype([("source", number), ("target", number), ("position", "<u4")])  # in its chunk
        self._first = np.arange(0, edges.num_edges, edges.chunk_edges)  # edge of each chunk
        self._start = np.zeros((len(self._first), num_parts + 1), dtype=np.int64)  # records of each chunk by part
        with path.open("wb") as file:
            for number_of_chunk, chunk in enumerate(edges.chunks()):
                start = int(self._first[number_of_chunk])
                indptr, order = grouped(parts_of(chunk, slice(start, start + chunk.shape[1])), num_parts)
                records = np.empty(len(order), dtype=self._record)
                records["source"], records["target"], records["position"] = chunk[0, order], chunk[1, order], order
                file.write(records.data)
                self._start[number_of_chunk] = self._first[number_of_chunk] + indptr

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)

    def num_edges_of(self, part: int) -> int:
        """Return the number of edges of a part."""
        return int((self._start[:, part + 1] - self._start[:, part]).sum())

    def edges_of(self, part: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Return the edges of a part: sources, targets and positions in the whole graph, ascending."""
        start, stop = self._start[:, part], self._start[:, part + 1]
        end = np.cumsum(stop - start)
        count = int(end[-1]) if len(end) else 0
        source, target = (np.empty(count, dtype=self._record["source"]) for _ in range(2))
        position = np.empty(count, dtype=np.int64)
        with self.path.open("rb") as file:
            for chunk, last in enumerate(end):
                records = np.empty(stop[chunk] - start[chunk], dtype=self._record)
                file.seek(start[chunk] * self._record.itemsize)
                file.readinto(records.data)
                here = slice(last - len(records), last)
                source[here], target[here] = records["source"], records["target"]
                np.add(records["position"], self._first[chunk], out=position[here])
        return source, target, position
