"""The contract on GPUs: one rank for every layer, and as many ranks as there are GPUs over nccl."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.nn import GCN

from pygdist import Shard, distribute
from pygdist.backends import Backend, CacheBackend, CommBackend, HybridBackend, TensorBackend, resolve_backend
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.groups import group_by_source
from pygdist.comm import Communicator, ExchangePlan
from pygdist.graph import write_store
from pygdist.kernels import CSR
from pygdist.memory.gpus import free_bytes
from pygdist.memory.overflow import Overflow
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.loss import labelled_rows, summed_loss
from pygdist.testing import LAYERS, RankPool, run_ranks
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from pygdist.testing.graphs import random_graph
from pygdist.testing.layers import build
from tests.backends.memory import large_graph

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
SOME = ["GCNConv", "SAGEConv-max", "GATConv", "GINConv", "BatchNorm", "GraphNorm"]


def _compare(name: str, shard: Shard, communicator: Communicator, backend: Backend) -> float:
    data, _ = random_graph("directed")
    reference = reference_step(build(name, 5, 3), data)
    backend.bind(shard, communicator)
    model = distribute(build(name, 5, 3).cuda(), backend=backend, check=False)
    found = largest_differences(distributed_step(model, shard, communicator), reference, shard.owned_id.cpu())
    return max(difference.absolute for difference in found.values())


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("backend", [CommBackend, CacheBackend, HybridBackend])
def test_every_layer_on_one_gpu(backend: type[Backend], name: str, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    error = 1e-6 if name == "LabelPropagation" else 1e-10  # its labels are float32
    assert _compare(name, Shard.load(tmp_path / "store", 0).to("cuda"), Communicator(), backend()) < error


SUMS = ["GCNConv", "SAGEConv-mean", "GINConv", "APPNP", "TAGConv"]
ATTENTION = ["GATConv", "GATConv-edges", "GATv2Conv", "SAGEConv-max", "TransformerConv"]  # and maxima, by kernels too
MESSAGES = ["GATv2Conv-edges", "SAGEConv-many", "SAGEConv-softmax"]
KIB_24 = 24 / 2**20  # in GiB


@pytest.mark.parametrize("name", [*SUMS, *ATTENTION, *MESSAGES])
def test_slices_wait_in_the_memory_of_the_host(name: str, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    shard = Shard.load(tmp_path / "store", 0).to("cuda")
    assert _compare(name, shard, Communicator(), TensorBackend(memory_gib=KIB_24)) < 1e-10


def test_rows_for_the_backward_pass_wait_in_the_memory_of_the_host(tmp_path: Path) -> None:
    data = large_graph(4_000, 5, 32)
    write_store(data, torch.zeros(4_000).long().numpy(), tmp_path / "store", num_parts=1, method="test", arguments={})
    torch.manual_seed(0)
    plain = GCN(32, 32, num_layers=4, out_channels=3).double()
    expected = reference_step(copy.deepcopy(plain), data)
    shard, communicator, backend = Shard.load(tmp_path / "store", 0).to("cuda"), Communicator(), CommBackend(halo_gib=1)
    backend.bind(shard, communicator)
    with mock.patch.object(Overflow, "empty", autospec=True, side_effect=Overflow.empty) as made:
        found = distributed_step(distribute(plain.cuda(), backend=backend, check=False), shard, communicator)
    assert made.call_count >= 4
    worst = largest_differences(found, expected, shard.owned_id.cpu()).values()
    assert max(difference.absolute for difference in worst) < 1e-10


def test_edges_of_chunks_wait_in_the_memory_of_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, bound, (4000,), generator=generator) for bound in (300, 200))
    csr = CSR.from_coo(row, col, num_rows=300, num_cols=200)
    here = CSR(csr.indptr, csr.index, 200)
    plan = ExchangePlan(send_index=torch.empty(0, dtype=torch.int64), send_counts=(0, 0, 0), recv_counts=(0, 70, 80))
    arrival, value = Arrival(plan=plan, position=torch.arange(199, 49, -1)), torch.rand(4000, generator=generator)
    pieces = [arrival.piece(first, 40) for first in (0, 40)]
    there = CSR(here.indptr.cuda(), here.index.cuda(), 200)
    overflow = Overflow(torch.device("cuda"), budget=1, small=1)
    with torch.inference_mode():  # training uses what an evaluation made
        found = group_by_source(there, 50, [piece.to(torch.device("cuda")) for piece in pieces], overflow=overflow)
    expected = group_by_source(here, 50, pieces)
    assert torch.equal(found.degree.cpu(), expected.degree)
    assert [list(one) for one in found.remote] == [list(one) for one in expected.remote]
    pairs = [(found.local, expected.local)]
    for one, other in zip(found.remote, expected.remote, strict=True):
        pairs += [(one[message], other[message]) for message in one]
    for chunk, like in pairs:
        assert not chunk.perm.is_cuda
        for mine, theirs in ((chunk.csr, like.csr), (chunk.transposed, like.transposed)):
            assert mine.index.is_cuda
            assert torch.equal(mine.indptr.cpu(), theirs.indptr)
            assert torch.equal(mine.index.cpu(), theirs.index)
        assert torch.equal(chunk.filled.cpu(), like.filled)
        for transposed in (False, True):
            for _ in range(2):
                values = chunk.values(value.cuda(), transposed=transposed)
                assert values is not None
                assert values.is_cuda
                assert torch.equal(values.cpu(), like.values(value, transposed=transposed))  # type: ignore[arg-type]


def _hops_on_the_gpu(rank: int, world_size: int, store: str) -> float:
    """The model and what travels stay on the host; hops are computed on the GPU."""
    data, _ = random_graph("directed")
    communicator, shard, worst = Communicator(dist.new_group()), Shard.load(store, rank), 0.0
    for name in [*SUMS, *ATTENTION]:
        backend = TensorBackend(memory_gib=KIB_24, device="cuda")
        backend.bind(shard, communicator)
        model = distribute(build(name, 5, 3), backend=backend, check=False)
        expected = reference_step(build(name, 5, 3), data)
        found = largest_differences(distributed_step(model, shard, communicator), expected, shard.owned_id)
        worst = max(worst, *(difference.absolute for difference in found.values()))
    return worst


def test_the_model_on_the_host_and_hops_on_the_gpu(tmp_path: Path, pool: RankPool) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    assert max(pool.run(_hops_on_the_gpu, 2, str(tmp_path / "store"))) < 1e-10


SHARED: list[tuple[str, dict[str, Any]]] = [
    ("comm", {}),
    ("comm", {"ring": False, "overlap": False}),
    ("comm", {"halo_gib": 1.0}),
    ("cache", {}),
    ("hybrid", {"cache_ratio": 0.5}),
    ("tensor", {"num_chunks": 2}),
]


def _on_one_gpu(rank: int, world_size: int, store: str) -> dict[str, float]:
    """Ranks share the first GPU, and rows travel through the host."""
    communicator, shard = Communicator(dist.new_group()), Shard.load(store, rank).to("cuda:0")
    communicator.meet(torch.device("cuda:0"))
    assert communicator.sharers(torch.device("cuda:0")) == world_size
    return {
        f"{name}, {backend} {arguments}": _compare(name, shard, communicator, resolve_backend(backend, **arguments))
        for name in SOME
        for backend, arguments in SHARED
    }


def _in_bfloat16(rank: int, world_size: int, store: str) -> dict[str, float]:
    communicator, shard = Communicator(dist.new_group()), Shard.load(store, rank).to("cuda:0")
    return {name: _compare(name, shard, communicator, CommBackend(wire_dtype="bfloat16")) for name in SOME}


@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_of_ranks_that_share_a_gpu_travel_in_bfloat16(world_size: int, tmp_path: Path, pool: RankPool) -> None:
    data, part = random_graph("directed")
    write_store(data, part[world_size], tmp_path / "store", num_parts=world_size, method="test", arguments={})
    for found in pool.run(_in_bfloat16, world_size, str(tmp_path / "store")):
        assert 1e-10 < max(found.values()) < 0.1, found


def _budgets(rank: int, world_size: int, store: str) -> tuple[int, int]:
    device, communicator, backend = torch.device("cuda", 0), Communicator(dist.new_group()), CommBackend()
    shard = Shard.load(store, rank).to(device)
    communicator.meet(device)
    backend.bind(shard, communicator)
    communicator.barrier()
    return backend.first_hop_bytes(device), free_bytes(device)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_a_gpu_share_its_memory(world_size: int, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[world_size], tmp_path / "store", num_parts=world_size, method="test", arguments={})
    budgets, free = zip(*run_ranks(_budgets, world_size, str(tmp_path / "store")), strict=True)
    assert 0 < sum(budgets) <= 1.1 * max(free) / 4  # other tests take memory meanwhile


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_share_a_gpu(world_size: int, tmp_path: Path, pool: RankPool) -> None:
    data, part = random_graph("directed")
    write_store(data, part[world_size], tmp_path / "store", num_parts=world_size, method="test", arguments={})
    for found in pool.run(_on_one_gpu, world_size, str(tmp_path / "store")):
        assert max(found.values()) < 1e-10, found


def _trained(name: str, shard: Shard, steps: int, check: Callable[[int], None] = lambda step: None) -> list[Tensor]:
    """Return the parameters after some steps; ``check`` is called before each."""
    backend = CommBackend()
    backend.bind(shard, Communicator())
    model = distribute(build(name, 5, 3).cuda(), backend=backend, check=False)
    optimizer, inputs = torch.optim.Adam(model.parameters()), edge_inputs(model, shard)
    assert shard.y is not None
    assert shard.train_mask is not None
    rows = labelled_rows(shard.y, shard.train_mask)
    for step in range(steps):
        check(step)
        optimizer.zero_grad()
        total, count = summed_loss(model(shard.x, shard.adjacency, **inputs), shard.y, rows)
        (total / count).backward()
        optimizer.step()
    check(steps)
    return [one.detach().clone() for one in model.parameters()]


@pytest.fixture
def on_gpu(tmp_path: Path) -> Shard:
    """The whole graph on the GPU."""
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return Shard.load(tmp_path / "store", 0).to("cuda")


@pytest.mark.parametrize("name", [*SUMS, *ATTENTION, "BatchNorm"])
def test_the_third_step_waits_for_nothing(name: str, on_gpu: Shard) -> None:
    def check(step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")

    try:
        _trained(name, on_gpu, 3, check)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "SAGEConv-max"])
def test_memory_is_flat(name: str, on_gpu: Shard) -> None:
    taken = dict[int, int]()

    def check(step: int) -> None:
        if step in (20, 500):
            taken[step] = torch.cuda.memory_allocated()

    _trained(name, on_gpu, 500, check)
    assert taken[500] <= taken[20]


@pytest.mark.parametrize("name", [*SUMS, *ATTENTION, "BatchNorm"])
def test_deterministic_runs_are_bit_for_bit_alike(name: str, on_gpu: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        one, other = (_trained(name, on_gpu, 5) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, one, other))
