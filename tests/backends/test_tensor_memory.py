"""``tensor`` with less memory than edges and slices take: chunk by chunk, with the same numbers."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    GraphSAGE,
    MessagePassing,
    SAGEConv,
    TransformerConv,
)
from typing_extensions import override

from pygdist.backends import TensorBackend
from pygdist.backends.slicing.budget import device_of
from pygdist.backends.slicing.chunk_plan import ChunkBytes, ChunkPlan, chunks_within, length_of
from pygdist.backends.slicing.chunked_autograd import repeated
from pygdist.backends.slicing.chunked_hop import ChunkInput
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.kernels import CSR
from pygdist.memory.overflow import Overflow
from pygdist.native import load
from pygdist.nn.decoupled import Decoupled, decouple
from pygdist.routing import distribute
from pygdist.testing import RankPool, Step, assert_exact, random_graph, supported_layers
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from tests.backends.memory import at_most, large_graph, private_bytes, return_freed_memory
from tests.backends.training import TINY, epoch, one_rank_in_little_memory, same

NODES, DEGREE, WIDTH = 10_000, 300, 8
BUDGET, LIMIT = 4 << 20, 16 << 20  # for edges and slices, and for all that a step takes
TINIER = 8 / 2**20  # of which sums have enough
SUMS = ["APPNP", "GCNConv", "GINConv", "GraphConv", "LGConv", "SAGEConv-mean", "SGConv", "SSGConv", "TAGConv"]
#: What is no sum by weights without gradient, and takes chunks to the device that are computed again backward.
OTHERS = [
    "ARMAConv", "EGConv", "FAConv", "FiLMConv", "GATConv", "GATConv-edges", "GATv2Conv", "GATv2Conv-edges",
    "GraphConv-max", "LEConv", "MFConv", "PDNConv", "RGCNConv", "SAGEConv-many", "SAGEConv-max", "SAGEConv-min",
    "SAGEConv-softmax", "SimpleConv", "TransformerConv",
]  # fmt: skip
SMALL = 192 / 2**20  # GiB: what FiLMConv needs for one node's messages at a time, on one process


def test_files_hold_what_is_put_into_them(tmp_path: Path) -> None:
    overflow = Overflow(torch.device("cpu"), BUDGET, tmp_path)
    memory = overflow.empty((3000, 7), torch.float64)
    memory.copy_(torch.arange(21_000.0).view(3000, 7))
    assert torch.equal(memory.sum(1), torch.arange(21_000.0, dtype=torch.float64).view(3000, 7).sum(1))
    assert overflow.empty((0, 3), torch.int32).shape == (0, 3)
    assert not list(tmp_path.iterdir())  # without a name, gone with the tensor
    missing = Overflow(torch.device("cpu"), BUDGET, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"nowhere: cannot store .* GiB of tensors .*No such file"):
        missing.empty((missing.small,), torch.uint8)
    assert missing.empty((missing.small - 1,), torch.uint8).numel() == missing.small - 1  # not worth a file


def test_a_plan_has_as_many_files_however_many_its_chunks(tmp_path: Path) -> None:
    made = []
    for num_chunks in (2, 50):
        csr = CSR(torch.arange(0, 1001, 10), torch.arange(1000, dtype=torch.int32) * 7 % 100, 100)
        overflow = Overflow(torch.device("cpu"), BUDGET, tmp_path, small=0)
        with mock.patch.object(Overflow, "empty", autospec=True, side_effect=Overflow.empty) as files:
            plan = ChunkPlan(csr, (50, 50), num_chunks, overflow=overflow)
            queues = plan.queue(), plan.queue(target=True)
        made.append(files.call_count)
        for queue, fresh in zip(queues, (False, True), strict=True):
            expected = ChunkPlan(csr, (50, 50), num_chunks).queue(target=fresh)
            for ours, theirs in zip(queue, expected, strict=True):
                for one, other in zip(ours[0], theirs[0], strict=True):
                    assert torch.equal(torch.as_tensor(one).long(), torch.as_tensor(other).long())
    assert made == [4, 4]  # edges, sources, and each queue


def test_chunks_are_as_few_as_fit() -> None:
    csr = CSR(torch.arange(0, 1001, 10), torch.arange(1000, dtype=torch.int32) % 100, 100)
    counts, needs = (50, 50), ChunkBytes(read=16, edge=4, made=16, whole=32)
    sizes = [chunks_within(budget, csr, counts, needs) for budget in (1 << 20, 10_000, 5_000)]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1
    assert chunks_within(10_000, csr, counts, replace(needs, made=160, whole=320)) > sizes[1]
    lists = 20 * 4 + 2 * 8  # of the rows that a chunk of two destinations reads, and where edges of each begin
    least = 20 * (4 + 4) + 20 * 16 + 2 * (2 * 16 + 1 * 32) + lists
    assert chunks_within(least, csr, counts, needs) == 50
    with pytest.raises(InputError, match=r"memory_gib: .* GiB do not hold one row of each rank with its in-edges"):
        chunks_within(least - 1, csr, counts, needs)


def test_no_more_than_so_many_rows_travel_at_a_time() -> None:
    csr = CSR(torch.arange(0, 1001, 10), torch.arange(1000, dtype=torch.int32) % 100, 100)
    plan = ChunkPlan(csr, (60, 40), 3)
    rows: list[int] = []
    for pieces in plan.queue(most_rows=7):
        for piece in pieces:
            assert max(length_of(part) for part in piece) <= 7
            rows += torch.cat([part for part in piece if isinstance(part, Tensor)]).tolist()
    assert sorted(rows) == list(range(100))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_of_sums_equal_one_process_in_little_memory(world_size: int, pool: RankPool) -> None:
    backend = TensorBackend(memory_gib=TINIER)
    assert_exact(backend, layers=SUMS, world_sizes=[world_size], graphs=["power-law"], pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_layers_equal_one_process_in_little_memory(world_size: int, pool: RankPool) -> None:
    backend = TensorBackend(memory_gib=SMALL)
    assert_exact(backend, layers=OTHERS, world_sizes=[world_size], graphs=["power-law"], pool=pool)
    backend = TensorBackend(memory_gib=TINY)
    layers = ["GATConv", "GATv2Conv", "GATv2Conv-edges", "SAGEConv-max", "TransformerConv"]
    assert_exact(backend, layers=layers, world_sizes=[world_size], graphs=["empty-part", "isolated"], pool=pool)


@pytest.mark.exhaustive
def test_every_layer_that_qualifies_runs_in_little_memory(pool: RankPool) -> None:
    backend = TensorBackend(memory_gib=SMALL)
    assert_exact(backend, layers=supported_layers("tensor"), world_sizes=[4], graphs=["directed"], pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_chunks_equal_one_process_with_and_without_overlap(overlap: bool, pool: RankPool) -> None:
    backend = TensorBackend(num_chunks=5, overlap=overlap)
    assert_exact(backend, layers=SUMS, world_sizes=[3], graphs=["empty-part"], pool=pool)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "GAT": lambda width: GAT(width, WIDTH, num_layers=2, out_channels=3, add_self_loops=False),
    "GAT-decoupled": lambda width: decouple(GAT(width, WIDTH, num_layers=2, out_channels=3)),
    "GraphSAGE": lambda width: GraphSAGE(width, WIDTH, num_layers=2, out_channels=3),
    "GraphSAGE-decoupled": lambda width: decouple(GraphSAGE(width, WIDTH, num_layers=2, out_channels=3)),
    "GraphSAGE-max": lambda width: GraphSAGE(width, WIDTH, num_layers=2, out_channels=3, aggr="max"),
}


def _model(name: str, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](width).double()


def _step(
    rank: int, world_size: int, store: str, small: str, name: str, memory_gib: float | None, limited: bool
) -> tuple[Step, Tensor, int]:
    """A step, of which nodes, and by how much the process grew."""
    return_freed_memory()  # or a step would find some that nobody counted
    communicator = Communicator(dist.new_group())
    for folder in (small, store):  # threads start with the first exchange and the first backward pass
        shard, backend = Shard.load(folder, rank), TensorBackend(memory_gib=memory_gib)
        backend.bind(shard, communicator)
        if folder == small:
            distributed_step(distribute(_model(name, 5), backend=backend, check=False), shard, communicator)
            backend.unbind()
    model = distribute(_model(name), backend=backend, check=False)
    if isinstance(model, Decoupled):
        model._looped(shard.adjacency, shard.num_owned)  # a rank's own edges are not counted
    gc.collect()
    before = private_bytes()
    with at_most(LIMIT) if limited else contextlib.nullcontext():
        step = distributed_step(model, shard, communicator)
    return step, shard.owned_id.clone(), private_bytes() - before


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is one of Linux")
@pytest.mark.skipif(load() is None, reason="the native library transposes in files")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name == "GAT" else ()) for name in MODELS],
)
@pytest.mark.usefixtures("fork_server")
def test_a_graph_beyond_the_budget_trains_by_chunks(name: str, tmp_path: Path) -> None:
    """Edges take 12 MB there and 24 MB back, and weights of attention 24 MB; the whole step may take 16 MB."""
    data, (small, parts) = large_graph(NODES, DEGREE, WIDTH), random_graph()
    write_store(
        data, torch.arange(NODES).numpy() % 2, tmp_path / "large", num_parts=2, method="hash", arguments={}, notes=[]
    )
    write_store(small, parts[2], tmp_path / "small", num_parts=2, method="", arguments={}, notes=[])
    stores = str(tmp_path / "large"), str(tmp_path / "small")
    expected = reference_step(_model(name), data)
    with RankPool(2) as pool:  # processes with no memory of others' tests
        answers = [pool.run(_step, 2, *stores, name, *how) for how in ((BUDGET / 2**30, True), (None, False))]
    for step, rows, _ in itertools.chain(*answers):
        assert max(one.absolute for one in largest_differences(step, expected, rows).values()) < 1e-10
    for _, _, grown in answers[1]:
        assert grown > LIMIT


class Relisted(SAGEConv):
    """A user's layer that makes a list of its own of the edges."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor, size: Any = None) -> Tensor:
        """As its parent, without the last edge."""
        return super().forward(x, edge_index.flip(0).flip(0)[:, :-1], size)


def _refused(rank: int, world_size: int, store: str) -> str:
    shard, backend = Shard.load(store, rank), TensorBackend(memory_gib=1.0)
    backend.bind(shard, Communicator(dist.new_group()))
    with pytest.raises(InputError) as caught:
        distribute(Relisted(5, 4).double(), backend=backend, check=False)(shard.x, shard.adjacency)
    return str(caught.value)


def test_edges_of_a_layers_own_are_refused_where_memory_is_bounded(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph()
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="", arguments={}, notes=[])
    for text in pool.run(_refused, 2, str(tmp_path / "parts")):
        assert re.match(r"hop \d of Relisted: its edges are neither the graph's adjacency", text)


def test_messages_are_computed_where_the_model_is(tmp_path: Path) -> None:
    data, parts = random_graph()
    write_store(data, parts[1], tmp_path / "parts", num_parts=1, method="", arguments={}, notes=[])
    backend, shard = TensorBackend(memory_gib=1.0, device="meta"), Shard.load(str(tmp_path / "parts"), 0)
    backend.bind(shard, Communicator())
    layer = distribute(SAGEConv(5, 4, aggr=["mean", "std"]).double(), backend=backend, check=False)
    with pytest.raises(InputError, match="computes its messages where its parameters are, on cpu, not on meta"):
        layer(shard.x, shard.adjacency)


def test_a_device_that_torch_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match="device is '3', expected the name of a device of torch"):
        device_of("3", torch.device("cpu"), 0)


def test_gradients_of_what_several_hops_read_are_added_up() -> None:
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    first, second, third = repeated(x, 3)
    (first.exp() + second.square() + 3 * third.sin()).sum().backward()
    assert x.grad is not None
    values = x.detach()
    assert torch.allclose(x.grad, values.exp() + 2 * values + 3 * values.cos(), rtol=0, atol=1e-12)
    assert repeated(x, 1) == (x,)


#: With two classes: of three ranks one has no column of them.
NARROW: dict[str, Callable[[], nn.Module]] = {
    "GAT": lambda: GAT(5, 6, num_layers=2, out_channels=2),
    "GAT-decoupled": lambda: decouple(GAT(5, 6, num_layers=3, out_channels=2)),
    "GAT-decoupled-heads": lambda: decouple(GAT(5, 6, num_layers=3, out_channels=2, heads=3, concat=False)),
    "GCN-decoupled": lambda: decouple(GCN(5, 6, num_layers=3, out_channels=2)),
    "GIN-decoupled": lambda: decouple(GIN(5, 6, num_layers=3, out_channels=2)),
    "GraphSAGE-decoupled": lambda: decouple(GraphSAGE(5, 6, num_layers=3, out_channels=2)),
    "GraphSAGE-std": lambda: GraphSAGE(5, 6, num_layers=2, out_channels=2, aggr=["max", "std"]),
}


def _narrow(rank: int, world_size: int, store: str, name: str) -> float:
    """Largest error of a step in which ranks wait for each other's gradient of every parameter, as in training."""
    data, _ = random_graph("power-law", num_classes=2)
    shard, backend = Shard.load(store, rank), TensorBackend(memory_gib=TINY)
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    plain = NARROW[name]().double()
    model = distribute(copy.deepcopy(plain), backend=backend, check=False)
    step = distributed_step(model, shard, backend.communicator, static_graph=False)
    return max(one.absolute for one in largest_differences(step, reference_step(plain, data), shard.owned_id).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NARROW))
def test_a_rank_without_columns_takes_part_in_little_memory(name: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_classes=2)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="", arguments={}, notes=[])
    assert max(pool.run(_narrow, 3, str(tmp_path / "parts"), name)) < 1e-10


class KeepsThings(MessagePassing):
    """Reads in its hop what it has just computed, and leaves on itself what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale, self.left = nn.Parameter(torch.tensor(0.3)), torch.ones(1), torch.ones(1)

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.scale = self.gate.sigmoid()
        out: Tensor = self.propagate(edge_index, x=x)
        self.left = out.pow(2).mean()
        return out

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return self.scale * x_j


def test_what_a_hop_reads_of_its_layer_has_a_gradient(tmp_path: Path) -> None:
    plain = KeepsThings().double()
    model, shard, data = one_rank_in_little_memory(plain, tmp_path)
    for _ in range(2):
        same(epoch(model, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index))
    assert any(parameter.grad is not None and parameter.grad.abs() > 0 for parameter in model.parameters())


def test_passes_do_not_hold_each_other(tmp_path: Path) -> None:
    model, shard, _ = one_rank_in_little_memory(KeepsThings().double(), tmp_path)
    seen: list[weakref.ref[Tensor]] = []
    for _ in range(3):
        x = shard.x.clone()
        seen.append(weakref.ref(x))
        model(x, shard.adjacency).sum().backward()
        del x
    gc.collect()
    assert sum(one() is not None for one in seen) <= 1


@pytest.mark.parametrize("what", ["rows", "weights"])
def test_the_backward_pass_holds_nothing_that_has_travelled(what: str, tmp_path: Path) -> None:
    layer = KeepsThings() if what == "rows" else GraphConv(5, 4)
    model, shard, _ = one_rank_in_little_memory(layer.double(), tmp_path)
    assert shard.edge_weight is not None
    tensor = shard.x if what == "rows" else shard.edge_weight
    leaf = tensor.clone().requires_grad_()
    computed = 2 * leaf
    arguments = (computed, shard.adjacency) if what == "rows" else (shard.x, shard.adjacency, computed)
    out, seen = model(*arguments), weakref.ref(computed)
    del computed, arguments
    gc.collect()
    assert seen() is None
    out.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("layer", "memory_gib"),
    [
        (GATConv(5, 4), TINY),
        (GATv2Conv(5, 4), TINY),
        (SAGEConv(5, 4, aggr="max"), TINY),
        (TransformerConv(5, 4), TINY),
        (GCNConv(5, 4), TINIER),
    ],
)
def test_little_memory_is_several_chunks(layer: MessagePassing, memory_gib: float, tmp_path: Path) -> None:
    """The comparisons in little memory compare chunks with one process, not one chunk."""
    model, shard, _ = one_rank_in_little_memory(layer.double(), tmp_path, memory_gib)
    made: list[int] = []
    init = ChunkPlan.__init__

    def noted(self: ChunkPlan, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(len(self.chunks))

    with mock.patch.object(ChunkPlan, "__init__", noted):
        model(shard.x, shard.adjacency).sum().backward()
    assert made
    assert min(made) > 1


def test_wider_results_take_more_memory(tmp_path: Path) -> None:
    taken = []
    for number, aggr in enumerate((["max"], ["max", "std", "mean"])):
        model, shard, _ = one_rank_in_little_memory(SAGEConv(5, 4, aggr=aggr).double(), tmp_path / str(number), 1.0)
        with mock.patch("pygdist.backends.slicing.chunk_plan.chunks_within", return_value=1) as asked:
            model(shard.x, shard.adjacency)
        taken.append(asked.call_args.args[3].made)
    assert taken[1] == 3 * taken[0] > 0


class ReadsBoth(MessagePassing):
    """Asks for rows at the sources of edges and as they are."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    @override
    def message(self, x_j: Tensor, x: Tensor, index: Tensor) -> Tensor:
        return x_j.exp() * x[index]


def test_rows_that_are_read_in_two_ways_are_refused(tmp_path: Path) -> None:
    model, shard, _ = one_rank_in_little_memory(ReadsBoth().double(), tmp_path)
    with pytest.raises(InputError, match="ReadsBoth: the layer reads 'x' at the ends of edges and as it is"):
        model(shard.x, shard.adjacency)


class Centred(MessagePassing):
    """Looks beyond the destination of a message."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    @override
    def message(self, x_j: Tensor) -> Tensor:
        return (x_j - x_j.mean(0)).tanh()


def test_a_hop_that_needs_all_edges_is_not_cut(tmp_path: Path) -> None:
    (cut, shard, _), plain = one_rank_in_little_memory(Centred(), tmp_path / "cut"), Centred()
    with pytest.raises(InputError, match=r"hop 1 of Centred: gave some destinations other rows .* asks for \d+ of"):
        cut(shard.x, shard.adjacency)
    model, shard, data = one_rank_in_little_memory(plain, tmp_path / "whole", 1.0)
    assert torch.allclose(model(shard.x, shard.adjacency), plain(data.x, data.edge_index), rtol=0, atol=1e-10)


@pytest.mark.parametrize("hook", ["propagate_forward", "message_forward_pre", "aggregate_forward"])
def test_hooks_do_not_see_chunks(hook: str, tmp_path: Path) -> None:
    model, shard, _ = one_rank_in_little_memory(SAGEConv(5, 4, aggr="max").double(), tmp_path)
    getattr(model, f"register_{hook}_hook")(lambda *_: None)
    with pytest.raises(InputError, match="hop 1 of SAGEConv: the layer has hooks on its hops, which would see"):
        model(shard.x, shard.adjacency)


def test_all_ranks_make_the_same_chunks() -> None:
    """Though the first has more columns than the last."""
    first, last = (ChunkInput(rows=torch.zeros(9, 3, held), source=True, most_columns=2) for held in (2, 0))
    assert first.row_bytes(4) == last.row_bytes(4) == 3 * 2 * 4
    assert ChunkInput(rows=torch.zeros(0, 5), target=True).row_bytes(3) == 20
    assert ChunkInput(rows=torch.zeros(0, 5), target=True, way="share").row_bytes(3) == 20
    assert ChunkInput(rows=torch.zeros(0, 3, 5), source=True, way="split").row_bytes(3) == 3 * 2 * 4
