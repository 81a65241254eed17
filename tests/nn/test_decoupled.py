"""Decoupled models: what they compute, and the same numbers on every backend."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, PNA, GCNConv, GraphSAGE, MessagePassing, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import add_remaining_self_loops, softmax, to_dense_adj

from pygdist.backends import TensorBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.native import load
from pygdist.nn.decoupled import Decoupled, decouple
from pygdist.nn.inputs import edge_inputs
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from tests.turns import by_turns

MODELS: dict[str, type[BasicGNN]] = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GIN": GIN, "GAT": GAT}


def _stack(name: str, num_layers: int = 2, **arguments: object) -> BasicGNN:
    torch.manual_seed(0)
    return MODELS[name](5, 6, num_layers=num_layers, out_channels=4, **arguments).double()


def _dense(edge_index: Tensor, num_nodes: int) -> Tensor:
    """In-edges by row."""
    return to_dense_adj(edge_index, max_num_nodes=num_nodes)[0].t().double()


def test_gcn_is_its_weights_and_powers_of_the_normalised_adjacency() -> None:
    data, _ = random_graph("directed")
    model, num_nodes = _stack("GCN", 3), data.num_nodes
    looped = add_remaining_self_loops(data.edge_index, num_nodes=num_nodes)[0]
    adjacency = _dense(looped, num_nodes)
    scale = adjacency.sum(1).pow(-0.5)
    x = data.x
    for number, conv in enumerate(model.convs):
        x = conv.lin(x) + conv.bias
        x = x.relu() if number < 2 else x
    expected = torch.linalg.matrix_power(scale[:, None] * adjacency * scale, 3) @ x
    assert torch.allclose(decouple(model)(data.x, data.edge_index), expected, rtol=0, atol=1e-12)


def test_the_others_too() -> None:
    data, _ = random_graph("directed")
    num_nodes = data.num_nodes
    plain = _dense(data.edge_index, num_nodes)
    looped = _dense(add_remaining_self_loops(data.edge_index, num_nodes=num_nodes)[0], num_nodes)

    sage = _stack("GraphSAGE")
    x = data.x
    for number, conv in enumerate(sage.convs):
        x = conv.lin_l(x) + conv.lin_r(x)
        x = x.relu() if number == 0 else x
    mean = looped / looped.sum(1, keepdim=True)
    assert torch.allclose(decouple(sage)(data.x, data.edge_index), mean @ mean @ x, rtol=0, atol=1e-12)

    gin = _stack("GIN", train_eps=True)
    x = data.x
    for number, conv in enumerate(gin.convs):
        conv.eps.data.fill_(0.3 * (number + 1))
        x = conv.nn(x)
        x = x.relu() if number == 0 else x
    for eps in (0.3, 0.6):
        x = plain @ x + (1 + eps) * x
    assert torch.allclose(decouple(gin)(data.x, data.edge_index), x, rtol=0, atol=1e-12)

    gat = _stack("GAT")
    first, last = gat.convs
    x = last.lin((first.lin(data.x) + first.bias).relu())
    source, target = add_remaining_self_loops(data.edge_index, num_nodes=num_nodes)[0]
    scores = (x * last.att_src[0, 0]).sum(1)[source] + (x * last.att_dst[0, 0]).sum(1)[target]
    weights = softmax(nn.functional.leaky_relu(scores, 0.2), target, num_nodes=num_nodes)
    nothing = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    attention = nothing.index_put((target, source), weights, accumulate=True)
    expected = attention @ attention @ x + last.bias
    assert torch.allclose(decouple(gat)(data.x, data.edge_index), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(MODELS))
def test_parameters_are_those_of_the_stack(name: str) -> None:
    model = _stack(name)
    made = decouple(model)
    theirs, ours = dict(model.named_parameters()), dict(made.named_parameters())
    assert ours
    assert all(theirs[key] is ours[key] for key in ours)
    copied = copy.deepcopy(made)
    assert dict(copied.named_parameters()).keys() == ours.keys()


class Own(GCNConv):
    """Sums something else."""

    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j.tanh()


def test_a_list_of_layers_is_the_model_of_them() -> None:
    model = _stack("GCN", 3, act="tanh", norm="batch_norm")
    data, _ = random_graph("power-law")
    convs, norms = list(model.convs), list(model.norms)
    first = [convs[0], norms[0], nn.Tanh(), nn.Dropout(0.5)]
    made = decouple([nn.Identity(), *first, convs[1], norms[1], nn.Tanh(), convs[2]]).eval()
    expected = decouple(model).eval()
    x = data.x.to(next(model.parameters()).dtype)
    torch.testing.assert_close(made(x, data.edge_index), expected(x, data.edge_index), rtol=0, atol=0)
    assert {name for name, _ in made.named_parameters()} >= {"convs.2.lin.weight", "before.1.0.module.weight"}
    assert {id(one) for one in made.parameters()} == {id(one) for one in expected.parameters()}


class Residual(GCN):
    """Does more than its layers."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = x + super().forward(x, edge_index)
        return out


def _hooked(model: BasicGNN) -> BasicGNN:
    model.convs[1].register_forward_hook(_doubled)
    return model


def _doubled(module: nn.Module, arguments: object, out: Tensor) -> Tensor:
    return 2 * out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            PNA(5, 6, 2, 4, aggregators=["mean"], scalers=["identity"], deg=torch.ones(3)),
            "cannot decouple PNAConv",
        ),
        (GCN(5, 6, 2, 4, jk="cat"), "jumping knowledge needs the rows of every layer"),
        (GCN(5, 6, 2, 4, normalize=False), "GCNConv with normalize=False is not supported"),
        (GCN(5, 6, 2, 4, aggr="max"), "GCNConv with aggr='max' is not supported"),
        (GIN(5, 6, 2, 4, flow="target_to_source"), "GINConv with flow='target_to_source' is not supported"),
        ([Own(5, 4)], "cannot decouple Own; all layers must be GCNConv"),
        ([GCNConv(5, 4), SAGEConv(4, 3)], "cannot decouple GCNConv, SAGEConv"),
        ([GCNConv(5, 4, improved=True), GCNConv(4, 3)], "all layers need the same improved and add_self_loops"),
        ([nn.ReLU()], "the list must end with a layer"),
        ([], "cannot decouple a model without layers"),
        (GraphSAGE(5, 6, 2, 4, aggr="max"), "SAGEConv with aggr='max' is not supported"),
        (GCN(5, 6, 2, 4, jk="last"), "jk='last' has a Linear after the last layer"),
        (Residual(5, 6, 2, 5), "Residual has its own forward, which the decoupled model would not run"),
        (_hooked(GCN(5, 6, 2, 4)), r"GCNConv has hooks \(forward_hooks\), which the decoupled model would not call"),
        ([nn.Sequential(GCNConv(5, 4), nn.ReLU()), GCNConv(4, 3)], "GCNConv is inside Sequential; pass one flat list"),
        ([GCNConv(5, 4), torch.relu, GCNConv(4, 3)], "expected a list of modules, got <built-in method relu"),
        (nn.Linear(5, 4), "expected PyG's GCN, GraphSAGE, GIN or GAT, or a list of layers, got Linear"),
    ],
)
def test_what_cannot_be_decoupled_is_refused_by_name(model: BasicGNN, said: str) -> None:
    with pytest.raises(InputError, match=said):
        decouple(model)


#: What the ranks run: PyG's model, its arguments, and whether the graph's edges have weights.
CASES: dict[str, tuple[str, dict[str, object], bool]] = {
    **{name: (name, {}, False) for name in MODELS},
    "GCN-weights": ("GCN", {}, True),
    "GIN-eps": ("GIN", {"train_eps": True}, False),
    "GAT-heads": ("GAT", {"heads": 2}, False),
}
#: With fewer weights of edges to share than scores of nodes.
BY_EDGE = {"GAT-few-edges": ("GAT", {"heads": 2}, False)}
#: With somebody who changes what each hop gives.
HOOKED = {"GCN-hooked": ("GCN", {}, False), "GAT-hooked": ("GAT", {}, False)}


def _case(case: str, num_layers: int, kind: str) -> tuple[Decoupled, Data, dict[int, np.ndarray]]:
    name, arguments, weighted = {**CASES, **BY_EDGE, **HOOKED}[case]
    model, (data, parts) = decouple(_stack(name, num_layers, **arguments)), random_graph(kind)
    if case in HOOKED:
        for layer in model.modules():
            if isinstance(layer, MessagePassing):
                layer.register_propagate_forward_hook(_doubled)
    if case == "GAT-few-edges":
        data.edge_index = data.edge_index[:, ::8]
    if not weighted:
        del data.edge_weight
    with torch.no_grad():
        for number, eps in enumerate(one for key, one in model.named_parameters() if key.endswith("eps")):
            eps.fill_(0.3 * (number + 1))
    return model, data, parts


class Traffic(NamedTuple):
    """Of one rank, in one epoch."""

    calls: int
    sent_bytes: int
    own: int
    every: int
    messages: int


def _step(
    rank: int,
    world_size: int,
    store: str,
    case: str,
    backend: str,
    num_layers: int,
    memory_gib: float | None,
    kind: str,
) -> tuple[float, Traffic]:
    plain, data, _ = _case(case, num_layers, kind)
    shard = Shard.load(store, rank)
    bound = resolve_backend(backend) if memory_gib is None else TensorBackend(memory_gib=memory_gib)
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    found = largest_differences(
        distributed_step(model, shard, bound.communicator), reference_step(plain, data), shard.owned_id
    )
    model.train()  # the step evaluated it last
    for _ in range(2):  # what stays the same travels in the first epoch
        bound.communicator.meter.reset()
        model(shard.x, shard.adjacency, **edge_inputs(model, shard)).sum().backward()
    meter = bound.communicator.meter.read()
    traffic = Traffic(meter.calls, meter.sent_bytes, shard.num_owned, shard.num_nodes, meter.sent_messages)
    return max(min(one.absolute, one.relative) for one in found.values()), traffic


def _run(
    case: str,
    backend: str,
    num_layers: int,
    world_size: int,
    folder: Path,
    pool: RankPool,
    memory_gib: float | None = None,
    kind: str = "power-law",
) -> tuple[float, list[Traffic]]:
    _, data, parts = _case(case, num_layers, kind)
    write_store(data, parts[world_size], folder, num_parts=world_size, method="x", arguments={}, notes=[])
    found = pool.run(_step, world_size, str(folder), case, backend, num_layers, memory_gib, kind)
    return max(difference for difference, _ in found), [traffic for _, traffic in found]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), by_turns(3, list(CASES), ["comm", "tensor", "cache", "hybrid", "single"]))
def test_every_backend_gives_the_same_numbers(case: str, backend: str, tmp_path: Path, pool: RankPool) -> None:
    if backend == "hybrid" and load() is None:
        pytest.skip("hybrid plans in the native library")
    difference, _ = _run(case, backend, 2, 1 if backend == "single" else 3, tmp_path / "parts", pool)
    assert difference < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend"), by_turns(2, ["directed", "empty-part", "isolated"], ["comm", "tensor"]))
def test_deeper_models_on_other_graphs(kind: str, backend: str, tmp_path: Path, pool: RankPool) -> None:
    for case in ("GCN", "GraphSAGE", "GIN-eps", "GAT-heads"):
        assert _run(case, backend, 3, 3, tmp_path / case, pool, kind=kind)[0] < 1e-10, case


@pytest.mark.slow
@pytest.mark.parametrize("case", list(HOOKED))
def test_hooks_on_hops_are_called(case: str, tmp_path: Path, pool: RankPool) -> None:
    difference, _ = _run(case, "tensor", 2, 3, tmp_path / "parts", pool)
    assert difference < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_layers"), by_turns(2, ["GCN", "GraphSAGE", "GIN", "GAT", "GAT-heads"], [1, 2, 3, 4])
)
def test_four_exchanges_whatever_the_depth(case: str, num_layers: int, tmp_path: Path, pool: RankPool) -> None:
    """Each of the bytes that the paper has: rows as wide as the output to slices, and back; the gradients once more.

    Of ``GAT`` every node's scores as well, one for each end of an edge and head: to both other ranks, with the rows,
    and from every other rank their gradients.
    """
    difference, ranks = _run(case, "tensor", num_layers, 3, tmp_path / "parts", pool)
    assert difference < 1e-10
    assert {one.calls for one in ranks} == {4}
    heads = {"GAT": 1, "GAT-heads": 2}.get(case, 0)
    for (_, sent, own, every, _), held in zip(ranks, (2, 1, 1), strict=True):  # of 4 columns
        rows = 2 * (own * (4 - held) + (every - own) * held) * max(heads, 1)
        assert sent == 8 * (rows + 2 * heads * (2 * own + every - own))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GCN", "GCN-weights", "GraphSAGE", "GIN", "GIN-eps"])
def test_as_many_exchanges_in_little_memory(case: str, tmp_path: Path, pool: RankPool) -> None:
    """Sums of all rounds stay slices, chunk by chunk; so do a node's own rows, whose factors may be learned."""
    difference, ranks = _run(case, "tensor", 3, 3, tmp_path / "parts", pool, memory_gib=6 / 2**20)
    assert difference < 1e-10
    assert {one.calls for one in ranks} == {4}
    assert all(one.messages > 2 * 4 for one in ranks)  # to two others in several chunks
    for (_, sent, own, every, _), held in zip(ranks, (2, 1, 1), strict=True):
        assert sent == 8 * 2 * (own * (4 - held) + (every - own) * held)


@pytest.mark.parametrize("case", list(BY_EDGE))
def test_weights_of_attention_travel_along_where_they_are_fewer(case: str, tmp_path: Path, pool: RankPool) -> None:
    """One exchange more each way: scores of sources are fetched to compute them."""
    difference, found = _run(case, "tensor", 2, 3, tmp_path / "parts", pool)
    assert {traffic.calls for traffic in found} == {6}
    assert difference < 1e-10
