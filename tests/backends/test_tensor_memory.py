"""``tensor`` with less memory than edges and slices take: chunk by chunk, with the same numbers."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pygdist.backends import TensorBackend, distribute
from pygdist.backends.overflow import Overflow
from pygdist.backends.pipeline import SlicePlan, chunks_within
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.kernels import CSR
from pygdist.native import load
from pygdist.nn.decoupled import decouple
from pygdist.testing import RankPool, Step, assert_exact, random_graph
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from tests.backends.memory import at_most, large_graph, private_bytes

NODES, DEGREE, WIDTH = 10_000, 300, 8
BUDGET, LIMIT = 4 << 20, 16 << 20  # for edges and slices, and for all that a step takes
TINY = 24 / 2**20  # GiB: 24 KiB
SUMS = ["APPNP", "GCNConv", "GINConv", "GraphConv", "LGConv", "SAGEConv-mean", "SGConv", "SSGConv", "TAGConv"]


def test_files_hold_what_is_put_into_them(tmp_path: Path) -> None:
    overflow = Overflow(torch.device("cpu"), BUDGET, tmp_path)
    found = overflow.empty((300, 7), torch.float64)
    found.copy_(torch.arange(2100.0).view(300, 7))
    assert torch.equal(found.sum(1), torch.arange(2100.0, dtype=torch.float64).view(300, 7).sum(1))
    assert overflow.empty((0, 3), torch.int32).shape == (0, 3)
    assert not list(tmp_path.iterdir())  # without a name, gone with the tensor
    missing = Overflow(torch.device("cpu"), BUDGET, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"nowhere: .* GiB that there is no memory for .*: No such file"):
        missing.empty((1,), torch.float32)


def test_chunks_are_as_few_as_fit() -> None:
    csr = CSR(torch.arange(0, 1001, 10), torch.arange(1000, dtype=torch.int32) % 100, 100)
    counts = (50, 50)
    sizes = [chunks_within(budget, csr, counts, 8, 4, 4) for budget in (1 << 20, 10_000, 5_000)]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1
    with pytest.raises(InputError, match=r"memory_gib: .* GiB do not hold one row of each rank with its in-edges"):
        chunks_within(10, csr, counts, 8, 4, 4)


def test_no_more_than_so_many_rows_travel_at_a_time() -> None:
    csr = CSR(torch.arange(0, 1001, 10), torch.arange(1000, dtype=torch.int32) % 100, 100)
    plan = SlicePlan(csr, (60, 40), 3, most_rows=7)
    rows: list[int] = []
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            assert piece is not None
            assert max(part.numel() for part in piece) <= 7
            rows += torch.cat(piece).tolist()
    assert sorted(rows) == list(range(100))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_of_sums_equal_one_process_in_little_memory(world_size: int, pool: RankPool) -> None:
    assert_exact(TensorBackend(memory_gib=TINY), layers=SUMS, world_sizes=[world_size], graphs=["power-law"], pool=pool)


@pytest.mark.parametrize("overlap", [True, False])
def test_chunks_equal_one_process_with_and_without_overlap(overlap: bool, pool: RankPool) -> None:
    backend = TensorBackend(num_chunks=5, overlap=overlap)
    assert_exact(backend, layers=SUMS, world_sizes=[3], graphs=["empty-part"], pool=pool)


def _model() -> BasicGNN:
    torch.manual_seed(0)
    return GraphSAGE(WIDTH, WIDTH, num_layers=2, out_channels=3).double()


def _step(
    rank: int, world_size: int, store: str, small: str, memory_gib: float | None, limited: bool
) -> tuple[Step, Tensor, int]:
    """A step, of which nodes, and by how much the process grew."""
    communicator = Communicator(dist.new_group())
    for folder in (small, store):  # threads start with the first exchange and the first backward pass
        shard, backend = Shard.load(folder, rank), TensorBackend(memory_gib=memory_gib)
        backend.bind(shard, communicator)
        if folder == small:
            distributed_step(distribute(_narrow(), backend=backend), shard, communicator)
            backend.unbind()
    model = distribute(_model(), backend=backend)
    gc.collect()
    before = private_bytes()
    with at_most(LIMIT) if limited else contextlib.nullcontext():
        found = distributed_step(model, shard, communicator)
    return found, shard.owned_id.clone(), private_bytes() - before


def _narrow() -> BasicGNN:
    return GraphSAGE(5, WIDTH, num_layers=2, out_channels=3).double()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is one of Linux")
@pytest.mark.skipif(load() is None, reason="the native library transposes in files")
def test_a_graph_beyond_the_budget_trains_by_chunks(tmp_path: Path) -> None:
    """Edges take 12 MB there and 24 MB back; less than half of that is what the whole step may take."""
    data, (small, parts) = large_graph(NODES, DEGREE, WIDTH), random_graph()
    write_store(
        data, torch.arange(NODES).numpy() % 2, tmp_path / "large", num_parts=2, method="hash", arguments={}, notes=[]
    )
    write_store(small, parts[2], tmp_path / "small", num_parts=2, method="", arguments={}, notes=[])
    stores = str(tmp_path / "large"), str(tmp_path / "small")
    expected = reference_step(_model(), data)
    with RankPool(2) as pool:  # processes with no memory of others' tests
        answers = [pool.run(_step, 2, *stores, *how) for how in ((BUDGET / 2**30, True), (None, False))]
    for found, rows, _ in itertools.chain(*answers):
        assert max(one.absolute for one in largest_differences(found, expected, rows).values()) < 1e-10
    for _, _, grown in answers[1]:
        assert grown > LIMIT


def _refused(rank: int, world_size: int, store: str) -> list[str]:
    shard, found = Shard.load(store, rank), []
    for model in (GAT(5, 4, num_layers=1), GraphSAGE(5, 4, num_layers=1, aggr="max")):
        backend = TensorBackend(memory_gib=1.0)
        backend.bind(shard, Communicator(dist.new_group()))
        with pytest.raises(InputError) as caught:
            distribute(model.double(), backend=backend)(shard.x, shard.adjacency)
        found.append(str(caught.value))
    return found


def test_other_hops_are_refused_where_memory_is_bounded(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph()
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="", arguments={}, notes=[])
    for found in pool.run(_refused, 2, str(tmp_path / "parts")):
        for text, name in zip(found, ("GATConv", "SAGEConv"), strict=True):
            assert re.match(rf"hop \d of {name}: is no sum or mean by weights without gradient", text)


def _decoupled(rank: int, world_size: int, store: str, name: str) -> float:
    data, _ = random_graph("power-law")
    shard, backend = Shard.load(store, rank), TensorBackend(memory_gib=TINY)
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    made = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GIN": GIN}[name]
    plain = decouple(made(5, 6, num_layers=3, out_channels=3).double())
    found = distributed_step(distribute(copy.deepcopy(plain), backend=backend), shard, backend.communicator)
    return max(one.relative for one in largest_differences(found, reference_step(plain, data), shard.owned_id).values())


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN"])
def test_decoupled_models_in_little_memory(name: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="", arguments={}, notes=[])
    assert max(pool.run(_decoupled, 3, str(tmp_path / "parts"), name)) < 1e-10
