"""Metrics: counted one edge at a time here, and equal from a stream and from a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from pygdist.graph import EdgeStream, write_store
from pygdist.partition import PartitionMetrics, measure


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    num_nodes, num_parts = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    edge_index = rng.integers(0, num_nodes, (2, draw(st.integers(0, 60))))
    return edge_index, rng.integers(0, num_parts, num_nodes), rng.random(num_nodes) < 0.5, num_parts


@given(case=partitioned(), chunk_edges=st.integers(1, 70), table_bytes=st.sampled_from([1, 40, 1 << 20]))
@settings(max_examples=80)
def test_metrics_count_edges(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int], chunk_edges: int, table_bytes: int
) -> None:
    edge_index, part, train, num_parts = case
    stream = EdgeStream(edge_index, num_nodes=len(part), chunk_edges=chunk_edges)
    metrics = measure(stream, part, num_parts, train_mask=train, table_bytes=table_bytes)
    needed = {(part[s], part[t], s) for s, t in edge_index.T if part[s] != part[t]}
    rows = np.zeros((num_parts, num_parts), dtype=np.int64)
    for sender, receiver, _ in needed:
        rows[sender, receiver] += 1
    np.testing.assert_array_equal(metrics.rows, rows)
    assert metrics.edge_cut == sum(part[s] != part[t] for s, t in edge_index.T)
    assert metrics.num_nodes.tolist() == [int((part == p).sum()) for p in range(num_parts)]
    assert metrics.num_edges.tolist() == [int((part[edge_index[1]] == p).sum()) for p in range(num_parts)]
    assert metrics.num_train.tolist() == [int((train & (part == p)).sum()) for p in range(num_parts)]
    assert metrics.replication_factor == pytest.approx(1 + len(needed) / len(part))


def test_the_store_says_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    part, edge_index = rng.integers(0, 3, 30), rng.integers(0, 30, (2, 90))
    train = rng.random(30) < 0.5
    data = Data(x=torch.ones(30, 1), edge_index=torch.from_numpy(edge_index), train_mask=torch.from_numpy(train))
    meta = write_store(data, part, tmp_path / "store", num_parts=4, method="given", arguments={})
    stored = PartitionMetrics.from_meta(meta)
    measured = measure(EdgeStream(edge_index, num_nodes=30), part, 4, train_mask=train)
    assert stored.totals() == measured.totals()
    assert stored.summary() == measured.summary()
    np.testing.assert_array_equal(stored.rows, measured.rows)
    assert {
        name: meta[name] for name in ("replication_factor_full", "edge_cut", "num_edges")
    }.items() <= stored.totals().items()


def test_totals_and_summary() -> None:
    stream = EdgeStream(np.array([[0, 0, 1, 3], [1, 2, 3, 0]]), num_nodes=4)
    metrics = measure(stream, np.array([0, 0, 1, 1]), 2, train_mask=np.array([True, False, False, False]))
    assert metrics.totals() == {
        "num_parts": 2,
        "num_nodes": 4,
        "num_edges": 4,
        "replication_factor_full": 1.75,
        "edge_cut": 3,
        "rows_per_hop": 3,
        "edge_cut_share": 0.75,
        "nodes_balance": 1.0,
        "edges_balance": 1.0,
        "train_nodes_balance": 2.0,
    }
    assert metrics.volume(10) == 3 * 10 * 4
    assert metrics.summary() == [
        {"part": 0, "nodes": 2, "edges": 2, "train nodes": 1, "halo rows": 1, "sent rows": 2},
        {"part": 1, "nodes": 2, "edges": 2, "train nodes": 0, "halo rows": 2, "sent rows": 1},
    ]


def test_no_edges_and_no_training_nodes() -> None:
    metrics = measure(EdgeStream(np.empty((2, 0), dtype=np.int64), num_nodes=3), np.array([0, 0, 1]), 3)
    assert metrics.replication_factor == 1
    assert metrics.balance == {"nodes": 2.0, "edges": 1.0, "train_nodes": 1.0}
