"""Streams: the same edges whatever the chunks, any number of times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pygdist.graph import EdgeStream

EDGES = np.array([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])


@pytest.mark.parametrize("chunk_edges", [1, 2, 5, 100])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_passes_repeat_the_edges(chunk_edges: int, dtype: type) -> None:
    stream = EdgeStream(EDGES.astype(dtype), num_nodes=5, chunk_edges=chunk_edges)
    assert (stream.num_nodes, stream.num_edges) == (5, 5)
    for _ in range(2):
        chunks = list(stream.chunks())
        assert all(chunk.dtype == np.int64 and chunk.flags.c_contiguous for chunk in chunks)
        assert max(chunk.shape[1] for chunk in chunks) <= chunk_edges
        np.testing.assert_array_equal(np.concatenate(chunks, axis=1), EDGES)


def test_chunks_are_copies() -> None:
    edges = EDGES.copy()
    for chunk in EdgeStream(edges, num_nodes=5, chunk_edges=5).chunks():
        chunk[:] = 0
    np.testing.assert_array_equal(edges, EDGES)


def test_reads_a_memory_map_in_either_layout(tmp_path: Path) -> None:
    np.save(tmp_path / "edges.npy", EDGES.T)
    stream = EdgeStream(np.load(tmp_path / "edges.npy", mmap_mode="r").T, num_nodes=5, chunk_edges=2)
    np.testing.assert_array_equal(np.concatenate(list(stream.chunks()), axis=1), EDGES)


def test_no_edges() -> None:
    assert list(EdgeStream(np.empty((2, 0), dtype=np.int64), num_nodes=3).chunks()) == []


def test_from_data() -> None:
    stream = EdgeStream.from_data(Data(x=torch.zeros(7, 1), edge_index=torch.from_numpy(EDGES)))
    assert (stream.num_nodes, stream.num_edges) == (7, 5)


def test_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match=r"expected shape \(2, E\), got \(5, 2\)"):
        EdgeStream(EDGES.T, num_nodes=5)
    with pytest.raises(ValueError, match="chunk_edges"):
        EdgeStream(EDGES, num_nodes=5, chunk_edges=0)
