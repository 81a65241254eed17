"""The placement *edges*: each edge in one part, a row for each end, and plans between the rows of one node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from pygdist.backends import CommBackend, ReplicaBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import GraphFiles, Shard, open_part, read_meta, write_store
from pygdist.graph.check import MASKS
from pygdist.partition import partition_graph
from pygdist.testing import random_graph

Arrays = dict[str, np.ndarray]


@st.composite
def cut(draw: st.DrawFn) -> tuple[Data, np.ndarray, np.ndarray, int]:
    """A graph, the owner of each node (any part, as of isolated nodes), and the part of each edge."""
    kind = draw(st.sampled_from(["directed", "power-law", "isolated"]))
    num_nodes, num_parts = draw(st.integers(2, 25)), draw(st.integers(1, 5))
    data, _ = random_graph(kind, num_nodes=num_nodes, seed=draw(st.integers(0, 1000)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    edge_part = rng.integers(0, draw(st.integers(1, num_parts)), data.num_edges)  # some parts may have no edge
    return data, rng.integers(0, num_parts, num_nodes), edge_part, num_parts


def _opened(data: Data, owner: np.ndarray, edge_part: np.ndarray, folder: Path, num_parts: int) -> list[Arrays]:
    write_store(
        data, owner, folder, num_parts=num_parts, method="x", arguments={}, placement="edges", edge_part=edge_part
    )
    return [open_part(folder, part, num_parts=num_parts) for part in range(num_parts)]


@pytest.mark.slow
@given(case=cut())
@settings(max_examples=60, deadline=None)
def test_parts_are_the_graph(
    case: tuple[Data, np.ndarray, np.ndarray, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data, owner, edge_part, num_parts = case
    folder = tmp_path_factory.mktemp("store") / "store"
    opened = _opened(data, owner, edge_part, folder, num_parts)
    source, target = data.edge_index.numpy()
    expected = np.where(source == target, owner[source], edge_part)  # self-loops are at the root's part
    for part, arrays in enumerate(opened):
        _check_rows(data, owner, part, arrays)
        _check_edges(data, expected == part, arrays)
    _check_exchanges(opened)
    meta = read_meta(folder)
    assert meta["num_edges"] == data.num_edges
    assert meta["replication_factor"] == pytest.approx(sum(len(arrays["n_id"]) for arrays in opened) / len(owner))
    held = np.bincount(np.concatenate([arrays["n_id"] for arrays in opened]), minlength=len(owner))
    assert sum(part["num_split"] for part in meta["parts"]) == np.count_nonzero(held > 1)


def _check_rows(data: Data, owner: np.ndarray, part: int, arrays: Arrays) -> None:
    n_id, owned = arrays["n_id"], np.flatnonzero(owner == part)
    np.testing.assert_array_equal(n_id[: len(owned)], owned)
    leaves = n_id[len(owned) :]
    assert list(leaves) == sorted(set(leaves.tolist()), key=lambda node: (owner[node], node))
    np.testing.assert_array_equal(arrays["x"], data.x.numpy()[n_id])  # a leaf has the features too
    for name in ("y", *MASKS):
        np.testing.assert_array_equal(arrays[name], data[name].numpy()[owned])
    (source, target), weight = data.edge_index.numpy(), data.edge_weight.numpy()
    loops = source == target
    for row, node in enumerate(n_id):
        into, own = target == node, loops & (target == node)
        last = weight[own][-1] if own.any() else 0.0
        degrees = [into.sum(), own.sum(), weight[into].sum(), weight[own].sum(), last]
        np.testing.assert_allclose(arrays["in_degree"][row], degrees, rtol=1e-12)  # over all parts


def _check_edges(data: Data, here: np.ndarray, arrays: Arrays) -> None:
    source, target = data.edge_index.numpy()
    n_id, src, e_id = arrays["n_id"], arrays["src"], arrays["e_id"]
    row = np.repeat(np.arange(len(n_id)), np.diff(arrays["indptr"]))
    np.testing.assert_array_equal(np.sort(e_id), np.flatnonzero(here))
    np.testing.assert_array_equal(n_id[src], source[e_id])
    np.testing.assert_array_equal(n_id[row], target[e_id])
    np.testing.assert_array_equal(np.lexsort((e_id, row)), np.arange(len(src)))
    for name in ("edge_weight", "edge_attr", "edge_type"):
        np.testing.assert_array_equal(arrays[name], data[name].numpy()[e_id])
    ends = set(row.tolist()) | set(src.tolist())
    num_owned = len(n_id) - len(arrays["has_in"])
    assert set(range(num_owned, len(n_id))) <= ends, "no leaf without use"
    np.testing.assert_array_equal(np.isin(np.arange(num_owned, len(n_id)), row), arrays["has_in"])
    np.testing.assert_array_equal(np.isin(np.arange(num_owned, len(n_id)), src), arrays["has_out"])


def _check_exchanges(opened: list[Arrays]) -> None:
    """The rows of ``up`` and ``down`` are those of the same nodes at both ends, in the same order."""
    shards = [_shard(arrays, part, len(opened)) for part, arrays in enumerate(opened)]
    for name in ("up", "down"):
        for receiver, (_, clones) in enumerate(shards):
            plan, rows = getattr(clones, name), getattr(clones, f"{name}_rows")
            start = 0
            for sender, (_, other) in enumerate(shards):
                count = plan.recv_counts[sender]
                sent = getattr(other, name).send_index_of(receiver)
                there = opened[receiver]["n_id"][rows[start : start + count].numpy()]
                np.testing.assert_array_equal(opened[sender]["n_id"][sent.numpy()], there)
                start += count
            assert start == rows.numel()


def _shard(arrays: Arrays, part: int, num_parts: int) -> tuple[int, Any]:
    from pygdist.graph.clones import Clones

    num_owned = len(arrays["n_id"]) - len(arrays["has_in"])
    return num_owned, Clones.from_arrays(arrays, num_owned)


def test_sums_over_parts_are_those_of_the_graph(tmp_path: Path) -> None:
    """By the plans: partial sums travel up, totals down, and every row has that of its node."""
    data, _ = random_graph("power-law")
    rng = np.random.default_rng(0)
    _opened(data, rng.integers(0, 3, 37), rng.integers(0, 3, data.num_edges), tmp_path / "store", 3)
    shards = [Shard.load(tmp_path / "store", part) for part in range(3)]
    expected = torch.zeros(37, 5, dtype=torch.float64).index_add_(0, data.edge_index[1], data.x[data.edge_index[0]])
    sums = []
    for shard in shards:
        around = shard.surroundings
        assert around is not None
        source, target = around.adjacency
        sums.append(torch.zeros(len(around.n_id), 5, dtype=torch.float64).index_add_(0, target, around.x[source]))
    total = {
        int(node): sums[rank][row].clone()
        for rank, shard in enumerate(shards)
        for row, node in enumerate(shard.owned_id)
    }
    for rank, shard in enumerate(shards):
        assert shard.clones is not None
        for row in shard.clones.up_rows.tolist():
            total[int(shard.surroundings.n_id[row])] += sums[rank][row]
    for node, row in total.items():
        torch.testing.assert_close(row, expected[node])


def test_other_backends_refuse_such_parts(tmp_path: Path) -> None:
    data, _ = random_graph("directed")
    _opened(data, np.zeros(37, dtype=int), np.zeros(data.num_edges, dtype=int), tmp_path / "store", 1)
    shard = Shard.load(tmp_path / "store", 0)
    for backend in (CommBackend(), ReplicaBackend(hops=1)):
        with pytest.raises(InputError, match="was partitioned with placement edges"):
            backend.bind(shard, Communicator())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"edge_part": None}, r"placement 'edges' needs the part of each edge \(edge_part\)"),
        ({"placement": "nodes"}, "placement 'nodes' has no use for the parts of edges"),
        ({"edge_part": np.zeros(3, dtype=int)}, r"part: int64 of shape \(3,\), expected integers of shape \(148,\)"),
        ({"num_hops": 2}, "placement 'edges' allows num_hops up to 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    data, _ = random_graph("directed")
    options = {"placement": "edges", "edge_part": np.zeros(data.num_edges, dtype=int)} | change
    with pytest.raises(InputError, match=said):
        write_store(data, np.zeros(37, dtype=int), tmp_path / "s", num_parts=1, method="x", arguments={}, **options)
    assert not (tmp_path / "s").exists()


def test_node_partitioners_are_refused(tmp_path: Path) -> None:
    data, _ = random_graph("directed")
    with pytest.raises(InputError, match=r"assigns edges to parts, and 'metis' assigns nodes; use .*dbh.*libra"):
        partition_graph(data, tmp_path / "s", num_parts=2, partitioner="metis", placement="edges")


@pytest.mark.parametrize("method", [None, "hdrf", "random"])
def test_edges_are_where_the_method_puts_them(method: str | None, tmp_path: Path) -> None:
    """Libra by default; files that are streamed give the parts that a graph in memory gives, merged edges too."""
    data, _ = random_graph("power-law", num_nodes=200)
    meta = partition_graph(data, tmp_path / "whole", num_parts=3, partitioner=method, placement="edges")
    assert meta["method"] == (method or "libra")
    assert max(part["num_edges"] for part in meta["parts"]) < 1.3 * data.num_edges / 3
    assert meta["replication_factor"] == pytest.approx(meta["replication_factor_full"])
    assert not list((tmp_path / "whole").glob("*.tmp"))
    np.save(tmp_path / "edges.npy", data.edge_index.numpy())
    files = GraphFiles(edges=tmp_path / "edges.npy", num_nodes=200, remove_duplicates=True)
    merged = partition_graph(files, tmp_path / "merged", num_parts=3, partitioner=method, placement="edges")
    parts = [open_part(tmp_path / "merged", part) for part in range(3)]
    kept = np.concatenate([part["e_id"] for part in parts])
    pairs = data.edge_index.numpy()[:, np.sort(kept)]
    assert merged["num_edges"] == len(np.unique(data.edge_index.numpy(), axis=1).T) == len(pairs.T)
    assert len(np.unique(pairs, axis=1).T) == len(pairs.T)
