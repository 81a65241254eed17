"""Chunks: contiguous, balanced by the stated work, never empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygdist.graph import EdgeStream, power_law
from pygdist.partition import ChunkPartitioner


def stream_with_in_degrees(in_degree: list[int]) -> EdgeStream:
    target = np.repeat(np.arange(len(in_degree)), in_degree)
    return EdgeStream(np.stack([np.zeros_like(target), target]), num_nodes=len(in_degree))


@given(
    in_degree=st.lists(st.one_of(st.integers(0, 5), st.just(500)), min_size=1, max_size=40),
    num_parts=st.integers(1, 10),
    node_weight=st.sampled_from([0.0, 1.0, 16.0]),
)
@settings(max_examples=100)
def test_contiguous_and_never_empty(in_degree: list[int], num_parts: int, node_weight: float) -> None:
    num_parts = min(num_parts, len(in_degree))
    part = ChunkPartitioner(node_weight=node_weight).assign(stream_with_in_degrees(in_degree), num_parts)
    assert part[0] == 0
    assert part[-1] == num_parts - 1
    assert set(np.diff(part)) <= {0, 1}


@pytest.mark.parametrize(
    ("node_weight", "expected"),
    [
        pytest.param(0.0, [0, 1, 1, 1, 1, 1], id="edges"),
        pytest.param(1e6, [0, 0, 0, 1, 1, 1], id="nodes"),
    ],
)
def test_the_weight_decides(node_weight: float, expected: list[int]) -> None:
    part = ChunkPartitioner(node_weight=node_weight).assign(stream_with_in_degrees([5, 1, 1, 1, 1, 1]), 2)
    assert part.tolist() == expected


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_balance(num_parts: int) -> None:
    """No part is heavier than the mean by more than its heaviest node."""
    edges = EdgeStream.from_data(power_law(2000, 40_000, num_features=1))
    in_degree = np.bincount(next(edges.chunks())[1], minlength=2000)
    work = in_degree + 16.0
    load = np.bincount(ChunkPartitioner().assign(edges, num_parts), weights=work)
    assert load.max() <= work.sum() / num_parts + work.max()
    assert load.min() >= work.sum() / num_parts - work.max()


def test_no_edges() -> None:
    stream = EdgeStream(np.empty((2, 0), dtype=np.int64), num_nodes=4)
    assert ChunkPartitioner(node_weight=0.0).assign(stream, 4).tolist() == [0, 1, 2, 3]
    assert ChunkPartitioner().assign(stream, 2).tolist() == [0, 0, 1, 1]
