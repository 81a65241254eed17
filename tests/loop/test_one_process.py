"""``accelerate``: one process, the caller's own calls and order of edges, and the same numbers as PyG's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GAE, GCN, GATConv, GCNConv

from pygdist import InputError, accelerate, undistribute
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
    found = reference_step(accelerate(build(name, 5, 3), data), data)
    assert max(one.absolute for one in largest_differences(found, expected).values()) < 1e-10


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


def test_a_model_with_values_of_edges_of_its_own_is_refused(data: Data) -> None:
    with pytest.raises(InputError, match="weight"):
        accelerate(_WithWeights(data), data)(data.x, data.edge_index)


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


def test_attention_with_loops_stays_beside_its_edges(data: Data) -> None:
    layer = GATConv(data.num_features, 4).double()

    def by_edge() -> dict[tuple[int, int], list[float]]:
        edges, alpha = layer(data.x, data.edge_index, return_attention_weights=True)[1]
        found: dict[tuple[int, int], list[float]] = {}
        for source, target, value in zip(*edges.tolist(), alpha[:, 0].tolist(), strict=True):
            found.setdefault((source, target), []).append(round(value, 12))
        return {edge: sorted(values) for edge, values in found.items()}

    expected = by_edge()
    accelerate(layer, data)
    assert by_edge() == expected


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


def test_other_edges_are_refused(data: Data) -> None:
    model = accelerate(GCN(data.num_features, 3, num_layers=1).double(), data)
    model(data.x, data.edge_index.clone())
    with pytest.raises(InputError, match=r"accelerated for a graph of \d+ edges, and is called with other edges"):
        model(data.x, data.edge_index[:, :7])


def test_edges_that_change_after_the_call_are_refused(data: Data) -> None:
    model = accelerate(GCN(data.num_features, 3, num_layers=1).double(), data)
    data.edge_index = data.edge_index[:, :7]
    with pytest.raises(InputError, match="is called with other edges"):
        model(data.x, data.edge_index)
    other = accelerate(GCN(data.num_features, 3, num_layers=1).double(), data)
    data.edge_index[0, 0] += 1
    with pytest.raises(InputError, match="was changed in place"):
        other(data.x, data.edge_index)


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


def test_lightning_is_not_imported() -> None:
    code = "import pygdist, sys; pygdist.accelerate; print([one for one in sys.modules if one == 'lightning'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
