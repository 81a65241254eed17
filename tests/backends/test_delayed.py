"""``delayed``: sums over the parts of split nodes are exact, send the bytes that they must, and refuse the rest."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, softmax

from pygdist import distribute
from pygdist.backends import DelayedBackend
from pygdist.backends.clones import dropout
from pygdist.backends.clones.dropout import keeps
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import EdgeGenerator, EdgeWriter, Shard, write_store
from pygdist.routing.refusals import refusals
from pygdist.testing import LAYERS, RankPool, assert_exact
from pygdist.testing.exactness import Step, distributed_step, largest_differences, reference_step
from pygdist.testing.graphs import GRAPHS, random_graph
from tests.backends.vertex_cuts import write_random_cut

HIDDEN, HEADS, CLASSES = 6, 2, 3


def _bound(store: str, rank: int, **arguments: Any) -> tuple[Shard, DelayedBackend]:
    shard, backend = Shard.load(store, rank), DelayedBackend(**arguments)
    backend.bind(shard, Communicator(dist.new_group()))
    return shard, backend


# -- exact -------------------------------------------------------------------------------------------------------------

EXACT = [
    *("GCNConv", "SAGEConv-mean", "SAGEConv-max", "SAGEConv-min", "SAGEConv-many", "GINConv", "GraphConv", "GATConv"),
    *("GATConv-edges", "GATv2Conv", "TransformerConv", "EdgeConv"),
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (2, 4))])
def test_exact_on_every_graph(world_size: int, pool: RankPool) -> None:
    assert_exact("delayed", layers=EXACT, world_sizes=[world_size], graphs=GRAPHS, num_layers=3, pool=pool)


def test_layers_that_cannot_be_exact_are_refused_by_name() -> None:
    refused = {
        name
        for name, case in LAYERS.items()
        if refusals(case.make(4, 4) if case.whole else nn.Sequential(case.make(4, 4)), DelayedBackend())
    }
    assert refused == {"ClusterGCNConv", "PNAConv", "SAGEConv-lstm", "SAGEConv-median", "SAGEConv-patches"}

    class Own(pyg.SimpleConv):
        def aggregate(self, inputs: Tensor, index: Tensor, **_: Any) -> Tensor:
            return torch.zeros(9, inputs.size(1)).index_add(0, index, inputs)

    with pytest.raises(InputError, match=r"'model' \(Own\): it has an 'aggregate' of its own"):
        distribute(Own(), backend=DelayedBackend())

    class Dropping(pyg.SimpleConv):
        def update(self, inputs: Tensor) -> Tensor:
            return nn.functional.dropout(inputs, 0.5, self.training)

    with pytest.raises(InputError, match="drops values of nodes in 'update'"):
        distribute(Dropping(), backend=DelayedBackend())
    with pytest.raises(InputError, match="MedianAggregation, which cannot be put together"):
        distribute(pyg.SAGEConv(4, 4, aggr="median"), backend=DelayedBackend())


def test_parts_of_nodes_are_refused(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "nodes", num_parts=2, method="test", arguments={}, notes=[])
    for said in pool.run(_check_placement, 2, str(tmp_path / "nodes")):
        assert "backend 'delayed' needs placement edges" in said


def _check_placement(rank: int, world_size: int, store: str) -> str:
    with pytest.raises(InputError) as caught:
        _bound(store, rank)
    return str(caught.value)


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "gib"),
    [(10**6, 10**7, 0.8), pytest.param(10**7, 10**8, 3.0, marks=pytest.mark.exhaustive)],
)
def test_store_of_a_large_graph_is_cut_in_little_memory(
    num_nodes: int, num_edges: int, gib: float, tmp_path: Path
) -> None:
    generator = EdgeGenerator(num_nodes, num_edges)
    with EdgeWriter(tmp_path / "edges.npy", np.int32) as writer:
        for start in range(0, num_edges, 1 << 22):
            writer.append(generator.read(start, min(start + (1 << 22), num_edges)))
    command = [sys.executable, "-m", "pygdist.cli", "partition", "--input=edges.npy", f"--num_nodes={num_nodes}"]
    options = ["--parts=8", "--placement=edges", "--out=parts"]
    done = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "parts" / "meta.json").read_text())
    assert sum(part["num_edges"] for part in meta["parts"]) == num_edges
    assert meta["peak_rss_bytes"] < gib * 2**30
    assert "nodes are split" in " ".join(done.stdout.split())


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "reads_targets"),
    [
        # sent forward and backward by each hop beside the first, which is kept: columns that go up, and down
        pytest.param("GCN", HIDDEN, False, id="sum"),
        pytest.param("SAGE", HIDDEN, False, id="mean"),
        pytest.param("EdgeConv", HIDDEN, True, id="messages that read their target"),
    ],
)
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_bytes_are_those_of_leaves(
    name: str, values: int, reads_targets: bool, wire_dtype: Any, tmp_path: Path, pool: RankPool
) -> None:
    store, size = write_random_cut(tmp_path, "power-law", 3), 2 if wire_dtype else 8
    answers = pool.run(_check_bytes, 3, store, name, wire_dtype)
    up, down, leaves = (sum(answer[kind] for answer in answers) for kind in ("up", "down", "leaves"))
    sent = sum(answer["sent"] for answer in answers)
    hops = answers[0]["hops"]
    assert up
    assert down
    assert leaves > down
    assert sent == hops * 2 * (up + (leaves if reads_targets else down)) * values * size


def _check_bytes(rank: int, world_size: int, store: str, name: str, wire_dtype: Any) -> dict[str, int]:
    """Count what the third of three training steps sends by hops."""
    shard, backend = _bound(store, rank, wire_dtype=wire_dtype)
    torch.manual_seed(0)
    if name == "EdgeConv":
        widths = [2 * shard.x.size(1), 2 * HIDDEN]
        layers = [pyg.EdgeConv(nn.Linear(width, HIDDEN), aggr="add") for width in widths]
        model: nn.Module = pyg.Sequential("x, e", [(layer, "x, e -> x") for layer in layers])
        hops = 2
    elif name == "GAT":
        widths = [shard.x.size(1), HIDDEN]
        layers = [pyg.GATConv(width, HIDDEN // HEADS, heads=HEADS) for width in widths]
        model = pyg.Sequential("x, e", [(layer, "x, e -> x") for layer in layers])
        hops = 2
    else:
        kind, _, aggr = name.partition("-")
        options = {"aggr": aggr} if aggr else {}
        model = {"GCN": pyg.GCN, "SAGE": pyg.GraphSAGE}[kind](shard.x.size(1), HIDDEN, 3, HIDDEN, **options)
        hops = 2  # what the first one sums is kept
    distribute(model.double(), backend=backend, check=False)
    meter = backend.communicator.meter
    for _ in range(3):
        meter.reset()
        model(shard.x, shard.adjacency).sum().backward()
    of_hops = meter.total.sent_bytes
    clones = shard.clones
    assert clones is not None
    backend.communicator.compare_calls()
    return {
        "up": clones.up.num_received, "down": clones.down.num_received, "leaves": shard.num_halo, "sent": of_hops,
        "hops": hops, "features": shard.x.size(1),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["SAGE-max", "GAT"])
def test_bytes_of_maxima_and_attention_are_those_of_leaves(name: str, tmp_path: Path, pool: RankPool) -> None:
    answers = pool.run(_check_bytes, 3, write_random_cut(tmp_path, "power-law", 3), name, None)
    up, down, leaves = (sum(answer[kind] for answer in answers) for kind in ("up", "down", "leaves"))
    first = 0
    if name == "SAGE-max":  # ties are counted, in int32; maxima of features are not kept, and have no gradient
        of_hop = 2 * (up + down) * HIDDEN * 8 + up * HIDDEN * 4
        first = (up + down) * answers[0]["features"] * 8 + up * answers[0]["features"] * 4
    else:  # the largest scores have no gradient; the sums of exponentials have one
        of_hop = 2 * (up + leaves) * HIDDEN * 8 + (2 + 4) * up * HEADS * 8
    assert sum(answer["sent"] for answer in answers) == first + answers[0]["hops"] * of_hop


# -- loops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("layer", ["GCNConv", "GATConv-edges", "ChebConv"])
def test_loops_count_once_whatever_the_number_of_parts(loops: bool, layer: str, tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph("directed")
    different = data.edge_index[0] != data.edge_index[1]
    data = data.edge_subgraph(different)
    if loops:
        edges, weights = add_self_loops(data.edge_index, data.edge_weight, 0.5, data.num_nodes)
        data.edge_index, data.edge_weight = edges, weights
        data.edge_attr = torch.cat([data.edge_attr, torch.ones(data.num_nodes, 4, dtype=data.x.dtype)])
        data.edge_type = torch.cat([data.edge_type, torch.zeros(data.num_nodes, dtype=torch.long)])
    model = LAYERS[layer].make(data.x.size(1), CLASSES).double()
    alone = copy.deepcopy(model)
    expected = reference_step(alone, data)
    for world_size in (2, 4):
        store = write_random_cut(tmp_path, "directed", world_size, data)
        for worst in pool.run(_check_loops, world_size, store, model, expected.output):
            assert worst < 1e-12


def _check_loops(rank: int, world_size: int, store: str, model: nn.Module, expected: Tensor) -> float:
    shard, backend = _bound(store, rank)
    step = distributed_step(distribute(model, backend=backend, check=False), shard, backend.communicator)
    return float((step.output - expected[shard.owned_id]).abs().max()) if shard.num_owned else 0.0


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_is_the_same_on_any_number_of_ranks(tmp_path: Path, pool: RankPool) -> None:
    losses = []
    for world_size in (1, 2, 4):
        store = write_random_cut(tmp_path, "power-law", world_size)
        losses.append(pool.run(_check_dropout, world_size, store))
    for found in losses:
        assert np.allclose(found, losses[0][0], rtol=0, atol=1e-10)
    assert len(set(losses[0][0])) == len(losses[0][0])  # other masks in each pass


def _check_dropout(rank: int, world_size: int, store: str) -> list[float]:
    """Return the losses of four training passes."""
    shard, backend = _bound(store, rank)
    torch.manual_seed(3)
    model = pyg.GAT(shard.x.size(1), HIDDEN, 2, CLASSES).double()
    torch.manual_seed(3 + rank)
    model.dropout.p = 0.5
    distribute(model, backend=backend)
    losses = []
    for _ in range(4):
        total = model(shard.x, shard.adjacency).square().sum()
        losses.append(float(backend.communicator.gather([float(total.detach())]).sum()))
        total.backward()
    return losses


def test_dropout_keeps_its_share_and_agrees_by_node() -> None:
    n_id = torch.tensor([*range(4000), 7, 3999])
    kept = keeps(n_id, 50, 0.3, seed=5, call=1)
    assert abs(float(kept.double().mean()) - 0.7) < 0.003
    assert float((kept[:-2].double().mean(0) - 0.7).abs().max()) < 0.035
    assert torch.equal(kept[-2:], kept[[7, 3999]])
    for other in (keeps(n_id, 50, 0.3, seed=6, call=1), keeps(n_id, 50, 0.3, seed=5, call=2)):
        assert 0.55 < float((kept == other).double().mean()) < 0.61  # 0.7 ** 2 + 0.3 ** 2


@pytest.mark.parametrize("p", [0.3, 0.999])
def test_dropout_is_the_same_without_the_native_library(p: float) -> None:
    n_id = torch.randint(2**40, (300,), generator=torch.Generator().manual_seed(0))
    kept = keeps(n_id, 33, p, seed=2**31 - 1, call=2)
    with mock.patch.object(dropout, "load", return_value=None):
        assert torch.equal(keeps(n_id, 33, p, seed=2**31 - 1, call=2), kept)


def test_numbers_drawn_for_nodes_are_refused(tmp_path: Path, pool: RankPool) -> None:
    store = write_random_cut(tmp_path, "power-law", 2)
    for said in pool.run(_check_drawn, 2, store):
        assert "the model draws random numbers outside of messages" in said
        assert "torch.nn.functional.dropout" in said


class Noisy(nn.Module):
    """Adds noise to the rows of nodes."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.layer: MessagePassing = pyg.SAGEConv(in_channels, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x + torch.randn_like(x) if self.training else x
        out: Tensor = self.layer(x, edge_index)
        return out


def _check_drawn(rank: int, world_size: int, store: str) -> str:
    shard, backend = _bound(store, rank)
    model = distribute(Noisy(shard.x.size(1)).double(), backend=backend, check=False)
    model.eval()
    model(shard.x, shard.adjacency)
    with pytest.raises(InputError) as caught:
        model.train()(shard.x, shard.adjacency)
    return str(caught.value)


# -- models as people write them ---------------------------------------------------------------------------------------


class Rooted(nn.Module):
    """Takes roots of sums, which exist for whole sums alone, and attends over edges that are no adjacency."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.first, self.loops = pyg.SimpleConv(aggr="sum"), pyg.GATConv(in_channels, HIDDEN)
        self.lin, self.second = nn.Linear(in_channels, in_channels), pyg.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = (self.first(self.lin(x), edge_index).abs() + 0.01).log()
        some = torch.stack(list(edge_index))
        out: Tensor = self.second(self.loops(x, some).tanh(), edge_index)
        return out


def test_logarithms_of_sums_and_edges_that_are_no_adjacency(tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph("power-law")
    torch.manual_seed(0)
    model = Rooted(data.x.size(1)).double()
    expected = reference_step(copy.deepcopy(model), data)
    for worst in pool.run(_check_step, 3, write_random_cut(tmp_path, "power-law", 3), model, expected):
        assert worst < 1e-10


def _check_step(rank: int, world_size: int, store: str, model: nn.Module, expected: Step) -> float:
    shard, backend = _bound(store, rank)
    step = distributed_step(distribute(model, backend=backend, check=False), shard, backend.communicator)
    return max(one.absolute for one in largest_differences(step, expected, shard.owned_id).values())


def test_features_that_change_and_their_gradient_reach_leaves(tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph("power-law")
    model = pyg.GCN(data.x.size(1), HIDDEN, 2, CLASSES).double()
    x = (data.x * 10).requires_grad_()
    out = copy.deepcopy(model)(x, data.edge_index)
    out.square().sum().backward()
    assert x.grad is not None
    answers = pool.run(_check_features, 3, write_random_cut(tmp_path, "power-law", 3), model, out.detach(), x.grad)
    assert max(map(max, answers)) < 1e-10


def _check_features(
    rank: int, world_size: int, store: str, model: nn.Module, expected: Tensor, gradient: Tensor
) -> tuple[float, float]:
    shard, backend = _bound(store, rank)
    distribute(model, backend=backend, check=False)
    model(shard.x, shard.adjacency)
    shard.x.mul_(10)
    shard.x.requires_grad_()
    out = model(shard.x, shard.adjacency)
    out.square().sum().backward()
    assert shard.x.grad is not None
    owned = shard.owned_id
    return float((out.detach() - expected[owned]).abs().max()), float((shard.x.grad - gradient[owned]).abs().max())


@pytest.mark.parametrize("one_rank", [False, True])
@pytest.mark.parametrize(
    "how", ["in place", "replaced", "assigned", "in place later", "unseen later", "assigned later"]
)
def test_features_that_change_after_loading_reach_leaves(
    how: str, one_rank: bool, tmp_path: Path, pool: RankPool
) -> None:
    data, parts = random_graph("power-law")
    model = pyg.GCN(data.x.size(1), HIDDEN, 2, CLASSES).double()
    changes = torch.from_numpy(parts[3] == 0) if one_rank else torch.ones(data.num_nodes, dtype=torch.bool)
    x = torch.where(changes[:, None], 2 * data.x, data.x)
    expected = copy.deepcopy(model)(x, data.edge_index).detach()
    store = write_random_cut(tmp_path, "power-law", 3)
    assert max(pool.run(_check_changed, 3, store, model, how, one_rank, expected)) < 1e-10


def _check_changed(
    rank: int, world_size: int, store: str, model: nn.Module, how: str, one_rank: bool, expected: Tensor
) -> float:
    shard, backend = Shard.load(store, rank), DelayedBackend()
    distribute(model, backend=backend, check=False)
    communicator, changes = Communicator(dist.new_group()), rank == 0 or not one_rank
    if how.endswith("later"):
        backend.bind(shard, communicator)
        model(shard.x, shard.adjacency)
    if changes and how.startswith("in place"):
        shard.x.mul_(2)
    elif changes and how.startswith("unseen"):
        shard.x.data.mul_(2)
    elif changes and how.startswith("assigned"):
        shard.x = shard.x * 2
    elif changes:
        shard = shard.replace(x=shard.x * 2)
    if not how.endswith("later"):
        backend.bind(shard, communicator)
    worst = 0.0
    for _ in range(2):
        out = model(shard.x, shard.adjacency).detach()
        worst = max(worst, float((out - expected[shard.owned_id]).abs().max()))
    return worst


class Scaled(nn.Module):
    """Multiplies by weights of classes, or of nodes."""

    def __init__(self, in_channels: int, *, of_nodes: bool) -> None:
        super().__init__()
        self.conv, self.of_nodes = pyg.GraphConv(in_channels, CLASSES), of_nodes

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = self.conv(x * weight[:, None], edge_index) if self.of_nodes else self.conv(x, edge_index) * weight
        return out


def test_arguments_of_one_model_say_nothing_of_those_of_another(tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph("power-law")
    models = [Scaled(data.x.size(1), of_nodes=of_nodes).double() for of_nodes in (False, True)]
    weights = [torch.rand(size).double() for size in (CLASSES, data.num_nodes)]
    pairs = zip(copy.deepcopy(models), weights, strict=True)
    expected = [model(data.x, data.edge_index, weight).detach() for model, weight in pairs]
    store = write_random_cut(tmp_path, "power-law", 2)
    assert max(pool.run(_check_two_models, 2, store, models, weights, expected)) < 1e-10


def _check_two_models(
    rank: int, world_size: int, store: str, models: list[Scaled], weights: list[Tensor], expected: list[Tensor]
) -> float:
    shard, backend = _bound(store, rank)
    worst = 0.0
    for model, weight, out in zip(models, weights, expected, strict=True):
        distribute(model, backend=backend, check=False)
        given = weight[shard.owned_id] if model.of_nodes else weight
        apart = model(shard.x, shard.adjacency, given) - out[shard.owned_id]
        worst = max(worst, float(apart.detach().abs().max()))
    return worst


def test_layers_that_run_again_in_the_backward_pass_are_refused(tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_check_again, 2, write_random_cut(tmp_path, "directed", 2)):
        assert "runs again in the backward pass (activation checkpointing)" in said


class Again(nn.Module):
    """Computes its layer once more in the backward pass."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(in_channels, HIDDEN), pyg.SAGEConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.second, self.first(x), edge_index, use_reentrant=False)
        return out


def _check_again(rank: int, world_size: int, store: str) -> str:
    shard, backend = _bound(store, rank)
    model = distribute(Again(shard.x.size(1)).double(), backend=backend, check=False)
    out = model(shard.x, shard.adjacency)
    with pytest.raises(InputError) as caught:
        out.sum().backward()
    return str(caught.value)


def test_attention_keeps_its_largest_scores_whole_on_a_narrow_wire(tmp_path: Path, pool: RankPool) -> None:
    """All in-edges of a node subtract the same number, so a shift of all scores changes nothing."""
    for shifted, bound in pool.run(_check_shift, 3, write_random_cut(tmp_path, "power-law", 3)):
        assert shifted < bound


class Shifted(MessagePassing):
    """Attention with scores that are shifted."""

    shift = 0.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor, index: Tensor, size_i: int | None) -> Tensor:
        return x_j * softmax(x_j[:, :1] + self.shift, index, num_nodes=size_i)


def _check_shift(rank: int, world_size: int, store: str) -> tuple[float, float]:
    shard, backend = _bound(store, rank, wire_dtype="bfloat16")
    model = distribute(Shifted(aggr="sum"), backend=backend, check=False)
    with torch.no_grad():
        plain = model(shard.x, shard.adjacency)
        model.shift = 300.3
        shifted = model(shard.x, shard.adjacency)
    return float((plain - shifted).abs().max()), 0.01 * float(plain.abs().max()) + 1e-3


def test_a_model_inside_of_another_is_refused(tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_check_nested, 2, write_random_cut(tmp_path, "directed", 2)):
        assert "is called inside of another one on it" in said


class Taught(nn.Module):
    """Calls another model in its forward pass."""

    def __init__(self, teacher: nn.Module, in_channels: int) -> None:
        super().__init__()
        self.teach, self.layer = [teacher], pyg.SAGEConv(in_channels, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.layer(x, edge_index) - self.teach[0](x, edge_index)
        return out


def _check_nested(rank: int, world_size: int, store: str) -> str:
    shard, backend = _bound(store, rank)
    teacher = distribute(pyg.GCN(shard.x.size(1), HIDDEN, 2, CLASSES).double(), backend=backend, check=False)
    model = distribute(Taught(teacher, shard.x.size(1)).double(), backend=backend, check=False)
    with pytest.raises(InputError) as caught:
        model(shard.x, shard.adjacency)
    model.teach = [lambda x, _: 0.0]
    model(shard.x, shard.adjacency)  # goes on
    return str(caught.value)
