"""The extension point, and what every partitioner must keep, whatever its algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph import EdgeStream, GraphFiles, degree_corrected_sbm, open_part, prepare, read_meta
from pygdist.partition import (
    ChunkPartitioner,
    HashPartitioner,
    Partitioner,
    measure,
    partition_graph,
    partitioner_names,
    resolve_partitioner,
)

EVERY = [
    "2ps-l", "chunk", "dbh", "fennel", "grid", "hash", "hdrf", "ldg", "libra", "metis", "powergraph", "random", "spring"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Partitioner):
    """A partitioner in the user's own package, without a registered name."""

    shift: int = 0

    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        return ((np.arange(edges.num_nodes) + self.shift) % num_parts).astype(np.int32)


# --- names ------------------------------------------------------------------------------------------------------------


def test_by_name_path_and_object() -> None:
    assert resolve_partitioner("hash", seed=3) == HashPartitioner(seed=3)
    assert resolve_partitioner("chunk") == ChunkPartitioner()
    assert resolve_partitioner(f"{__name__}.RoundRobin", shift=2) == RoundRobin(shift=2)
    mine = RoundRobin()
    assert resolve_partitioner(mine) is mine
    assert set(EVERY) <= set(partitioner_names())


def test_arguments_are_the_fields() -> None:
    assert ChunkPartitioner(node_weight=2.0).arguments() == {"node_weight": 2.0}
    assert HashPartitioner().arguments() == {"seed": 0}
    assert RoundRobin(shift=4).arguments() == {"shift": 4}


@pytest.mark.parametrize(
    ("partitioner", "args", "message"),
    [
        ("metsi", {}, "unknown partitioner 'metsi'; known are .*chunk, .*hash"),
        ("no_such_package.Mine", {}, "partitioner 'no_such_package.Mine'"),
        ("pygdist.errors.InputError", {}, "is not a partitioner"),
        ("hash", {"speed": 1}, "partitioner 'hash': got an unexpected keyword argument 'speed'"),
        ("hash", {"seed": -1}, "hash: seed is -1"),
        ("2ps-l", {"seed": 1.5}, "2ps-l: seed is 1.5, expected an integer"),
        ("chunk", {"node_weight": float("nan")}, "chunk: node_weight is nan"),
        (HashPartitioner(), {"seed": 1}, "arguments .*seed"),
    ],
)
def test_resolve_refuses(partitioner: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_partitioner(partitioner, **args)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"Other is called 'hash', a name that .*HashPartitioner has"):
        type("Other", (HashPartitioner,), {"name": "hash"})


def test_a_subclass_does_not_take_its_parents_name() -> None:
    type("Derived", (HashPartitioner,), {})
    assert type(resolve_partitioner("hash")) is HashPartitioner


# --- every algorithm --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@given(
    num_nodes=st.integers(1, 40), edges=st.integers(0, 120), num_parts=st.integers(1, 8), chunk_edges=st.integers(1, 50)
)
@settings(max_examples=50)
def test_owner_of_every_node(name: str, num_nodes: int, edges: int, num_parts: int, chunk_edges: int) -> None:
    edge_index = np.random.default_rng(edges).integers(0, num_nodes, (2, edges))
    stream = EdgeStream(edge_index, num_nodes=num_nodes)
    partitioner = resolve_partitioner(name)
    if num_parts > num_nodes:
        with pytest.raises(InputError, match=f"num_parts is {num_parts}, but the graph has {num_nodes} nodes"):
            partitioner.assign(stream, num_parts)
        return
    part = partitioner.assign(stream, num_parts)
    assert part.shape == (num_nodes,)
    assert part.dtype == np.int32
    assert part.min() >= 0
    assert part.max() < num_parts
    rechunked = EdgeStream(edge_index, num_nodes=num_nodes, chunk_edges=chunk_edges)
    np.testing.assert_array_equal(partitioner.assign(rechunked, num_parts), part)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@given(seed=st.integers(0, 999), num_parts=st.integers(1, 5))
@settings(max_examples=8)
def test_every_owner_has_the_whole_list_of_in_neighbours(
    name: str, seed: int, num_parts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, rng = tmp_path_factory.mktemp("file"), np.random.default_rng(seed)
    ids = np.sort(rng.choice(10**12, 30, replace=False))
    edges = ids[rng.integers(0, 30, (2, 100))]
    np.save(folder / "edges.npy", edges)
    files = GraphFiles(edges=folder / "edges.npy")
    meta = partition_graph(files, folder / "store", num_parts=num_parts, partitioner=name)
    known = np.load(folder / "store" / "ids.npy")
    np.testing.assert_array_equal(known, np.unique(edges))
    owned = []
    for part in range(num_parts):
        arrays = open_part(folder / "store", part)
        for row in range(meta["parts"][part]["num_owned"]):
            owned.append(int(known[arrays["n_id"][row]]))
            sources = known[arrays["n_id"][arrays["src"][arrays["indptr"][row] : arrays["indptr"][row + 1]]]]
            np.testing.assert_array_equal(sources, edges[0, edges[1] == owned[-1]])
    assert sorted(owned) == known.tolist()


@pytest.mark.parametrize("num_parts", [0, -1, 6])
@pytest.mark.parametrize("name", EVERY)
def test_refuses_parts_that_nodes_cannot_fill(name: str, num_parts: int) -> None:
    stream = EdgeStream(np.empty((2, 0), dtype=np.int64), num_nodes=5)
    with pytest.raises(InputError, match=f"num_parts is {num_parts}, but the graph has 5 nodes: expected 1 to 5"):
        resolve_partitioner(name).assign(stream, num_parts)


# --- from graph to store ----------------------------------------------------------------------------------------------


def test_partition_graph(tmp_path: Path) -> None:
    data, notes = prepare(degree_corrected_sbm(200))
    three = np.int64(3)
    meta = partition_graph(data, tmp_path / "store", num_parts=three, partitioner="hash", notes=notes, seed=5)
    assert meta == read_meta(tmp_path / "store")
    assert (meta["method"], meta["arguments"], meta["num_parts"]) == ("hash", {"seed": 5}, 3)
    assert meta["seconds"] >= 0
    assert meta["edges_per_second"] > 0
    again = partition_graph(data, tmp_path / "store", num_parts=3, partitioner="hash", notes=notes, seed=5)
    assert again == meta, "the finished store is used again"


@pytest.mark.parametrize("method", ["hdrf", "spring"])
def test_figures_of_a_method_are_in_meta(method: str, tmp_path: Path) -> None:
    data, _ = prepare(degree_corrected_sbm(200))
    meta = partition_graph(data, tmp_path / "store", num_parts=3, partitioner=method)
    assert data.edge_index is not None
    edges = EdgeStream(data.edge_index.numpy(), num_nodes=200)
    found = resolve_partitioner(method).run(edges, 3)
    assert found.figures.items() <= meta.items()
    assert meta["replication_factor_full"] == measure(edges, found.part, 3).replication_factor
    assert (meta["replication_factor"] < meta["replication_factor_full"]) == (method == "hdrf")
    assert ("num_merged_clusters" in meta) == (method == "spring")


def test_partition_graph_with_ones_own(tmp_path: Path) -> None:
    data, _ = prepare(degree_corrected_sbm(50, avg_degree=4.0))
    meta = partition_graph(data, tmp_path / "store", num_parts=2, partitioner=RoundRobin(shift=1))
    assert meta["method"].endswith("test_partitioner.RoundRobin")
    assert meta["arguments"] == {"shift": 1}
    assert meta["num_classes"] == 10
