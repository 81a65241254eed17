"""Streams: the same edges whatever the chunks, any number of times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import EdgeGenerator, EdgeStream
from pygdist.graph.generated.edges import node_ranks

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


def test_generated_edges_are_the_same_in_any_pieces() -> None:
    generator = EdgeGenerator(1000, 600_000, seed=3)
    whole = generator.read(0, 600_000)
    pieces = [generator.read(start, min(start + 170_001, 600_000)) for start in range(0, 600_000, 170_001)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)
    assert (whole.min(), whole.max()) == (0, 999)
    assert EdgeStream(generator, num_nodes=1000).num_edges == 600_000
    assert not np.array_equal(EdgeGenerator(1000, 600_000, seed=4).read(0, 100), whole[:, :100])


def test_generated_edges_have_communities_and_a_power_law() -> None:
    generator = EdgeGenerator(10_000, 400_000, num_communities=20, inside=0.9)
    edges = generator.read(0, 400_000)
    rank_of = node_ranks(np.arange(10_000), 10_000)
    same = (generator.communities(edges[0]) == generator.communities(edges[1])).mean()
    assert same == pytest.approx(0.9 + 0.1 / 20, abs=0.01)
    degree = np.bincount(edges.ravel(), minlength=10_000)[np.argsort(rank_of)]
    assert degree[:100].sum() > 0.1 * degree.sum()  # 1% of the nodes
    assert degree[:100].sum() == pytest.approx((100 / 10_000) ** 0.4 * degree.sum(), rel=0.1)


@pytest.mark.parametrize("options", [{"exponent": 1.0}, {"inside": 2.0}, {"num_communities": 20}])
def test_no_generator(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected"):
        EdgeGenerator(10, 20, **options)  # type: ignore[arg-type]
