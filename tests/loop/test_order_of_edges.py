"""``accelerate``: layers, hooks and results see edges, and their values, in the caller's order."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    MessagePassing,
    SimpleConv,
    TransformerConv,
)
from torch_geometric.utils import degree

from pygdist import accelerate
from tests.loop.graphs import assert_same_as_pyg, reordered


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
        assert_same_as_pyg(layer, data, (data.x, data.edge_index, torch.rand(data.num_edges).double()))


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


@pytest.mark.parametrize("make", [_WithWeights, _OfGlobal, lambda _: _Reading()], ids=["held", "global", "in a layer"])
def test_values_of_edges_that_only_the_model_knows(
    make: Callable[[Data], nn.Module], data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GLOBAL", data)
    assert_same_as_pyg(make(data), data, (data.x, data.edge_index))


@pytest.mark.filterwarnings("ignore:accelerate. these layers run")
def test_values_of_edges_where_edges_are_as_many_as_nodes(data: Data) -> None:
    data.edge_index = data.edge_index[:, : data.num_nodes]
    weight = torch.rand(data.num_nodes, dtype=torch.float64)
    assert_same_as_pyg(GCNConv(data.num_features, 3).double(), data, (data.x, data.edge_index, weight))
    assert_same_as_pyg(_Layer(), data, (data.x, data.edge_index, torch.rand(data.num_nodes)))


def test_as_many_pairs_as_edges_stay_in_their_order(data: Data) -> None:
    """As ``RandomLinkSplit`` makes for an undirected graph: an edge of both directions, and a pair that is none."""
    others = torch.randint(data.num_nodes, data.edge_index.shape)
    shuffled = data.edge_index[:, torch.randperm(data.num_edges)]
    factor = torch.rand(data.num_edges, dtype=torch.float64)
    assert_same_as_pyg(
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
    assert_same_as_pyg(model, data, (data.x, data.edge_index, torch.randint(data.num_nodes, data.edge_index.shape)))
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
    assert_same_as_pyg(layer, data, (data.x, data.edge_index))
    assert not seen or torch.equal(*seen)


def test_attention_of_as_many_edges_as_nodes(data: Data) -> None:
    data.edge_index = data.edge_index[:, : data.num_nodes]
    layer: Any = GATConv(data.num_features, 3, add_self_loops=False).double()
    _, (_, expected) = layer(data.x, data.edge_index, return_attention_weights=True)
    accelerate(layer, data)
    _, (edges, alpha) = layer(data.x, data.edge_index, return_attention_weights=True)
    assert edges is data.edge_index
    assert torch.allclose(alpha, expected, rtol=0, atol=1e-12)


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
    for graph in (data, reordered(data, data.edge_index[1].argsort(stable=True))):
        one: Any = layer(graph.num_features, 4, heads=2).double()
        expected, (edges, alpha) = one(graph.x, graph.edge_index, return_attention_weights=True)
        accelerate(one, graph)
        found, (found_edges, found_alpha) = one(graph.x, graph.edge_index, return_attention_weights=True)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        assert torch.equal(found_edges, edges)
        assert type(found_edges) is Tensor
        assert torch.allclose(found_alpha, alpha, rtol=0, atol=1e-12)


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
