"""How many parts fit: the fewest, and a refusal only where more do not help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygdist.errors import InputError
from pygdist.graph import EdgeStream, WholeGraph
from pygdist.partition import DeviceMemory, Partitioner, PartitionMetrics, measure, partition_graph, resolve_partitioner
from pygdist.partition.sizing import GraphBytes, surroundings


class Given(Partitioner):
    """Parts that are known."""

    def __init__(self, part: np.ndarray) -> None:
        self._part = part  # no argument: it would be written with the parts

    def assign(self, edges: EdgeStream, num_parts: int) -> np.ndarray:
        return self._part


MEMORY = DeviceMemory(devices=2, bytes=300)  # a budget of 100


@pytest.mark.parametrize(
    ("largest_of", "expected"),
    [
        (lambda parts: 90, 2),
        (lambda parts: 300 / parts, 3),
        (lambda parts: {2: 200.0}.get(parts, 90.0), 3),
        (lambda parts: {2: 150.0, 3: 149.0}.get(parts, 60.0), 4),
        (lambda parts: 5000 / parts, 50),
        (lambda parts: 70 + 900 / parts, 30),
        (lambda parts: 80 + 2100 / parts, 105),
        (lambda parts: 95 + 1000 / parts, 200),
    ],
)
def test_the_fewest(largest_of: Callable[[int], float], expected: int) -> None:
    assert MEMORY.search(150, 1000, largest_of) == expected


def test_the_papers_rule_comes_first() -> None:
    assert MEMORY.fewest(10, 1000) == 2  # one for each device
    assert MEMORY.fewest(701, 1000) == 8
    with pytest.raises(InputError, match=r"more than 7 parts \(one for each node\) hold in"):
        MEMORY.fewest(701, 7)
    with pytest.raises(InputError, match="devices is 2, but the graph has 1 nodes; use fewer devices"):
        MEMORY.fewest(10, 1)


@pytest.mark.parametrize(("largest_of", "most"), [(lambda parts: 120.0, 1000), (lambda parts: 101 + 9 / parts, 5)])
def test_where_more_parts_do_not_help(largest_of: Callable[[int], float], most: int) -> None:
    tried: list[int] = []
    with pytest.raises(InputError, match="more parts do not help"):
        MEMORY.search(150, most, lambda parts: tried.append(parts) or largest_of(parts))  # type: ignore[func-returns-value]
    assert max(tried) <= most


def test_bytes_are_those_of_the_store() -> None:
    edges = EdgeStream(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    fields = {"x": np.zeros((4, 10), np.float16), "y": np.zeros(4, np.int64), "edge_weight": np.zeros(4, np.float32)}
    size = GraphBytes.of(WholeGraph(edges=edges, fields=fields, num_classes=1))
    assert (size.per_node, size.per_halo, size.per_edge) == (40 + 8 + 16, 40 + 8, 4 + 12)
    assert size.whole(4, 4) == 4 * 64 + 4 * 16
    metrics = measure(edges, np.array([0, 0, 0, 1]), 2)
    assert size.largest(metrics) == 3 * 64 + 1 * 48 + 3 * 16


@pytest.mark.parametrize("options", [{"devices": 0}, {"bytes": 0}, {"reserve": 1.0}, {"reserve": float("nan")}])
def test_devices_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected at least 1 device"):
        DeviceMemory(**{"devices": 1, "bytes": 1, **options})  # type: ignore[arg-type]


@pytest.mark.slow
@given(budget=st.integers(3_000, 60_000), name=st.sampled_from(["hash", "chunk"]))
@settings(max_examples=12)
def test_what_is_written_fits(budget: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng(0)
    edges = EdgeStream(rng.integers(0, 200, (2, 1000)), num_nodes=200)
    graph = WholeGraph(edges=edges, fields={"x": rng.random((200, 32), dtype=np.float32)}, num_classes=0)
    folder = tmp_path_factory.mktemp("fit") / "store"
    memory = DeviceMemory(devices=2, bytes=budget, reserve=0)
    size = GraphBytes.of(graph)
    try:
        meta = partition_graph(graph, folder, num_parts=memory, partitioner=name)
    except InputError:
        largest = [size.largest(measure(edges, resolve_partitioner(name).assign(edges, p), p)) for p in (2, 20, 200)]
        assert min(largest) > budget
        return
    found = PartitionMetrics.from_meta(meta)
    part = resolve_partitioner(name).assign(edges, meta["num_parts"])
    assert found.num_nodes.tolist() == np.bincount(part, minlength=meta["num_parts"]).tolist()
    assert size.largest(found) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("num_hops", [1, 2, 3])
@pytest.mark.parametrize("table_bytes", [1, 1 << 20])
def test_surroundings_are_counted_as_they_are_written(num_hops: int, table_bytes: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(num_hops)
    ends = rng.integers(0, 120, (2, 260))
    ends[1, :9] = ends[0, :9]  # self-loops, at the rim too
    graph = WholeGraph(edges=EdgeStream(ends, num_nodes=120), fields={"x": rng.random((120, 4))}, num_classes=0)
    part = rng.integers(0, 4, 120)
    part[part == 2] = 0  # a part without nodes
    meta = partition_graph(
        graph, tmp_path / "store", num_parts=4, num_hops=num_hops, placement="replicas", partitioner=Given(part)
    )
    rows, num_edges = surroundings(graph.edges, part, 4, num_hops, table_bytes=table_bytes)
    files = [one["files"] for one in meta["parts"]]
    assert rows.tolist() == [one["n_id"]["shape"][0] for one in files]
    assert num_edges.tolist() == [one["src"]["shape"][0] for one in files]
    assert (rows[2], num_edges[2]) == (0, 0)


def test_as_many_parts_as_fit_with_halos_of_two_hops(tmp_path: Path) -> None:
    ring = np.arange(300)
    edges = EdgeStream(np.stack([ring, (ring + 1) % 300]), num_nodes=300)
    graph = WholeGraph(edges=edges, fields={"x": np.zeros((300, 32), np.float32)}, num_classes=0)
    size, budget = GraphBytes.of(graph), 20_000
    memory = DeviceMemory(devices=2, bytes=budget, reserve=0)
    meta = partition_graph(graph, tmp_path / "store", num_parts=memory, num_hops=2)
    own = -(-300 // meta["num_parts"])
    needed = [
        count * size.per_node + 2 * size.per_halo + (count + 2) * 40 + (count + 1) * size.per_edge
        for count in (own, own + 1)
    ]
    assert needed[0] <= budget
    assert own > 20
    part = resolve_partitioner("chunk").assign(edges, meta["num_parts"] - 1)
    fewer = size.largest_around(np.bincount(part), *surroundings(edges, part, meta["num_parts"] - 1, 2))
    assert fewer > budget, "one part fewer does not fit"
