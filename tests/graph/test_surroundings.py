"""Replicas: the rows that a breadth-first search finds, their in-edges, and what is known of those left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import add_remaining_self_loops, scatter

from pygdist.errors import InputError
from pygdist.graph import (
    EdgeStream,
    GraphFiles,
    WholeGraph,
    build_store,
    open_part,
    prepare,
    read_meta,
    save_npy,
    write_graph,
    write_store,
)
from pygdist.graph.store import replicas as surroundings_files
from pygdist.partition import partition_graph
from tests.graph.store.test_meta import random_graph


@pytest.mark.slow
@given(
    num_nodes=st.integers(1, 15),
    num_edges=st.integers(0, 40),
    num_parts=st.integers(1, 4),
    num_hops=st.integers(1, 4),
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
    build_store(
        folder,
        {"method": "given", "arguments": {}},
        lambda place: write_graph(graph, part, place, num_parts, num_hops=num_hops, placement="replicas"),
    )
    opened = [open_part(folder, p) for p in range(num_parts)]
    for p, arrays in enumerate(opened):
        rings = _search(edge_index, np.flatnonzero(part == p), num_hops)
        assert arrays["n_id"].tolist() == [node for ring in rings for node in sorted(ring, key=lambda n: (part[n], n))]
        np.testing.assert_array_equal(arrays["recv_counts"].sum(axis=1), [len(ring) for ring in rings[1:]])
        np.testing.assert_array_equal(arrays["x"], x[arrays["n_id"]])
        inner = {node for ring in rings[:-1] for node in ring}
        assert len(arrays["indptr"]) == len(arrays["n_id"]) + 1
        for row, node in enumerate(arrays["n_id"].tolist()):
            e_id = arrays["e_id"][arrays["indptr"][row] : arrays["indptr"][row + 1]]
            expected = [e for e, (u, v) in enumerate(edge_index.T) if v == node and (node in inner or u in {*inner, v})]
            assert e_id.tolist() == expected
        np.testing.assert_array_equal(arrays["n_id"][arrays["src"]], edge_index[0, arrays["e_id"]])
        assert arrays["src"].dtype == np.int32
        assert arrays["in_degree"].tolist() == [[*_counted(edge_index, n)] for n in arrays["n_id"]]
    _check_plans(part, opened)
    assert read_meta(folder)["num_edges"] == num_edges
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", *(f"part_{p}" for p in range(num_parts))]


def _counted(edge_index: np.ndarray, node: int) -> tuple[int, int]:
    """In-edges and self-loops."""
    into = edge_index[:, edge_index[1] == node]
    return into.shape[1], int((into[0] == node).sum())


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


@pytest.mark.slow
@given(
    num_nodes=st.integers(1, 12),
    num_edges=st.integers(0, 60),
    num_parts=st.integers(1, 4),
    num_hops=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_facts_of_all_in_edges(
    num_nodes: int,
    num_edges: int,
    num_parts: int,
    num_hops: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    data, folder = random_graph(num_nodes, num_edges, seed), tmp_path_factory.mktemp("facts") / "store"
    part = np.random.default_rng(seed).integers(0, num_parts, num_nodes)
    options = {"method": "given", "arguments": {}, "num_hops": num_hops, "placement": "replicas"}
    write_store(data, part, folder, num_parts=num_parts, **options)  # type: ignore[arg-type]
    assert data.edge_index is not None
    edges = [(int(u), int(v), float(w)) for (u, v), w in zip(data.edge_index.t(), data.edge_weight, strict=True)]
    for p in range(num_parts):
        arrays = open_part(folder, p)
        for name in ("edge_weight", "edge_attr", "edge_type"):
            np.testing.assert_array_equal(arrays[name], data[name].numpy()[arrays["e_id"]])
        assert (arrays["in_degree"].dtype, arrays["in_degree"].shape) == (np.float64, (len(arrays["n_id"]), 5))
        for node, found in zip(arrays["n_id"].tolist(), arrays["in_degree"].tolist(), strict=True):
            weights = [w for _, v, w in edges if v == node]
            loops = [w for u, v, w in edges if u == v == node]
            last = loops[-1] if loops else 0
            assert found == pytest.approx([len(weights), len(loops), sum(weights), sum(loops), last], rel=1e-14)


@pytest.mark.parametrize("fill", [1.0, 2.0, None], ids=["loops", "improved", "no-loops"])
def test_the_facts_are_enough_for_the_degrees_of_gcn(fill: float | None, tmp_path: Path) -> None:
    data, part = random_graph(12, 200), np.arange(12) % 3
    write_store(data, part, tmp_path / "store", num_parts=3, method="", arguments={}, placement="replicas")
    edge_index, weight = data.edge_index, data.edge_weight
    if fill is not None:
        edge_index, weight = add_remaining_self_loops(edge_index, weight, fill, num_nodes=12)
    degree = scatter(weight, edge_index[1], dim_size=12).numpy()  # type: ignore[index]
    arrays = open_part(tmp_path / "store", 1)
    _, loops, total, of_loops, last = arrays["in_degree"].T
    assert loops.max() > 1
    found = total if fill is None else total - of_loops + np.where(loops > 0, last, fill)
    np.testing.assert_allclose(found, degree[arrays["n_id"]], rtol=1e-13)


@pytest.mark.parametrize("num_hops", [1, 2])
def test_streamed_edges_give_the_parts_that_memory_gives(
    num_hops: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings_files, "_BLOCK_EDGES", 7)
    data, notes = prepare(random_graph(60, 300))
    data.edge_weight = data.edge_weight.half()  # type: ignore[union-attr]
    save_npy(data, tmp_path / "graph")
    options: dict[str, Any] = {"num_parts": 3, "partitioner": "hash", "num_hops": num_hops, "placement": "replicas"}
    meta = partition_graph(data, tmp_path / "memory", notes=notes, **options)
    other = partition_graph(GraphFiles(edges=tmp_path / "graph"), tmp_path / "files", **options)
    assert meta["parts"] == other["parts"], "checksums too"
    assert (meta["placement"], other["dtypes"]["edge_weight"]) == ("replicas", "float32")


def test_merged_edges_count_once(tmp_path: Path) -> None:
    edge_index = np.array([[0, 0, 1, 1, 1, 2], [1, 1, 1, 1, 0, 2]])
    edges = EdgeStream(edge_index, num_nodes=3, chunk_edges=2)
    graph = WholeGraph(edges=edges, fields={}, num_classes=0, merge=True)
    part = np.array([0, 1, 1], dtype=np.int32)
    build_store(
        tmp_path / "s",
        {"method": "", "arguments": {}},
        lambda place: write_graph(graph, part, place, 2, placement="replicas"),
    )
    arrays = open_part(tmp_path / "s", 0)
    assert (arrays["n_id"].tolist(), arrays["e_id"].tolist()) == ([0, 1], [4, 0, 2])
    assert arrays["in_degree"].tolist() == [[1, 0], [2, 1]]


def test_figures_are_those_of_the_placement_of_nodes(tmp_path: Path) -> None:
    data, options = random_graph(30, 100), {"num_parts": 3, "partitioner": "hash"}
    nodes = partition_graph(data, tmp_path / "nodes", **options)  # type: ignore[arg-type]
    for num_hops in (1, 2):
        meta = partition_graph(
            data,
            tmp_path / f"replicas-{num_hops}",
            num_hops=num_hops,
            placement="replicas",
            **options,  # type: ignore[arg-type]
        )
        assert (meta["placement"], meta["num_hops"]) == ("replicas", num_hops)
        for name in ("num_edges", "edge_cut", "counts", "rows_per_hop", "replication_factor_full", "bytes_per_layer"):
            assert meta[name] == nodes[name], name
        for one, expected in zip(meta["parts"], nodes["parts"], strict=True):
            for name in ("num_owned", "num_halo", "num_edges", "num_cut", "recv_counts", "counts"):
                assert one[name] == expected[name], name
            assert one["halo_per_hop"][0] == expected["num_halo"]


def test_one_hop_is_the_placement_of_nodes(tmp_path: Path) -> None:
    data, part = random_graph(20, 60), np.arange(20) % 2
    meta = write_store(data, part, tmp_path / "store", num_parts=2, method="given", arguments={})
    assert (meta["placement"], meta["num_hops"]) == ("nodes", 1)
    assert open_part(tmp_path / "store", 0)["recv_counts"].shape == (2,)
    with pytest.raises(InputError, match="num_hops is 0"):
        partition_graph(data, tmp_path / "other", num_parts=2, num_hops=0)
    with pytest.raises(InputError, match="num_hops is 2, but placement 'nodes' allows num_hops up to 1"):
        partition_graph(data, tmp_path / "other", num_parts=2, num_hops=2, placement="nodes")
    with pytest.raises(InputError, match="placement is 'halves', expected 'nodes' or 'replicas' or 'edges'"):
        write_store(data, part, tmp_path / "other", num_parts=2, method="", arguments={}, placement="halves")
    assert not (tmp_path / "other").exists()
