"""``comm`` and ``hybrid`` with less memory than rows take: piece by piece, kept in files, with the same numbers."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GCNConv, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN
from typing_extensions import override

from pygdist.backends import Backend, CommBackend, HybridBackend
from pygdist.backends.fetching import groups as chunks
from pygdist.backends.fetching.fetcher import Fetcher
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.memory.overflow import Overflow, writable
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, Step, assert_exact
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from tests.backends.memory import at_most, large_graph, private_bytes, return_freed_memory
from tests.backends.training import epoch, one_rank, same

NODES, DEGREE, WIDTH, LAYERS = 6_000, 5, 64, 10
PIECE = 128 << 10  # bytes of others' rows at a time, of 1.5 MB
MODELS: dict[str, Any] = {
    "GCN": lambda layers: GCN(WIDTH, WIDTH, num_layers=layers, out_channels=3, norm="layer"),
    "GAT": lambda layers: GAT(WIDTH, WIDTH, num_layers=layers, out_channels=3, heads=2),
}

IN_FILES = [
    "GCNConv", "SAGEConv-max", "GATConv", "GATConv-edges", "GATv2Conv", "TransformerConv", "GINEConv", "SAGEConv-lstm",
    "BatchNorm", "GraphNorm", "ARMAConv",
]  # fmt: skip


def _model(name: str, num_layers: int = LAYERS) -> BasicGNN:
    torch.manual_seed(0)
    model: BasicGNN = MODELS[name](num_layers)
    return model.double()


def _backend(halo_gib: float | None, cache_ratio: float | None) -> Backend:
    if cache_ratio is None:
        return CommBackend(halo_gib=halo_gib)
    return HybridBackend(halo_gib=halo_gib, cache_ratio=cache_ratio)


def _write_halves(nodes: int, degree: int, width: int, folder: Path) -> None:
    """A large graph of two parts."""
    data, part = large_graph(nodes, degree, width), torch.arange(nodes).numpy() % 2
    write_store(data, part, folder, num_parts=2, method="hash", arguments={}, notes=[])


def _step(
    rank: int, world_size: int, store: str, name: str, arguments: dict[str, Any], limit: int | None
) -> tuple[Step, Tensor, int]:
    """A step, of which nodes, and by how much the process grew between layers."""
    communicator, shard = Communicator(dist.new_group()), Shard.load(store, rank)
    return_freed_memory()
    for num_layers in (1, LAYERS):  # threads start with the first exchange and the first backward pass
        backend = _backend(**arguments)
        backend.bind(shard, communicator)
        model = distribute(_model(name, num_layers), backend=backend, check=False)
        if num_layers == 1:
            distributed_step(model, shard, communicator)
            backend.unbind()
    gc.collect()
    before, grown = private_bytes(), [0]
    for layer in model.convs:
        layer.register_forward_hook(lambda *_: grown.append(private_bytes() - before))
    with contextlib.nullcontext() if limit is None else at_most(limit):
        found = distributed_step(model, shard, communicator)
    return found, shard.owned_id.clone(), max(grown)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is one of Linux")
@pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
@pytest.mark.parametrize(
    ("name", "cache_ratio", "limit"),
    [("GCN", None, 20 << 20), pytest.param("GAT", 0.3, 48 << 20, marks=pytest.mark.exhaustive)],
)
@pytest.mark.usefixtures("fork_server")
def test_a_model_beyond_the_budget_trains(name: str, cache_ratio: float | None, limit: int, tmp_path: Path) -> None:
    """No more than the limit is taken by all of a step; rows that are kept on the device take more than that."""
    _write_halves(NODES, DEGREE, WIDTH, tmp_path)
    expected = reference_step(_model(name), large_graph(NODES, DEGREE, WIDTH))
    short, ample = ({"halo_gib": halo_gib, "cache_ratio": cache_ratio} for halo_gib in (PIECE / 2**30, None))
    with RankPool(2) as pool:  # processes with no memory of others' tests
        answers = [pool.run(_step, 2, str(tmp_path), name, *how) for how in ((short, limit), (ample, None))]
    for found, rows, _ in (*answers[0], *answers[1]):
        assert max(one.absolute for one in largest_differences(found, expected, rows).values()) < 1e-10
    for _, _, grown in answers[1]:
        assert grown > limit
    assert not list(tmp_path.rglob(".pygdist-*"))


def _kept(rank: int, world_size: int, store: str, halo_gib: float | None, limit: int | None) -> int:
    """Bytes that the process has more after a step than before it; in the step no more than the limit."""
    communicator, shard = Communicator(dist.new_group()), Shard.load(store, rank)
    return_freed_memory()
    _stepped(shard, communicator, CommBackend()).unbind()  # threads start, and degrees are kept
    gc.collect()
    before = private_bytes()
    with (
        contextlib.nullcontext() if limit is None else at_most(limit),
        mock.patch.object(chunks, "_EDGES_AT_A_TIME", 20_000),
    ):
        backend = _stepped(shard, communicator, CommBackend(halo_gib=halo_gib))
    gc.collect()
    grown = private_bytes() - before
    backend.unbind()
    return grown


def _stepped(shard: Shard, communicator: Communicator, backend: Backend) -> Backend:
    backend.bind(shard, communicator)
    model = distribute(GraphSAGE(8, 8, num_layers=2).double(), backend=backend, check=False)
    model(shard.x, shard.adjacency).sum().backward()
    return backend


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what a process has is told by Linux")
@pytest.mark.usefixtures("fork_server")
def test_edges_of_pieces_wait_in_files_and_are_sorted_there(tmp_path: Path) -> None:
    nodes, degree = 2000, 400
    _write_halves(nodes, degree, 8, tmp_path)
    row_bytes, edges = nodes // 2 * 8 * 8, nodes * degree // 2
    budgets = (row_bytes / 3 / 2**30, 8 * edges), (None, None)
    with RankPool(2) as pool:
        few, ample = (pool.run(_kept, 2, str(tmp_path), *budget) for budget in budgets)
    assert all(grown > 12 * edges for grown in ample)  # both orders of them
    assert all(grown < 4 * edges for grown in few)


class AllToFiles(CommBackend):
    """Keeps in files whatever has a value."""

    name = ""

    @property
    def fetcher(self) -> Fetcher:
        super().fetcher.small = 1
        return super().fetcher


@pytest.mark.slow
@pytest.mark.parametrize("exchange_at_once", [True, False])
def test_every_layer_with_its_rows_in_files(exchange_at_once: bool, pool: RankPool) -> None:
    backend = AllToFiles(halo_gib=1.0 if exchange_at_once else 400 / 2**30)
    assert_exact(backend, layers=IN_FILES, world_sizes=[3], graphs=["power-law"], pool=pool)


@pytest.mark.parametrize("norm", ["BatchNorm", "GraphNorm", "PairNorm"])
def test_a_pass_without_a_backward_pass_leaves_nothing(norm: str, tmp_path: Path) -> None:
    _, shard = one_rank(tmp_path)
    backend = CommBackend(halo_gib=1.0)
    backend.bind(shard, Communicator())
    model = distribute(GCN(5, 4, num_layers=2, out_channels=3, norm=norm).double(), backend=backend, check=False)
    rows: list[Any] = []
    model.convs[0].register_forward_hook(lambda module, args, out: rows.append(weakref.ref(out)))
    model.act.register_forward_hook(lambda module, args, out: rows.append(weakref.ref(out)))
    for _ in range(2):
        model(shard.x, shard.adjacency)
    assert len(rows) == 4
    assert not any(row() is not None for row in rows)


def test_what_stays_on_the_device_is_not_copied(tmp_path: Path) -> None:
    data = large_graph(NODES, DEGREE, WIDTH)
    data.edge_weight = torch.rand(data.edge_index.size(1), dtype=torch.float64)
    write_store(data, torch.zeros(NODES).long().numpy(), tmp_path, num_parts=1, method="", arguments={}, notes=[])
    shard, backend = Shard.load(tmp_path, 0), CommBackend(halo_gib=1.0)
    backend.bind(shard, Communicator())
    model = distribute(GCNConv(WIDTH, 2).double(), backend=backend, check=False)
    for _ in range(2):  # the sum over features is kept from the first pass on
        model(shard.x, shard.adjacency, shard.edge_weight).sum().backward()
    with mock.patch.object(Overflow, "empty", side_effect=AssertionError("a file")):
        model(shard.x, shard.adjacency, shard.edge_weight).sum().backward()


def test_a_store_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert writable(tmp_path) == tmp_path
    assert writable(None) is None
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert writable(tmp_path) is None
    assert "cannot be written to: tensors that do not fit in memory go to" in caplog.text


class Parts(nn.Module):
    """A model whose layers are called one by one, without its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(WIDTH, WIDTH)


def test_layers_called_by_themselves_keep_their_rows_in_files(tmp_path: Path) -> None:
    data = large_graph(NODES, DEGREE, WIDTH)
    write_store(data, torch.zeros(NODES).long().numpy(), tmp_path, num_parts=1, method="", arguments={}, notes=[])
    shard, backend = Shard.load(tmp_path, 0), CommBackend(halo_gib=1.0)
    backend.bind(shard, Communicator())
    model = distribute(Parts().double(), backend=backend, check=False)
    x = shard.x.exp().requires_grad_()
    with mock.patch.object(Overflow, "empty", autospec=True, side_effect=Overflow.empty) as made:
        model.conv(x, shard.adjacency).sum().backward()
    assert made.call_count > 0


class Breaks(nn.Module):
    """Fails in the middle of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 4)

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        raise RuntimeError(f"in the middle, after {self.conv(x, edge_index).shape}")


def test_nothing_goes_to_files_after_a_pass_that_failed(tmp_path: Path) -> None:
    _, shard = one_rank(tmp_path)
    backend = CommBackend(halo_gib=1.0)
    backend.bind(shard, Communicator())
    model = distribute(Breaks().double(), backend=backend, check=False)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(shard.x, shard.adjacency)
    _keeps_nothing_in_files()


def _keeps_nothing_in_files() -> None:
    rows = torch.ones(1000, 100, requires_grad=True)
    with mock.patch.object(Overflow, "empty", side_effect=AssertionError("a file")):
        rows.exp().sum().backward()


@pytest.mark.parametrize("then", ["forward", "unbind"])
def test_an_interrupted_pass_keeps_rows_in_files_no_longer_than_until_the_next(then: str, tmp_path: Path) -> None:
    _, shard = one_rank(tmp_path)
    backend = CommBackend(halo_gib=1.0)
    backend.bind(shard, Communicator())
    model = distribute(GCN(5, 4, num_layers=1).double(), backend=backend, check=False)
    with (
        mock.patch.object(model.convs[0].lin, "forward", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        model(shard.x, shard.adjacency)
    if then == "forward":
        model(shard.x, shard.adjacency)
    else:
        backend.unbind()
    _keeps_nothing_in_files()


@pytest.mark.slow
def test_a_compiled_model_keeps_its_rows_in_files(tmp_path: Path) -> None:
    data = large_graph(NODES, DEGREE, WIDTH)
    write_store(data, torch.zeros(NODES).long().numpy(), tmp_path, num_parts=1, method="", arguments={}, notes=[])
    plain, shard, backend = _model("GCN", 3), Shard.load(tmp_path, 0), CommBackend(halo_gib=1.0)
    backend.bind(shard, Communicator())
    torch._dynamo.reset()
    model = torch.compile(distribute(copy.deepcopy(plain), backend=backend, check=False), backend="aot_eager")
    with mock.patch.object(Overflow, "empty", autospec=True, side_effect=Overflow.empty) as made:
        same(epoch(model, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index), rtol=1e-12)
    assert made.call_count >= 4
    _keeps_nothing_in_files()
