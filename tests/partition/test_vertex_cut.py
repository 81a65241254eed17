"""Vertex-cuts place every edge as their slow twins do, within their bounds, wherever the stream is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typing_extensions import override

import pygdist.native.library as library
from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.partition import EdgePartitioner, VertexCut, resolve_partitioner, vertex_cut
from pygdist.partition.vertex_cut import BalancedEdgePartitioner, PlaceEdges
from tests.partition.oracle import EDGE_ORACLES, as_list

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")


def edge_partitioner(name: str, **options: Any) -> EdgePartitioner:
    found = resolve_partitioner(name, **options)
    assert isinstance(found, EdgePartitioner)
    return found


def skewed(num_nodes: int, num_edges: int, seed: int) -> NDArray[np.int64]:
    """A few nodes have most edges; with self-loops and duplicates."""
    return (np.random.default_rng(seed).random((2, num_edges)) ** 3 * num_nodes).astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("name", EDGE_ORACLES)
@given(
    num_nodes=st.integers(1, 60),
    num_edges=st.integers(0, 300),
    num_parts=st.sampled_from([1, 2, 3, 6, 7, 64, 65, 130]),
    chunk_edges=st.integers(1, 100),
    seed=st.sampled_from([0, 1, 2**64 - 1]),
    balance=st.sampled_from([1.0, 1.05, 2.0, 1e300]),
)
@settings(max_examples=60)
def test_every_edge_is_where_the_obvious_puts_it(
    name: str, num_nodes: int, num_edges: int, num_parts: int, chunk_edges: int, seed: int, balance: float
) -> None:
    num_nodes = max(num_nodes, num_parts)
    edge_index = skewed(num_nodes, num_edges, seed=num_edges)
    options: dict[str, Any] = {"seed": seed}
    if name not in ("random", "grid", "dbh"):
        options["balance"] = balance
    if name == "libra":
        options["by_degree"] = num_edges % 2 == 0
    partitioner = edge_partitioner(name, **options)
    part = np.full(num_edges, -1, dtype=np.int16)
    stream = EdgeStream(edge_index, num_nodes=num_nodes, chunk_edges=chunk_edges)
    cut = partitioner.cut(stream, num_parts, part)
    expected = EDGE_ORACLES[name](as_list(edge_index), num_nodes, num_parts, **options)
    assert part.tolist() == expected
    check(cut, edge_index, part)
    if isinstance(partitioner, BalancedEdgePartitioner):
        assert cut.num_edges.max(initial=0) <= max(partitioner.capacity(stream, num_parts), 1)


def check(cut: VertexCut, edge_index: NDArray[Any], part: NDArray[Any]) -> None:
    """Replicas, loads and owners are what the edges' parts say."""
    holders: list[set[int]] = [set() for _ in range(len(cut.replicas))]
    for (u, v), p in zip(edge_index.T, part, strict=True):
        holders[u].add(int(p))
        holders[v].add(int(p))
    assert cut.num_replicas().tolist() == [len(held) for held in holders]
    assert cut.num_edges.tolist() == np.bincount(part, minlength=cut.num_parts).tolist()
    assert cut.replication_factor == pytest.approx(sum(max(len(held), 1) for held in holders) / max(len(holders), 1))
    for node, owner in enumerate(cut.owners(seed=3).tolist()):
        assert owner in (holders[node] or range(cut.num_parts))


def test_owners_are_drawn_evenly() -> None:
    star = np.stack([np.zeros(4000, dtype=np.int64), np.arange(1, 4001)])
    edges = EdgeStream(np.concatenate([star, star], axis=1), num_nodes=4001)
    cut = VertexCut.empty(4001, 2)
    cut.replicas[:] = 3
    assert abs(np.bincount(cut.owners(seed=0)) - 4001 / 2).max() < 5 * np.sqrt(4001 / 4)
    assert not np.array_equal(cut.owners(seed=0), cut.owners(seed=1))
    assert edge_partitioner("random").run(edges, 4).figures["replication_factor"] == pytest.approx(
        4004 / 4001, abs=2e-3
    )


@pytest.mark.parametrize("name", ["random", "grid", "dbh"])
@pytest.mark.parametrize("num_parts", [7, 16])
def test_an_edge_and_its_reverse_lie_together(name: str, num_parts: int) -> None:
    edge_index = skewed(300, 4000, seed=0)
    parts = []
    for one in (edge_index, edge_index[::-1]):
        parts.append(np.empty(4000, dtype=np.int8))
        edge_partitioner(name).cut(EdgeStream(one, num_nodes=300), num_parts, parts[-1])
    np.testing.assert_array_equal(*parts)


def test_a_hub_is_spread_over_a_grid_of_one_row() -> None:
    star = np.stack([np.zeros(7000, dtype=np.int64), np.arange(1, 7001)])
    counts = edge_partitioner("grid").cut(EdgeStream(star, num_nodes=7001), 7).num_edges
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("name", ["libra", "dbh", "spring", "ldg"])
def test_ids_of_no_node_are_refused(name: str, wrong: int) -> None:
    edges = EdgeStream(np.array([[0, 1, wrong], [1, 2, 3]]), num_nodes=5)
    with pytest.raises(InputError, match=f"edge 2 joins nodes {wrong} and 3, but the graph has nodes 0 to 4"):
        resolve_partitioner(name).assign(edges, 2)


@pytest.mark.parametrize("name", ["libra", "powergraph", "hdrf"])
def test_two_triangles_by_hand(name: str) -> None:
    edges = EdgeStream(np.array([[0, 1, 0, 3, 4, 3], [1, 2, 2, 4, 5, 5]]), num_nodes=6)
    part = np.empty(6, dtype=np.int8)
    cut = edge_partitioner(name).cut(edges, 2, part)
    # the first edge opens a part, the next two know it; the fourth knows none and takes the empty one
    assert part.tolist() == [0, 0, 0, 1, 1, 1]
    assert cut.replication_factor == 1


def test_libra_splits_the_node_with_more_edges() -> None:
    edges = np.array([[0, 3, 0, 3, 0], [1, 4, 2, 5, 3]])  # nodes 0 and 3 in two parts, then an edge between them
    more = np.array([[3], [6]])
    for extra, expected in ((edges, 1), (np.concatenate([edges, more], axis=1), 0)):
        part = np.empty(extra.shape[1], dtype=np.int8)
        edge_partitioner("libra", balance=2.0).cut(EdgeStream(extra, num_nodes=7), 2, part)
        assert part[:5].tolist() == [0, 1, 0, 1, expected]
    part = np.empty(6, dtype=np.int8)
    edge_partitioner("libra", balance=2.0, by_degree=False).cut(EdgeStream(extra, num_nodes=7), 2, part)
    assert part[4] == 0  # either part, as both are as full


def test_dbh_cuts_the_hub_alone() -> None:
    star = np.stack([np.zeros(500, dtype=np.int64), np.arange(1, 501)])
    counts = edge_partitioner("dbh").cut(EdgeStream(star, num_nodes=501), 4).num_replicas()
    assert counts.tolist() == [4, *[1] * 500]


def test_a_grid_bounds_the_replicas() -> None:
    edges = EdgeStream(skewed(200, 20_000, seed=0), num_nodes=200)
    assert edge_partitioner("grid").cut(edges, 16).num_replicas().max() <= 4 + 4 - 1
    assert edge_partitioner("random").cut(edges, 16).num_replicas().max() == 16


@pytest.mark.parametrize("name", ["libra", "powergraph", "hdrf", "2ps-l"])
def test_a_bound_is_kept_where_the_stream_follows_the_structure(name: str) -> None:
    path = np.stack([np.arange(999), np.arange(1, 1000)])
    edges = EdgeStream(path, num_nodes=1000)
    for balance in (1.0, 1.3):
        cut = edge_partitioner(name, balance=balance).cut(edges, 4)
        assert cut.num_edges.max() <= np.ceil(balance * 999 / 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dbh", {"seed": -1}, "dbh: seed is -1"),
        ("libra", {"balance": 0.9}, "libra: balance is 0.9, expected a finite number of at least 1"),
        ("libra", {"balance": float("inf")}, "libra: balance is inf"),
        ("hdrf", {"balance_weight": float("nan")}, "hdrf: balance_weight is nan"),
        ("2ps-l", {"volume": 0}, "2ps-l: volume is 0"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_partitioner(name, **options)


@pytest.mark.parametrize("name", ["dbh", "spring", "fennel"])
def test_without_the_native_library_it_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygdist.native.library.load", lambda: None)
    edges = EdgeStream(np.array([[0, 1], [1, 0]]), num_nodes=2)
    with pytest.raises(InputError, match=rf"partitioner '{name}' needs pygdist's native library.* g\+\+"):
        resolve_partitioner(name).assign(edges, 2)


@dataclass(frozen=True, kw_only=True)
class BySource(EdgePartitioner):
    """All edges of a source together."""

    @override
    def placing(self, edges: EdgeStream, cut: VertexCut) -> PlaceEdges:
        def place(chunk: NDArray[np.int64], part: NDArray[np.int32]) -> None:
            part[:] = chunk[0] % cut.num_parts
            cut.add(chunk, part)

        return place


@pytest.mark.parametrize("native", [True, False])
def test_a_users_own_needs_no_native_library(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(vertex_cut, "load", lambda: None)
    edge_index = skewed(90, 200, seed=1)
    part = np.empty(200, dtype=np.int32)
    cut = BySource().cut(EdgeStream(edge_index, num_nodes=90, chunk_edges=30), 70, part)
    np.testing.assert_array_equal(part, edge_index[0] % 70)
    check(cut, edge_index, part)
    assert BySource().assign(EdgeStream(edge_index, num_nodes=90), 70).shape == (90,)
