"""Halos of several hops: the rows that a breadth-first search finds, and all in-edges of all but the last."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygdist.errors import InputError
from pygdist.graph import EdgeStream, Shard, WholeGraph, open_part, write_graph, write_store
from pygdist.graph.store import build_store
from pygdist.partition import partition_graph
from tests.graph.test_store import random_graph


@given(
    num_nodes=st.integers(1, 15),
    num_edges=st.integers(0, 40),
    num_parts=st.integers(1, 4),
    num_hops=st.integers(2, 4),
    seed=st.integers(0, 999),
)
@settings(max_examples=80)
def test_rows_and_edges_are_those_of_a_search(
    num_nodes: int,
    num_edges: int,
    num_parts: int,
    num_hops: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rng = np.random.default_rng(seed)
    edge_index = rng.integers(0, num_nodes, (2, num_edges))
    part = rng.integers(0, num_parts, num_nodes).astype(np.int32)
    x = rng.random((num_nodes, 2))
    graph = WholeGraph(edges=EdgeStream(edge_index, num_nodes=num_nodes), fields={"x": x}, num_classes=0)
    folder = tmp_path_factory.mktemp("hops") / "store"
    build_store(folder, {}, lambda place: write_graph(graph, part, place, num_parts, num_hops=num_hops))
    opened = [open_part(folder, p) for p in range(num_parts)]
    for p, arrays in enumerate(opened):
        rings = _search(edge_index, np.flatnonzero(part == p), num_hops)
        assert arrays["n_id"].tolist() == [node for ring in rings for node in sorted(ring, key=lambda n: (part[n], n))]
        np.testing.assert_array_equal(arrays["recv_counts"].sum(axis=1), [len(ring) for ring in rings[1:]])
        np.testing.assert_array_equal(arrays["x"], x[arrays["n_id"]])
        rows = sum(len(ring) for ring in rings[:-1])
        assert len(arrays["indptr"]) == rows + 1
        for row in range(rows):
            e_id = arrays["e_id"][arrays["indptr"][row] : arrays["indptr"][row + 1]]
            np.testing.assert_array_equal(e_id, np.flatnonzero(edge_index[1] == arrays["n_id"][row]))
        np.testing.assert_array_equal(arrays["n_id"][arrays["src"]], edge_index[0, arrays["e_id"]])
    _check_plans(part, opened)


def _search(edge_index: np.ndarray, owned: np.ndarray, num_hops: int) -> list[list[int]]:
    rings, known = [owned.tolist()], set(owned.tolist())
    for _ in range(num_hops):
        reached = {int(u) for u, v in edge_index.T if v in rings[-1]} - known
        known |= reached
        rings.append(sorted(reached))
    return rings


def _check_plans(part: np.ndarray, opened: list[dict[str, np.ndarray]]) -> None:
    """What the senders pack is what the receivers list, hop by hop."""
    sent = []
    for sender, arrays in enumerate(opened):
        owned = np.flatnonzero(part == sender)
        blocks = np.split(owned[arrays["send_index"]], np.cumsum(arrays["send_counts"].ravel())[:-1])
        sent.append(np.array([None, *blocks], dtype=object)[1:].reshape(arrays["send_counts"].shape))
    for receiver, arrays in enumerate(opened):
        num_hops = len(arrays["recv_counts"])
        listed = arrays["n_id"][int((part == receiver).sum()) :].tolist()
        assert listed == [n for hop in range(num_hops) for blocks in sent for n in blocks[hop, receiver].tolist()]


def test_a_backend_of_one_hop_refuses(tmp_path: Path) -> None:
    partition_graph(random_graph(20, 60), tmp_path / "store", num_parts=2, partitioner="hash", num_hops=2)
    with pytest.raises(InputError, match=r"holds halos of 2 hops \(placement replicas\).* partition with --hops 1"):
        Shard.load(tmp_path / "store", 0)


def test_one_hop_is_the_placement_of_nodes(tmp_path: Path) -> None:
    data, part = random_graph(20, 60), np.arange(20) % 2
    meta = write_store(data, part, tmp_path / "store", num_parts=2, method="given", arguments={})
    assert (meta["placement"], meta["num_hops"]) == ("nodes", 1)
    assert open_part(tmp_path / "store", 0)["recv_counts"].shape == (2,)
    with pytest.raises(InputError, match="num_hops is 0"):
        partition_graph(data, tmp_path / "other", num_parts=2, num_hops=0)
