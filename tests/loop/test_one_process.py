"""``accelerate``: one process, the caller's own calls and order of edges, and the same numbers as PyG's."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import (
    GAE,
    GAT,
    GCN,
    MLP,
    DirGNNConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphSAGE,
    GraphUNet,
    MessagePassing,
    SAGEConv,
    SimpleConv,
    SuperGATConv,
    TransformerConv,
)
from torch_geometric.utils import degree, to_torch_csr_tensor

from pygdist import InputError, accelerate, undistribute
from pygdist.loop import one_process
from pygdist.testing import LAYERS, random_graph
from pygdist.testing.exactness import largest_differences, reference_step
from pygdist.testing.layers import build


@pytest.fixture
def data() -> Data:
    """A directed graph whose edges are in no order."""
    graph = random_graph("directed")[0].clone()
    return _ordered(graph, torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0)))


def _ordered(graph: Data, order: Tensor) -> Data:
    graph = graph.clone()
    for name in ("edge_index", "edge_weight", "edge_attr", "edge_type"):
        if graph.get(name) is not None:
            graph[name] = graph[name].index_select(1 if name == "edge_index" else 0, order)
    return graph


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_of_every_layer_equals_pygs(name: str, data: Data) -> None:
    in_order = _ordered(data, data.edge_index[1].argsort(stable=True))  # which some layers of PyG need
    expected = reference_step(build(name, 5, 3), in_order)
    with mock.patch.object(one_process, "with_own_classes", wraps=one_process.with_own_classes) as runs_in_pyg:
        found = reference_step(accelerate(build(name, 5, 3), data), data)
    assert not runs_in_pyg.called
    assert max(one.absolute for one in largest_differences(found, expected).values()) < 1e-10


class _ByRows(GCNConv):
    """As a layer of PyG's that names values of edges as no other does."""

    def forward(self, x: Tensor, edge_index: Tensor, distances: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, edge_index, distances)
        return out


def test_values_by_names_that_are_not_known_run_in_pyg(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (_ByRows, _ByRows.forward):
        monkeypatch.setattr(one, "__module__", GCNConv.__module__)
    layer = _ByRows(data.num_features, 4).double()
    with pytest.warns(UserWarning, match="_ByRows runs as in plain PyG, no faster: it gets distances, and nothing"):
        _compare(layer, data, (data.x, data.edge_index, torch.rand(data.num_edges).double()))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_on_a_gpu_equals_pygs_on_the_host(name: str, data: Data) -> None:
    in_order = _ordered(data, data.edge_index[1].argsort(stable=True))
    expected = reference_step(build(name, 5, 3), in_order)
    on_gpu = data.clone().to("cuda")
    found = reference_step(accelerate(build(name, 5, 3).cuda(), on_gpu), on_gpu)
    error = 1e-6 if name == "LabelPropagation" else 1e-10  # its labels are float32
    assert max(one.absolute for one in largest_differences(found, expected).values()) < error


class _WithWeights(nn.Module):
    """Its weights are in the caller's order of edges, which nobody but the model knows."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.conv, self.weight = GCNConv(data.num_features, 4).double(), nn.Parameter(torch.rand(data.num_edges))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, self.weight.double())
        return out


class _OfGlobal(nn.Module):
    """Reads the weights of the script's graph by name."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.conv = GCNConv(data.num_features, 4).double()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, GLOBAL.edge_weight)
        return out


class _Layer(MessagePassing):
    """A layer of the user's that reads values of edges by name, and keeps its messages."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__(aggr="add")
        self.reads = reads

    def forward(self, x: Tensor, edge_index: Tensor, scale: Tensor | None = None) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, scale=scale)
        return out

    def message(self, x_i: Tensor, x_j: Tensor, scale: Tensor | None) -> Tensor:
        self.difference = x_i - x_j
        return self.difference if scale is None else self.difference * scale.view(-1, 1)


class _Reading(_Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * GLOBAL.edge_weight.view(-1, 1)


class _Scores(nn.Module):
    """Scores pairs of nodes, with a value for each pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = GCNConv(width, 4).double()

    def forward(self, x: Tensor, edge_index: Tensor, edge_label_index: Tensor, factor: Tensor) -> Tensor:
        z = self.conv(x, edge_index)
        return factor * (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=1)


GLOBAL = Data()


def _compare(model: nn.Module, data: Data, *calls: tuple[Any, ...], atol: float = 1e-12) -> None:
    """Compare the outputs of calls before and after ``accelerate``."""
    expected = [model(*call) for call in calls]
    accelerate(model, data)
    for call, one in zip(calls, expected, strict=True):
        found = model(*call)
        assert found.shape == one.shape
        assert torch.allclose(found, one, rtol=0, atol=atol)


@pytest.mark.parametrize("make", [_WithWeights, _OfGlobal, lambda _: _Reading()], ids=["held", "global", "in a layer"])
def test_values_of_edges_that_only_the_model_knows(
    make: Callable[[Data], nn.Module], data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", data)
    _compare(make(data), data, (data.x, data.edge_index))


@pytest.mark.filterwarnings("ignore:accelerate. these layers run")
def test_values_of_edges_where_edges_are_as_many_as_nodes(data: Data) -> None:
    data.edge_index = data.edge_index[:, : data.num_nodes]
    weight = torch.rand(data.num_nodes, dtype=torch.float64)
    _compare(GCNConv(data.num_features, 3).double(), data, (data.x, data.edge_index, weight))
    _compare(_Layer(), data, (data.x, data.edge_index, torch.rand(data.num_nodes)))


def test_as_many_pairs_as_edges_stay_in_their_order(data: Data) -> None:
    """As ``RandomLinkSplit`` makes for an undirected graph: an edge of both directions, and a pair that is none."""
    others = torch.randint(data.num_nodes, data.edge_index.shape)
    shuffled = data.edge_index[:, torch.randperm(data.num_edges)]
    factor = torch.rand(data.num_edges, dtype=torch.float64)
    _compare(
        _Scores(data.num_features), data, *((data.x, data.edge_index, one, factor) for one in (others, shuffled)),
        (data.x, data.edge_index, data.edge_index, factor),
    )  # fmt: skip


class _Remembering(_Layer):
    """Computes values of edges once, and changes others with each call."""

    norm: Tensor | None = None
    memory: Tensor | float = 0.0

    def forward(self, x: Tensor, edge_index: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.norm is None:
            self.norm = 1 / (1 + degree(edge_index[0], len(x), dtype=x.dtype)[edge_index[0]])
        self.memory = self.memory + self.norm
        out: Tensor = self.propagate(edge_index, x=x, scale=self.memory)
        return out


class _Encoder(_Layer):
    """A layer that is a model, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = GCNConv(width, 4).double()

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:  # type: ignore[override]
        z = self.conv(x, edge_index)
        return (z[pairs[0]] * z[pairs[1]]).sum(dim=1)


@pytest.mark.filterwarnings("ignore:accelerate. these layers run")
def test_layers_of_ones_own_see_the_callers_order(data: Data) -> None:
    layer = _Remembering()
    twin = copy.deepcopy(layer)
    accelerate(layer, data)
    for _ in range(3):
        assert torch.equal(layer(data.x, data.edge_index), twin(data.x, data.edge_index))
        assert torch.equal(layer.difference, twin.difference)
    model = _Encoder(data.num_features)
    _compare(model, data, (data.x, data.edge_index, torch.randint(data.num_nodes, data.edge_index.shape)))
    assert type(model.conv).__name__ == "DistributedGCNConv"


class _Shift(nn.Module):
    """Has a value for each edge."""

    def __init__(self, num_edges: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(num_edges, 1, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.shift


def _reversed(self: MessagePassing, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
    return x_j * torch.arange(len(x_j)).view(-1, 1)


@pytest.mark.filterwarnings("ignore:accelerate. these layers run")
@pytest.mark.parametrize("kind", ["inside", "set on the layer", "hook inside"])
def test_code_of_the_users_inside_of_a_layer_sees_the_callers_order(kind: str, data: Data) -> None:
    seen = list[Tensor]()
    layer: Any = SimpleConv() if kind == "set on the layer" else EdgeConv(_Shift(data.num_edges))
    if kind == "set on the layer":
        layer.message = types.MethodType(_reversed, layer)
    elif kind == "hook inside":
        layer = EdgeConv(nn.Linear(2 * data.num_features, 3).double())
        layer.nn.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    _compare(layer, data, (data.x, data.edge_index))
    assert not seen or torch.equal(*seen)


def test_attention_of_as_many_edges_as_nodes(data: Data) -> None:
    data.edge_index = data.edge_index[:, : data.num_nodes]
    layer: Any = GATConv(data.num_features, 3, add_self_loops=False).double()
    _, (_, expected) = layer(data.x, data.edge_index, return_attention_weights=True)
    accelerate(layer, data)
    _, (edges, alpha) = layer(data.x, data.edge_index, return_attention_weights=True)
    assert edges is data.edge_index
    assert torch.allclose(alpha, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("edges", "words"),
    [
        ([[35], [0]], "ids from 0 to 35, but data has 3 nodes"),
        ([[-1], [0]], "ids from -1"),
        ([[0, 1, 2]], r"\(1, 3\)"),
    ],
)
def test_edges_that_lead_nowhere_are_refused(edges: list[list[int]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        accelerate(GCN(2, 3, num_layers=1), Data(x=torch.ones(3, 2), edge_index=torch.tensor(edges)))


def test_calls_with_other_numbers_of_rows_are_pygs(data: Data) -> None:
    layer, rows = SAGEConv((data.num_features, data.num_features), 3).double(), data.num_nodes
    half = data.edge_index[1] < rows // 2
    data.edge_index = data.edge_index[:, half]
    more = torch.cat([data.x, data.x])
    calls = [((data.x, data.x[: rows // 2]), data.edge_index), ((data.x, None), data.edge_index, (rows, rows // 2))]
    _compare(layer, data, *calls, ((data.x, data.x), data.edge_index), (more, data.edge_index))


@pytest.mark.parametrize("name", ["SAGEConv-mean", "SAGEConv-max", "GCNConv", "GATConv", "GINConv"])
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_edges_as_an_edge_index_of_pyg(name: str, sort_order: str | None, data: Data) -> None:
    model, rows = build(name, 5, 3), data.num_nodes
    expected = model(data.x, data.edge_index)
    edges = EdgeIndex(data.edge_index, sparse_size=(rows, rows))
    data.edge_index = edges if sort_order is None else edges.sort_by(sort_order).values
    found = accelerate(model, data)(data.x, data.edge_index)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


class _OfData(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gcn = GCN(width, 8, num_layers=2, out_channels=3).double()

    def forward(self, data: Data) -> Tensor:
        out: Tensor = self.gcn(data.x, data.edge_index, edge_weight=data.edge_weight)
        return out


def test_models_that_take_the_whole_data(data: Data) -> None:
    model = _OfData(data.num_features)
    expected = model(data)
    assert torch.allclose(accelerate(model, data)(data), expected, rtol=0, atol=1e-12)


def test_attention_comes_back_in_the_callers_order(data: Data) -> None:
    layer = GATConv(data.num_features, 4, heads=2, add_self_loops=False).double()
    out, (edges, alpha) = layer(data.x, data.edge_index, return_attention_weights=True)
    accelerate(layer, data)
    found, (found_edges, found_alpha) = layer(data.x, data.edge_index, return_attention_weights=True)
    assert torch.allclose(found, out, rtol=0, atol=1e-12)
    assert found_edges is data.edge_index
    assert torch.equal(edges, data.edge_index)
    assert torch.allclose(found_alpha, alpha, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
def test_attention_with_loops_comes_back_in_the_order_of_pyg(layer: type[MessagePassing], data: Data) -> None:
    for graph in (data, _ordered(data, data.edge_index[1].argsort(stable=True))):
        one: Any = layer(graph.num_features, 4, heads=2).double()
        expected, (edges, alpha) = one(graph.x, graph.edge_index, return_attention_weights=True)
        accelerate(one, graph)
        found, (found_edges, found_alpha) = one(graph.x, graph.edge_index, return_attention_weights=True)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        assert torch.equal(found_edges, edges)
        assert type(found_edges) is Tensor
        assert torch.allclose(found_alpha, alpha, rtol=0, atol=1e-12)


def test_values_of_edges_that_are_learned(data: Data) -> None:
    weight = torch.rand(data.num_edges, dtype=torch.float64, requires_grad=True)
    model = GCN(data.num_features, 8, num_layers=2, out_channels=3).double()
    gradients = []
    for accelerated in (False, True):
        if accelerated:
            accelerate(model, data)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(model(data.x, data.edge_index, weight.sigmoid()).sum(), weight)
        gradients.append(gradient)
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


def test_weights_that_change_in_place_are_sorted_again(data: Data) -> None:
    model, weight = GCN(data.num_features, 3, num_layers=1).double(), torch.rand(data.num_edges, dtype=torch.float64)
    twin = GCN(data.num_features, 3, num_layers=1).double()
    twin.load_state_dict(model.state_dict())
    accelerate(model, data)
    for _ in range(2):
        assert torch.allclose(model(data.x, data.edge_index, weight), twin(data.x, data.edge_index, weight), atol=1e-12)
        weight += 1


def test_training_repeats_pygs(data: Data) -> None:
    losses = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model = GCN(data.num_features, 8, num_layers=2, out_channels=int(data.y.max()) + 1, norm="batch_norm").double()
        if accelerated:
            accelerate(model, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-10)


def test_it_is_undone(data: Data) -> None:
    model = GCN(data.num_features, 8, num_layers=2, out_channels=3).double()
    kinds, keys = [type(one) for one in model.modules()], list(model.state_dict())
    accelerate(model, data)
    assert list(model.state_dict()) == keys
    undistribute(model)
    assert [type(one) for one in model.modules()] == kinds
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    few = data.edge_index[:, :7]  # PyG's again, which takes any edges
    assert model(data.x, few).shape == (data.num_nodes, 3)


def test_layers_on_other_edges_run_as_in_pyg(data: Data) -> None:
    few = data.subgraph(torch.arange(data.num_nodes // 2))
    turned = data.edge_index.flip(0)
    calls = [(data.x, data.edge_index), (data.x, data.edge_index.clone()), (data.x, data.edge_index[:, :7])]
    calls += [(data.x, turned), (few.x, few.edge_index)]
    with pytest.warns(
        UserWarning, match="GCNConv runs as in plain PyG, no faster: its edges are not those for which"
    ) as told:
        _compare(GCN(data.num_features, 3, num_layers=2).double(), data, *calls)
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore:GCNConv runs as in plain PyG")
def test_a_layer_that_caches_its_edges_is_pygs_or_refused(data: Data) -> None:
    layer = GCNConv(data.num_features, 3, cached=True).double()
    twin = copy.deepcopy(layer)
    accelerate(layer, data)
    for edges in (data.edge_index[:, :7], data.edge_index):  # PyG keeps the first
        assert torch.equal(layer(data.x, edges), twin(data.x, edges))
    undistribute(layer)
    twin.reset_parameters()
    twin.load_state_dict(layer.state_dict())
    accelerate(layer, data)
    assert torch.allclose(layer(data.x, data.edge_index), twin(data.x, data.edge_index), rtol=0, atol=1e-12)
    with pytest.raises(
        InputError, match=r"GCNConv has cached=True and ran on data.edge_index: PyG would ignore the other"
    ):
        layer(data.x, data.edge_index[:, :7])


def test_a_layer_keeps_the_weights_that_it_has_cached(data: Data) -> None:
    layer = GCNConv(data.num_features, 3, cached=True).double()
    twin = copy.deepcopy(layer)
    accelerate(layer, data)
    for weight in (data.edge_weight.double(), data.edge_weight.double().square(), None):  # PyG keeps the first
        found, expected = (one(data.x, data.edge_index, weight) for one in (layer, twin))
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("write", [lambda one: one.numpy(), lambda one: one.data], ids=["NumPy", "data"])
@pytest.mark.parametrize("name", ["x", "edge_index", "edge_weight"])
def test_writes_that_torch_does_not_count(name: str, write: Callable[[Tensor], Any], data: Data) -> None:
    data.edge_weight = data.edge_weight.double()
    layer = GCNConv(data.num_features, 3).double()
    twin = copy.deepcopy(layer)
    accelerate(layer, data)
    for _ in range(3):
        found, expected = (one(data.x, data.edge_index, data.edge_weight) for one in (layer, twin))
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        write(data[name])[:] = write(data[name].flip(-1).clone())


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_transformations_of_torch_are_those_of_pyg(name: str, data: Data) -> None:
    models = {"GCN": GCN, "GraphSAGE": GraphSAGE, "GAT": GAT}
    model = models[name](data.num_features, 4, num_layers=2, out_channels=3).double()
    parameters, tangent = dict(model.named_parameters()), torch.ones_like(data.x)

    def found() -> list[Tensor]:
        out = list(torch.func.jvp(lambda x: model(x, data.edge_index), (data.x,), (tangent,)))
        with torch.autograd.forward_ad.dual_level():
            dual = model(torch.autograd.forward_ad.make_dual(data.x, tangent), data.edge_index)
            out += torch.autograd.forward_ad.unpack_dual(dual)
        gradients = torch.func.grad(
            lambda values: torch.func.functional_call(model, values, (data.x, data.edge_index)).square().sum()
        )
        exported = torch.export.export(model, (data.x, data.edge_index), strict=False).module()
        return [*out, *gradients(parameters).values(), exported(data.x, data.edge_index)]

    expected = found()
    accelerate(model, data)
    torch.testing.assert_close(found(), expected, rtol=0, atol=1e-12)


def test_attention_of_no_edges_has_no_weights(data: Data) -> None:
    empty = Data(x=data.x, edge_index=data.edge_index[:, :0])
    layer = TransformerConv(data.num_features, 4, heads=2).double()
    expected = layer(empty.x, empty.edge_index, return_attention_weights=True)
    accelerate(layer, empty)
    out, (edges, weights) = layer(empty.x, empty.edge_index, return_attention_weights=True)
    assert weights.shape == expected[1][1].shape == (0, 2)
    assert edges.shape == (2, 0)
    assert torch.allclose(out, expected[0], rtol=0, atol=1e-12)


def test_threads_take_turns(data: Data) -> None:
    model = accelerate(GCN(data.num_features, 8, num_layers=2).double(), data)
    with torch.no_grad(), ThreadPoolExecutor(4) as threads:
        expected = model(data.x, data.edge_index)
        calls = [threads.submit(torch.no_grad()(model), data.x, data.edge_index) for _ in range(200)]
        assert all(torch.equal(one.result(), expected) for one in calls)


def test_a_sparse_adjacency_runs_as_in_pyg(data: Data) -> None:
    adjacency = to_torch_csr_tensor(data.edge_index.flip(0), size=(data.num_nodes, data.num_nodes)).double()
    with pytest.warns(UserWarning, match=r"call the model with data.edge_index, not with a sparse adjacency"):
        _compare(GCN(data.num_features, 3, num_layers=2).double(), data, (data.x, adjacency))


@pytest.mark.filterwarnings("ignore:GCNConv runs as in plain PyG")
def test_edges_that_change_after_the_call(data: Data) -> None:
    model = GCN(data.num_features, 3, num_layers=1).double()
    twin = copy.deepcopy(model)
    accelerate(model, data)
    model(data.x, data.edge_index)
    for change in range(2):
        if change:
            data.edge_index = data.edge_index[:, :7]
        else:
            data.edge_index[0, 0] = 1 - data.edge_index[0, 0].clamp(max=1)
        found = model(data.x, data.edge_index)
        assert torch.allclose(found, twin(data.x, data.edge_index), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:accelerate. these layers run")
@pytest.mark.filterwarnings("ignore:GCNConv runs as in plain PyG")
@pytest.mark.parametrize("make", [
    lambda width: SuperGATConv(width, 3),
    lambda width: DirGNNConv(GCNConv(width, 3)),
    lambda width: GraphUNet(width, 4, 3, depth=2),
    lambda width: nn.ModuleList([MLP([width, 4]), GCNConv(4, 3)]),
], ids=["SuperGATConv", "DirGNNConv", "GraphUNet", "statistics"])  # fmt: skip
def test_what_cannot_be_distributed_runs_on_one_process(make: Callable[[int], nn.Module], data: Data) -> None:
    model = make(data.num_features).double().eval()
    if isinstance(model, nn.ModuleList):
        model = _Whitened(*model)
    _compare(model, data, (data.x, data.edge_index))


class _Whitened(nn.Module):
    def __init__(self, mlp: nn.Module, conv: nn.Module) -> None:
        super().__init__()
        self.mlp, self.conv = mlp, conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.mlp((x - x.mean(dim=0)) / (x.std(dim=0) + 1))
        out: Tensor = self.conv(h, edge_index)
        return out


def test_copies_and_pickles_of_a_model(data: Data) -> None:
    model = accelerate(GCN(data.num_features, 3, num_layers=2).double(), data)
    expected = model(data.x, data.edge_index)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(data.x, data.edge_index), expected)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    assert torch.equal(twin(data.x, data.edge_index), expected)
    file = io.BytesIO()
    torch.save(twin, file)
    size = file.getbuffer().nbytes
    assert size < 50_000, "the graph travels with the model"
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(data.x, data.edge_index), expected)


def test_a_model_of_another_process_runs_as_in_pyg(data: Data, tmp_path: Path) -> None:
    model = accelerate(GCN(data.num_features, 3, num_layers=1).double(), data)
    torch.save((model, data, model(data.x, data.edge_index).detach()), tmp_path / "model.pt")
    code = (
        "import sys, torch; model, data, expected = torch.load(sys.argv[1], weights_only=False); "
        "print(torch.allclose(model(data.x, data.edge_index), expected, rtol=0, atol=1e-12))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_explanations_are_those_of_pyg(data: Data) -> None:
    model = GCN(data.num_features, 3, num_layers=2).double().eval()

    def weights() -> Tensor:
        torch.manual_seed(0)
        explainer = Explainer(
            model, algorithm=GNNExplainer(epochs=3), explanation_type="model", edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )  # fmt: skip
        mask: Tensor = explainer(data.x, data.edge_index, index=0).edge_mask
        return mask

    expected = weights()
    accelerate(model, data)
    assert torch.allclose(weights(), expected, atol=1e-6)


def test_hooks_on_messages_see_them_in_the_callers_order(data: Data) -> None:
    layer, seen = GCNConv(data.num_features, 3).double(), list[Tensor]()
    layer.register_message_forward_hook(lambda _, __, out: seen.append(out.detach()))
    layer(data.x, data.edge_index)
    accelerate(layer, data)(data.x, data.edge_index)
    assert torch.equal(*seen)


def test_hops_past_a_layers_forward(data: Data) -> None:
    layer = _Layer()
    few = data.subgraph(torch.arange(data.num_nodes // 2))
    expected = [layer.propagate(one.edge_index, x=one.x, scale=None) for one in (data, few)]
    accelerate(layer, data)
    for one, rows in zip((data, few), expected, strict=True):
        assert torch.allclose(layer.propagate(one.edge_index, x=one.x, scale=None), rows, rtol=0, atol=1e-12)


def test_a_part_of_a_model(data: Data) -> None:
    model = GAE(GCN(data.num_features, 3, num_layers=1).double())
    expected = model.encode(data.x, data.edge_index)
    accelerate(model.encoder, data)
    found = model.encode(data.x, data.edge_index)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert torch.allclose(model.decode(found, data.edge_index), model.decode(expected, data.edge_index), atol=1e-12)


def test_calls_past_forward_are_pygs(data: Data) -> None:
    model = GAE(GCN(data.num_features, 3, num_layers=1).double())
    expected = model.encode(data.x, data.edge_index)
    assert torch.allclose(accelerate(model, data).encode(data.x, data.edge_index), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("graph", [HeteroData(), Data(x=torch.ones(3, 2)), torch.zeros(2, 3).long()])
def test_what_is_no_graph_is_refused(graph: object) -> None:
    model = GCN(2, 3, num_layers=1)
    with pytest.raises(InputError, match=r"takes a torch_geometric.data.Data with an edge_index"):
        accelerate(model, graph)  # type: ignore[arg-type]
    assert not model._forward_pre_hooks


def test_a_graph_with_adj_t_alone_is_refused_by_name() -> None:
    graph = Data(x=torch.ones(3, 2), adj_t=torch.eye(3).to_sparse_csr())
    with pytest.raises(InputError, match=r"data has adj_t and no edge_index; make data without ToSparseTensor"):
        accelerate(GCN(2, 3, num_layers=1), graph)


def test_pythons_random_numbers_are_left_alone() -> None:
    code = (
        "import random, torch, pygdist; from torch_geometric.data import Data; from torch_geometric.nn import GCN; "
        "random.seed(0); expected = random.random(); random.seed(0); data = Data(x=torch.ones(3, 2), "
        "edge_index=torch.tensor([[0, 1], [1, 2]])); model = pygdist.accelerate(GCN(2, 3, num_layers=1), data); "
        "model(data.x, data.edge_index); print(random.random() == expected)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_lightning_is_not_imported() -> None:
    code = "import pygdist, sys; pygdist.accelerate; print([one for one in sys.modules if one == 'lightning'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
