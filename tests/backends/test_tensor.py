"""``tensor``: which layers can share columns out, what travels, and that it is as much for every rank."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import (
    APPNP,
    GAT,
    GCN,
    GIN,
    GATConv,
    GCNConv,
    GINEConv,
    GraphConv,
    GraphSAGE,
    LGConv,
    MessagePassing,
    RGCNConv,
    SAGEConv,
    Sequential,
    SGConv,
    SimpleConv,
)
from torch_geometric.nn.models.basic_gnn import BasicGNN

from pygdist.backends import Savings, TensorBackend, resolve_backend
from pygdist.backends.slicing.all_nodes import AllNodes
from pygdist.backends.slicing.budget import ModelSizes, device_of, overflow_of
from pygdist.backends.slicing.columns import acts_on_columns
from pygdist.backends.slicing.edge_tensors import EdgeReader, EdgeTensors
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ddp_loss_scale
from pygdist.comm.slices import columns_of
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.kernels import CSR, spmm
from pygdist.kernels.chunked import spmm_into
from pygdist.nn import GlobalGCNNorm
from pygdist.nn.decoupled import decouple
from pygdist.nn.loss import summed_loss
from pygdist.partition import partition_graph
from pygdist.routing import distribute
from pygdist.testing import LAYERS, RankError, RankPool, assert_exact, random_graph, supported_layers
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from pygdist.testing.graphs import GRAPHS
from pygdist.testing.layers import build

#: What the issue of this backend names, by the suite's names.
QUALIFIED = [
    "APPNP", "ARMAConv", "GATConv", "GATConv-edges", "GATv2Conv", "GATv2Conv-edges", "GCN2Conv", "GCNConv",
    "GINConv", "GraphConv", "GraphConv-max", "LGConv", "RGCNConv", "SAGEConv-max", "SAGEConv-mean", "SAGEConv-many",
    "SAGEConv-softmax", "SGConv", "SSGConv", "SimpleConv", "TAGConv", "TransformerConv",
]  # fmt: skip
#: All that is refused, so that no layer leaves the suite unnoticed: what mixes columns when tried.
MIXING = [
    "AGNNConv", "CGConv", "DNAConv", "EdgeConv", "FastRGCNConv", "FeaStConv", "GENConv", "GINEConv", "GMMConv",
    "GeneralConv", "HEATConv", "NNConv", "PNAConv", "PPFConv", "PointGNNConv", "PointNetConv", "PointTransformerConv",
    "RGATConv", "ResGatedGraphConv", "SAGEConv-lstm", "SAGEConv-patches",
]  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"
PLAIN = Savings(first_hop=False, cheaper_side=False)


def test_which_layers_qualify_is_found_out() -> None:
    distribute(
        GINEConv(nn.Linear(5, 3)), backend=TensorBackend(), check=False
    )  # the suite's has weights for edges in its message
    supported = supported_layers("tensor")
    assert set(QUALIFIED) <= set(supported)
    assert LAYERS.keys() - set(supported) == set(MIXING)
    for name in MIXING:
        with pytest.raises(InputError, match=r"it mixes columns .* use backend cache, comm.* hybrid"):
            distribute(build(name, 5, 3), backend=TensorBackend(), check=False)


@pytest.mark.parametrize("page", ["explanation/neutrontp.md", "reference/backends/tensor.md"])
def test_pages_name_all_layers_that_mix_columns(page: str) -> None:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    (said,) = [line for line in lines if "these fail: " in line]
    assert set(re.findall(r"`(\w+Conv)`", said)) == {name for name in MIXING if "-" not in name}


class Doubled(MessagePassing):
    """A user's layer of which nothing is known."""

    def __init__(self, turn: bool) -> None:
        super().__init__(aggr="mean")
        self.turn = turn

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return (x_j.flip(-1) if self.turn else 2 * x_j) - x_i.sigmoid()


def test_layers_of_users_are_tried_too() -> None:
    distribute(Doubled(turn=False), backend=TensorBackend(), check=False)
    with pytest.raises(InputError, match=r"'model' \(Doubled\): it mixes columns \(propagate\(x\)\)"):
        distribute(Doubled(turn=True), backend=TensorBackend(), check=False)
    distribute(OtherNames(turn=False), backend=TensorBackend(), check=False)
    with pytest.raises(InputError, match=r"'model' \(OtherNames\): it mixes columns \(propagate\(x\)\)"):
        distribute(OtherNames(turn=True), backend=TensorBackend(), check=False)


class OtherNames(Doubled):
    """Names its rows and edges as it likes."""

    def forward(self, h: Tensor, adj: Tensor) -> Tensor:
        return super().forward(h, adj)


class Averse(MessagePassing):
    """Mixes columns where rows of both ends point away from each other, as positive ones never do."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j * (-(x_i * x_j).sum(-1, keepdim=True)).relu()


class Root(Averse):
    """Takes no negative rows, and does not mix."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j.sqrt() * x_i.log()


class Distant(Averse):
    """Mixes columns, of which nothing is seen where norms of rows are above 1: all is no number."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j * (3 + x_j.norm(dim=-1, keepdim=True)).atanh()


class Checked(Root):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if x_j.min() < 0:
            raise ValueError("negative rows")
        return super().message(x_i, x_j)


def test_rows_of_both_signs_are_tried() -> None:
    with pytest.raises(InputError, match=r"'model' \(Averse\): it mixes columns \(propagate\(x\)\)"):
        distribute(Averse(), backend=TensorBackend(), check=False)
    for layer in (Root(), Checked()):
        distribute(layer, backend=TensorBackend(), check=False)
    with pytest.raises(InputError, match=r"could not be tried on a few nodes \(ValueError: its result is NaN \("):
        distribute(Distant(), backend=TensorBackend(), check=False)


@pytest.mark.parametrize(
    ("said", "here", "local", "expected"),
    [
        (None, "cpu", 0, "cpu"),
        ("cuda", "cuda:1", 0, "cuda:1"),
        ("cuda", "cpu", 3, "cuda:1"),
        ("cuda", "cpu", 2, "cuda:0"),
        ("cuda:0", "cpu", 1, "cuda:0"),
    ],
)
def test_ranks_of_a_machine_take_its_gpus_in_turn(said: str | None, here: str, local: int, expected: str) -> None:
    with mock.patch("torch.cuda.device_count", return_value=2):
        assert str(device_of(said, torch.device(here), local)) == expected


def test_hops_of_a_model_on_a_gpu_do_not_run_on_the_host() -> None:
    shard = mock.Mock(**{"n_id.device": torch.device("cuda")})
    with pytest.raises(InputError, match="device=cpu: hops of a model on cuda run there"):
        overflow_of(shard, Communicator(), ModelSizes(), memory_gib=1.0, device="cpu")


def test_the_widest_rows_of_a_model_are_known() -> None:
    """By which a GPU's memory is found to be too small for all of them at once."""
    assert ModelSizes.of(GCN(5, 300, num_layers=2, out_channels=3)) == ModelSizes(300, 1)
    assert ModelSizes.of(GAT(5, 24, num_layers=2, out_channels=3, heads=4)) == ModelSizes(24, 4)
    assert ModelSizes.of(GAT(5, 24, num_layers=2, out_channels=3, heads=4, dropout=0.5)) == ModelSizes(24, 12)
    assert ModelSizes.of(decouple(GCN(5, 8, num_layers=2, out_channels=300))) == ModelSizes(300, 1)
    assert ModelSizes.of(decouple(GAT(5, 8, num_layers=2, out_channels=300, heads=4))) == ModelSizes(1200, 4)
    assert ModelSizes.of(RGCNConv(5, 8, num_relations=1000)) == ModelSizes(8, 1)
    assert ModelSizes.of(nn.Sequential(nn.Embedding(1000, 4), APPNP(K=2, alpha=0.1))) == ModelSizes(0, 1)


def _warned(rank: int, world_size: int, store: str, check: bool) -> list[str]:
    shard, backend = Shard.load(store, rank), TensorBackend(num_chunks=3)
    backend.bind(shard, Communicator(dist.new_group()))
    layers = [SAGEConv(5, 4), GATConv(4, 4), SAGEConv(4, 4, aggr="max")]
    model = Sequential("x, edge_index", [(layer, "x, edge_index -> x") for layer in layers])
    model = distribute(model, backend=backend, check=check)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(shard.x.float(), shard.adjacency)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("check", [False, True])
def test_chunks_that_a_layer_does_not_make_are_told_of_once(check: bool, tmp_path: Path, pool: RankPool) -> None:
    said, by_another_rank = pool.run(_warned, 2, _store(tmp_path / "parts", 2), check)
    assert {one.split("; ")[0] for one in said} == {"num_chunks=3 is for one sum or mean by weights without gradient"}
    assert [one.split("; ")[1].split()[0] for one in said] == ["GATConv", "SAGEConv"]
    assert by_another_rank == []


def _normed(module: nn.Module, arguments: object, out: Tensor) -> Tensor:
    return out / (1 + out.norm(dim=-1, keepdim=True))


def _hooked_late(rank: int, world_size: int, store: str) -> list[str]:
    shard, backend = Shard.load(store, rank), TensorBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    said = []
    for model in (GCNConv(5, 4), decouple(GCN(5, 6, num_layers=2, out_channels=4)), SGConv(5, 4, K=2)):
        distribute(model.double(), backend=backend, check=False)
        model(shard.x, shard.adjacency)
        for layer in model.modules():
            if isinstance(layer, MessagePassing):
                layer.register_propagate_forward_hook(_normed)
        with pytest.raises(InputError) as caught:
            model(shard.x, shard.adjacency)
        said.append(str(caught.value))
    return said


def test_hooks_that_come_after_the_trial_may_not_mix_columns_either(tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_hooked_late, 2, _store(tmp_path / "parts", 2)):
        for one, name in zip(said, ("GCNConv", "Propagation", "SGConv"), strict=True):
            assert re.match(rf"hop \d of {name}: mixes columns \(propagate\(edge_weight, x\)\)", one), one


class TwoNames(nn.Module):
    """A layer that asks of its hop what it did not when it was tried: edge attributes under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Named()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, torch.ones(edge_index.size(1), dtype=x.dtype))
        return out


class Named(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, strength: Tensor | None = None) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, strength=strength)
        return out

    def message(self, x_j: Tensor, strength: Tensor | None) -> Tensor:
        return x_j if strength is None else strength[:, None] * x_j


def _store(folder: Path, world_size: int, kind: str = "power-law") -> str:
    data, parts = random_graph(kind)
    write_store(data, parts[world_size], folder, num_parts=world_size, method=kind, arguments={}, notes=[])
    return str(folder)


def _named(rank: int, world_size: int, store: str) -> str:
    shard, backend = Shard.load(store, rank), TensorBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    model = distribute(TwoNames(), backend=backend, check=False)
    with pytest.raises(InputError) as caught:
        model(shard.x, shard.adjacency)
    return str(caught.value)


def test_a_hop_that_was_not_tried_is_refused(tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_named, 2, _store(tmp_path / "parts", 2)):
        assert said.startswith("Named: propagate(strength, x) did not run when the layer was tried on a few nodes")


#: One of each way to share columns out: products, attention, extrema, learned and given values of edges, relations.
SOME = ["APPNP", "GATConv-edges", "GATv2Conv", "GCNConv", "GINConv", "GraphConv-max", "RGCNConv", "SAGEConv-max"]
SOME += ["SAGEConv-softmax", "TransformerConv"]


def _dimensions() -> list[object]:
    """Every number of ranks and features on every graph; without --exhaustive each of both once, on one graph."""
    few = {(2, 1): ("no-train-part",), (3, 3): ("empty-part",), (4, 7): ("directed",), (5, 64): ("isolated",)}
    cases = [
        pytest.param(*one, graphs, one[0] < 4, id="{}-ranks-{}-features".format(*one)) for one, graphs in few.items()
    ]
    for world_size, num_features in itertools.product([1, 2, 3, 4, 5], [1, 3, 7, 64]):
        name = f"{world_size}-ranks-{num_features}-features-every-graph"
        cases.append(pytest.param(world_size, num_features, GRAPHS, True, id=name, marks=pytest.mark.exhaustive))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_features", "graphs", "every"), _dimensions())
def test_every_layer_that_qualifies_equals_one_process(
    world_size: int, num_features: int, graphs: tuple[str, ...], every: bool, pool: RankPool
) -> None:
    """With fewer columns than ranks too: of 1 feature on 2 of them, and 3 classes on 4 and 5, some have none."""
    layers = supported_layers("tensor") if every else SOME
    differences = assert_exact(
        "tensor",
        layers=layers,
        world_sizes=[world_size],
        graphs=graphs,
        num_features=num_features,
        hidden_channels=num_features,
        pool=pool,
    )
    assert set(differences) == set(layers)


def _step(rank: int, world_size: int, store: str, name: str, hidden: int) -> float:
    data, _ = random_graph("power-law")
    shard, backend = Shard.load(store, rank), TensorBackend()
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    plain = _model(name, hidden)
    model = distribute(copy.deepcopy(plain), backend=backend, check=False)
    differences = largest_differences(
        distributed_step(model, shard, backend.communicator), reference_step(plain, data), shard.owned_id
    )
    return max(one.absolute for one in differences.values())


def _model(name: str, hidden: int, num_layers: int = 2) -> BasicGNN:
    torch.manual_seed(0)
    make = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GIN": GIN, "GAT": GAT}[name]
    return make(5, hidden, num_layers=num_layers, out_channels=3).double()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize("hidden", [1, 3, 7, 64])
@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN", "GAT"])
def test_widths_need_not_divide_by_the_ranks(
    name: str, hidden: int, world_size: int, tmp_path: Path, pool: RankPool
) -> None:
    store = _store(tmp_path / "parts", world_size)
    assert max(pool.run(_step, world_size, store, name, hidden)) < 1e-10


def _traffic(
    rank: int, world_size: int, store: str, name: str, hidden: int, num_layers: int
) -> tuple[int, int, int, int]:
    shard, backend = Shard.load(store, rank), TensorBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    model = distribute(_model(name, hidden, num_layers), backend=backend, savings=PLAIN, check=False)
    meter = backend.communicator.meter
    for _ in range(3):  # what stays the same travels in the first epoch
        meter.reset()
        model(shard.x, shard.adjacency).sum().backward()
    return meter.read().sent_bytes, meter.read().calls, shard.num_owned, shard.num_nodes


@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_bytes_are_those_of_the_analysis(hidden: int, tmp_path: Path, pool: RankPool) -> None:
    """Split: a rank keeps its columns of its rows; gather: its rows of its columns; backward the same once more."""
    store = _store(tmp_path / "parts", 3)
    for rank, (sent, calls, num_owned, num_nodes) in enumerate(pool.run(_traffic, 3, store, "GCN", hidden, 2)):
        expected = 0
        for width in (hidden, 3):
            mine = columns_of(width, rank, 3)
            held = mine.stop - mine.start
            expected += 2 * 8 * (num_owned * (width - held) + (num_nodes - num_owned) * held)
        assert sent == expected
        assert calls == 2 * 2 * 2


def test_bytes_of_attention_are_those_of_the_analysis(tmp_path: Path, pool: RankPool) -> None:
    """4 and 3 columns in 2 layers, and two scores of each node, which every rank gets; there and back."""
    store = _store(tmp_path / "parts", 3)
    ranks = pool.run(_traffic, 3, store, "GAT", 4, 2)
    for (sent, calls, num_owned, num_nodes), held in zip(ranks, (2, 1, 1), strict=True):
        first = num_owned * (4 - held) + (num_nodes - num_owned) * held
        second = num_owned * (3 - 1) + (num_nodes - num_owned) * 1
        scores = 2 * num_owned * 2 + 2 * (num_nodes - num_owned)  # to both others, and gradients of the others' rows
        assert sent == 8 * (2 * first + 2 * second + 2 * scores)
        assert calls == 2 * (2 + 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [2, 3, 4])
@pytest.mark.parametrize(("name", "saved"), [("GCN", 0), ("GraphSAGE", 2), ("GIN", 2)])
def test_exchanges_grow_with_the_depth(name: str, saved: int, num_layers: int, tmp_path: Path, pool: RankPool) -> None:
    """Two for each hop and their backward; there is none at the features, unless weights come before the hop (GCN)."""
    ranks = pool.run(_traffic, 3, _store(tmp_path / "parts", 3), name, 6, num_layers)
    assert {calls for _, calls, _, _ in ranks} == {4 * num_layers - saved}


def _relations(rank: int, world_size: int, store: str) -> tuple[int, int, int, int]:
    shard, backend = Shard.load(store, rank), TensorBackend()
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    model = distribute(RGCNConv(5, 6, num_relations=2).double(), backend=backend, savings=PLAIN, check=False)
    meter, x = backend.communicator.meter, shard.x.clone().requires_grad_()
    for _ in range(2):
        meter.reset()
        model(x, shard.adjacency, shard.edge_type).sum().backward()
    return meter.read().sent_bytes, meter.read().calls, shard.num_owned, shard.num_nodes


def test_rows_that_several_relations_read_are_split_once(tmp_path: Path, pool: RankPool) -> None:
    for rank, (sent, calls, num_owned, num_nodes) in enumerate(pool.run(_relations, 3, _store(tmp_path / "parts", 3))):
        mine = columns_of(5, rank, 3)
        held = mine.stop - mine.start
        split, gather = num_owned * (5 - held), (num_nodes - num_owned) * held
        assert sent == 8 * (split + 2 * gather + 2 * split + gather)  # forward, and the same back
        assert calls == 2 * 3


def _loads(rank: int, world_size: int, store: str) -> dict[tuple[str, int], int]:
    """Edges times columns that this rank sums in a forward pass, by backend and width; counted where kernels begin."""
    shard, loads = Shard.load(store, rank), {}
    load = 0

    def counted(out: Tensor, csr: CSR, x: Tensor, *rest: Any, **options: Any) -> None:
        nonlocal load
        load += csr.num_entries * x[0].numel()
        spmm_into(out, csr, x, *rest, **options)

    def counted_too(csr: CSR, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        nonlocal load
        load += csr.num_entries * x[0].numel()
        return spmm(csr, x, *rest, **options)

    with contextlib.ExitStack() as stack:
        for module in ("slicing.sums", "fetching.adjacency"):
            stack.enter_context(mock.patch(f"pygdist.backends.{module}.spmm_into", counted))
        stack.enter_context(mock.patch("pygdist.graph.adjacency.spmm", counted_too))
        for name, width in itertools.product(["comm", "tensor"], [40, 41, 128]):
            backend = resolve_backend(name)
            backend.bind(shard, Communicator(dist.new_group()))
            layer = distribute(SimpleConv("sum"), backend=backend, savings=PLAIN, check=False)
            load = 0
            layer(torch.ones(shard.num_owned, width), shard.adjacency)
            loads[name, width] = load
            backend.unbind()
    return loads


def test_ranks_sum_as_much_as_each_other(tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph("power-law", num_nodes=4000)
    partition_graph(data, tmp_path / "parts", num_parts=4, partitioner="chunk")
    ranks = pool.run(_loads, 4, str(tmp_path / "parts"))
    for name, width in ranks[0]:
        loads = [found[name, width] for found in ranks]
        assert sum(loads) == width * data.num_edges
        if name == "comm":
            assert max(loads) > 1.3 * min(loads)
        elif width % 4 == 0:
            assert max(loads) < 1.05 * min(loads)
        else:
            assert max(loads) - min(loads) == data.num_edges, "a column more"


class Propagated(nn.Module):
    """A linear map, then one layer that keeps the width, so many times."""

    def __init__(self, layer: MessagePassing, times: int = 1, width: int = 2) -> None:
        super().__init__()
        self.lin, self.layer, self.times = nn.Linear(5, width), layer, times

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        for _ in range(self.times):
            x = self.layer(x, edge_index).tanh()
        return x


#: With two classes: of three ranks one has no column of them.
NARROW: dict[str, Callable[[], nn.Module]] = {
    "APPNP": lambda: Propagated(APPNP(K=3, alpha=0.2)),
    "APPNP-twice": lambda: Propagated(APPNP(K=3, alpha=0.2), times=2),
    "GAT": lambda: GAT(5, 6, num_layers=2, out_channels=2),
    "GAT-decoupled": lambda: decouple(GAT(5, 6, num_layers=2, out_channels=2)),
    "GIN-decoupled": lambda: decouple(GIN(5, 6, num_layers=2, out_channels=2, train_eps=True)),
    "LGConv": lambda: Propagated(LGConv()),
}
#: With numbers drawn in training, by each rank for itself or by all alike.
DROPPING: dict[str, Callable[[], nn.Module]] = {
    "APPNP-dropout": lambda: Propagated(APPNP(K=3, alpha=0.2, dropout=0.1), width=3),
    "GAT-dropout": lambda: GAT(5, 6, num_layers=2, out_channels=3, dropout=0.1),
    "GAT-decoupled-dropout": lambda: decouple(GAT(5, 6, num_layers=2, out_channels=3, dropout=0.1)),
}


def _dropout_by_value(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drops what one process would drop too: it is told by the numbers, not drawn."""
    mask = (x.detach() * 1e4).sin().abs() > p
    return x * mask / (1 - p) if training else x


def _train(rank: int, world_size: int, store: str, name: str) -> float:
    """Two epochs as in training, where DDP waits for each rank's gradient of every parameter; how far off they end."""
    drops = name in DROPPING
    data, _ = random_graph("empty-part", num_classes=3) if drops else random_graph("directed", num_classes=2)
    shard, backend = Shard.load(store, rank), TensorBackend()
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    plain = (DROPPING if drops else NARROW)[name]().double()
    model = distribute(copy.deepcopy(plain), backend=backend, check=False)
    trained = DistributedDataParallel(model, **DDP_OPTIONS)
    scale = ddp_loss_scale(int(data.train_mask.sum()), world_size)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    for layer in model.modules():
        if isinstance(layer, MessagePassing):
            acts_on_columns(layer)  # found out of what really draws
    with mock.patch("torch.nn.functional.dropout", _dropout_by_value):
        for _ in range(2):
            total, _ = summed_loss(trained(shard.x, shard.adjacency), shard.y, shard.train_mask)
            ours.zero_grad()
            (total * scale).backward()
            ours.step()
            theirs.zero_grad()
            functional.cross_entropy(
                plain(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask]
            ).backward()
            theirs.step()
    with torch.no_grad():
        pairs = [(model.eval()(shard.x, shard.adjacency), plain.eval()(data.x, data.edge_index)[shard.owned_id])]
    pairs += zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    return max(float((one - other).abs().max()) if one.numel() else 0.0 for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(NARROW))
def test_a_rank_without_columns_trains_with_the_others(name: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed", num_classes=2)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert max(pool.run(_train, 3, str(tmp_path / "parts"), name)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", list(DROPPING))
def test_a_rank_without_nodes_trains_with_dropout(name: str, world_size: int, tmp_path: Path, pool: RankPool) -> None:
    """With four ranks, the one without nodes has no column either."""
    store = _store(tmp_path / "parts", world_size, "empty-part")
    assert max(pool.run(_train, world_size, store, name)) < 1e-10


class Left(GCNConv):
    """A user's layer that leaves its forward to PyG's."""


def _left(rank: int, world_size: int, store: str) -> float:
    data, _ = random_graph("power-law")
    worst = 0.0
    for name in ("comm", "tensor"):
        torch.manual_seed(0)
        shard, backend, plain = Shard.load(store, rank), resolve_backend(name), nn.Sequential(Left(5, 3)).double()
        backend.bind(shard, Communicator(dist.new_group()))
        expected = plain[0](data.x, data.edge_index)[shard.owned_id]
        distribute(plain, backend=backend, check=False)
        worst = max(worst, float((plain[0](shard.x, shard.adjacency) - expected).abs().max()))
    return worst


def test_a_layer_that_leaves_forward_to_a_base_class_is_normalised_too(tmp_path: Path, pool: RankPool) -> None:
    assert max(pool.run(_left, 3, _store(tmp_path / "parts", 3))) < 1e-10


def _factors(rank: int, world_size: int, store: str) -> tuple[float, bool, int]:
    backend, shard = TensorBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    layer = distribute(GCNConv(5, 3), backend=backend, check=False)
    nodes = AllNodes(shard, backend.communicator)
    results = []
    for weight in (None, shard.edge_weight):
        edges, value = GlobalGCNNorm(backend)(shard.adjacency, weight, shard.num_owned, dtype=torch.float64)
        reader = EdgeReader(layer, "edge_weight", nodes.topology(edges, (layer, len(results))), "weights")
        results.append((edges, value, EdgeTensors(nodes).factors(reader, edges, value)))
    edges, value, factors = results[0]
    assert factors is not None
    csr = edges.csr()
    both = factors[nodes.positions[csr.index.long()]] * factors[nodes.positions[csr.row_index()]]
    worst = float((both.squeeze(1) - value).abs().max()) if value.numel() else 0.0
    return worst, results[1][2] is None, factors.size(0)


@pytest.mark.parametrize("kind", ["power-law", "empty-part", "isolated"])
def test_weights_of_gcn_are_products_of_factors_and_others_are_not(kind: str, tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph(kind)
    for worst, refused, size in pool.run(_factors, 3, _store(tmp_path / "parts", 3, kind)):
        assert worst < 1e-15
        assert refused
        assert size == data.num_nodes


class Gated(MessagePassing):
    """Neighbours' rows times attributes of edges, one number or one for each column."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """As wide as ``x``."""
        out: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return out

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        """The message of one edge."""
        return x_j * edge_attr


def _gated(rank: int, world_size: int, store: str, width: int) -> float:
    data, _ = random_graph("power-law")
    backend, shard = TensorBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    assert data.edge_weight is not None
    assert shard.edge_weight is not None
    expected = Gated()(data.x, data.edge_index, data.edge_weight[:, None].expand(-1, width))
    out = distribute(Gated(), backend=backend, check=False)(
        shard.x, shard.adjacency, shard.edge_weight[:, None].expand(-1, width).contiguous()
    )
    return float((out - expected[shard.owned_id]).abs().max())


@pytest.mark.parametrize("width", [1, 5])
def test_attributes_of_edges_are_cut_only_if_they_are_as_wide_as_rows(
    width: int, tmp_path: Path, pool: RankPool
) -> None:
    assert max(pool.run(_gated, 3, _store(tmp_path / "parts", 3), width)) < 1e-10


def test_attributes_of_another_width_are_refused(tmp_path: Path, pool: RankPool) -> None:
    with pytest.raises(RankError, match="'edge_attr' of propagate has 3 columns, the rows have 5"):
        pool.run(_gated_of_three, 2, _store(tmp_path / "parts", 2))


def _gated_of_three(rank: int, world_size: int, store: str) -> None:
    backend, shard = TensorBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    assert shard.edge_weight is not None
    distribute(Gated(), backend=backend, check=False)(
        shard.x, shard.adjacency, shard.edge_weight[:, None].expand(-1, 3)
    )


def _changing(rank: int, world_size: int, store: str, backend: str) -> None:
    """Weights that change without a gradient, on a rank that has none to see it by."""
    bound, shard = resolve_backend(backend), Shard.load(store, rank)
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    assert shard.edge_weight is not None
    model = distribute(GCN(5, 4, num_layers=2, out_channels=3).double(), backend=bound, check=False)
    for _ in range(3):
        model(shard.x, shard.adjacency, functional.dropout(shard.edge_weight, 0.5)).sum().backward()


@pytest.mark.parametrize("backend", ["comm", "tensor"])
def test_weights_that_change_where_a_rank_has_none(backend: str, tmp_path: Path, pool: RankPool) -> None:
    pool.run(_changing, 3, _store(tmp_path / "parts", 3, "empty-part"), backend)


def _evaluated(rank: int, world_size: int, store: str) -> list[int]:
    """Bytes that each pass sends: two evaluations, a step of training, an evaluation with other weights, a step."""
    backend, shard = TensorBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    layer = distribute(GraphConv(5, 3).double(), backend=backend, savings=PLAIN, check=False)
    meter, weight, sent = backend.communicator.meter, shard.edge_weight, []
    assert weight is not None
    for graded, values in ((False, weight), (False, weight), (True, weight), (False, 2 * weight), (True, weight)):
        meter.reset()
        with torch.set_grad_enabled(graded):
            layer(shard.x, shard.adjacency, values)
        sent.append(meter.read().sent_bytes)
    return sent


def test_weights_that_stay_the_same_travel_once_in_evaluation_too(tmp_path: Path, pool: RankPool) -> None:
    for first, again, training, others, last in pool.run(_evaluated, 3, _store(tmp_path / "parts", 3)):
        assert first > others > again == training == last, "the first one shares the edges, too"


def _single_precision(rank: int, world_size: int, store: str) -> float:
    data, _ = random_graph("power-law")
    backend, shard = TensorBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    layer = GCNConv(5, 3).double()
    expected = layer(data.x, data.edge_index, torch.ones(data.num_edges))
    assert shard.edge_weight is not None
    distribute(layer, backend=backend, check=False)
    out = layer(shard.x, shard.adjacency, torch.ones_like(shard.edge_weight, dtype=torch.float32))
    return float((out - expected[shard.owned_id]).abs().max())


def test_weights_in_single_precision_are_those_of_one_process(tmp_path: Path, pool: RankPool) -> None:
    assert max(pool.run(_single_precision, 2, _store(tmp_path / "parts", 2))) < 1e-10


def _cached(rank: int, world_size: int, store: str) -> float:
    data, _ = random_graph("power-law")
    backend, shard = TensorBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    layer = APPNP(K=3, alpha=0.1, dropout=0.5, cached=True)
    expected = copy.deepcopy(layer).eval()(data.x, data.edge_index)
    distribute(layer, backend=backend, check=False)
    layer.train()(shard.x, shard.adjacency)
    out = layer.eval()(shard.x, shard.adjacency)
    return float((out - expected[shard.owned_id]).abs().max())


def test_a_layer_that_keeps_its_edges_runs_alike_in_training_and_evaluation(tmp_path: Path, pool: RankPool) -> None:
    assert max(pool.run(_cached, 2, _store(tmp_path / "parts", 2))) < 1e-10
