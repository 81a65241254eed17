"""Layers that a user has changed, before or after they were distributed, compute what they compute in PyG."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import remove_self_loops

from pygdist import Shard, accelerate
from tests.backends.training import epoch, one_rank, same, single

LAYERS: dict[str, Callable[[], Any]] = {
    "GCNConv": lambda: pyg.GCNConv(5, 3),
    "SAGEConv": lambda: pyg.SAGEConv(5, 3),
    "GINConv": lambda: pyg.GINConv(nn.Sequential(nn.Linear(5, 3), nn.ReLU())),
    "GraphConv": lambda: pyg.GraphConv(5, 3, aggr="max"),
    "GATConv": lambda: pyg.GATConv(5, 3),
    "GATv2Conv": lambda: pyg.GATv2Conv(5, 3),
    "TransformerConv": lambda: pyg.TransformerConv(5, 3),
}


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Data, Shard]:
    return one_rank(tmp_path)


class Clamped(pyg.SumAggregation):
    """A sum that is not linear."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        return out.clamp(max=0.1)


def _halved(out: Tensor) -> Tensor:
    return out / 2


def _hook(layer: Any) -> None:
    layer.aggr_module.register_forward_hook(lambda module, args, out: _halved(out))


def _own_forward(layer: Any) -> None:
    usual = layer.aggr_module.forward
    layer.aggr_module.forward = lambda *args, **kwargs: _halved(usual(*args, **kwargs))


def _own_sum(layer: Any) -> None:
    layer.aggr_module = Clamped()


def _own_update(layer: Any) -> None:
    layer.update = _halved


def _own_linear(layer: Any) -> None:
    linear = next(one for one in layer.modules() if isinstance(one, (nn.Linear, pyg.Linear)))
    usual = linear.forward
    linear.forward = lambda x: usual(x).tanh()


CHANGES = [_hook, _own_forward, _own_sum, _own_update, _own_linear]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("accelerates", [False, True])
def test_what_a_user_changes_in_a_layer_counts(
    change: Callable[[Any], None], name: str, accelerates: bool, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    torch.manual_seed(0)
    plain = LAYERS[name]().double()
    layer = copy.deepcopy(plain)
    if accelerates:
        accelerate(layer, data)
        args: tuple[Any, ...] = (data.x, data.edge_index)
    else:
        single(layer, shard)
        args = shard.x, shard.adjacency
    same(epoch(layer, *args), epoch(plain, data.x, data.edge_index))
    for one in (plain, layer):
        change(one)
    same(epoch(layer, *args), epoch(plain, data.x, data.edge_index))


@pytest.mark.parametrize(("width", "heads"), [((1, 1), 1), ((3, 3), 3), ((1, 3), 2)])
def test_attributes_of_a_transformer_without_edge_dim(
    width: tuple[int, int], heads: int, graph: tuple[Data, Shard]
) -> None:
    """PyG adds them to the rows of sources as they are."""
    data, shard = graph
    plain = pyg.TransformerConv(5, 3, heads=heads).double()
    edge_attr = torch.randn(data.num_edges, *width, dtype=torch.float64)
    layer = single(copy.deepcopy(plain), shard)
    same(epoch(layer, shard.x, shard.adjacency, edge_attr), epoch(plain, data.x, data.edge_index, edge_attr))


def test_attributes_of_gatv2_without_edge_dim_are_refused_as_in_pyg(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    layer = single(pyg.GATv2Conv(5, 3).double(), shard)
    with pytest.raises(AssertionError):
        layer(shard.x, shard.adjacency, shard.edge_attr)


def test_counts_as_edge_weights(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = pyg.GraphConv(5, 3).double()
    counts = torch.randint(0, 5, (data.num_edges,))
    layer = single(copy.deepcopy(plain), shard)
    same(epoch(layer, shard.x, shard.adjacency, counts), epoch(plain, data.x, data.edge_index, counts))


def test_another_flow_runs_as_in_pyg(graph: tuple[Data, Shard]) -> None:
    data, _ = graph
    plain = pyg.SAGEConv(5, 3).double()
    layer = accelerate(copy.deepcopy(plain), data)
    layer.flow = plain.flow = "target_to_source"
    with pytest.warns(UserWarning, match="its flow is target_to_source"):
        same(epoch(layer, data.x, data.edge_index), epoch(plain, data.x, data.edge_index))


class InPlace(MessagePassing):
    """Changes what PyG's functions on edges return; PyG returns fresh tensors."""

    def __init__(self, weights: bool) -> None:
        super().__init__(aggr="sum")
        self.lin, self.weights = nn.Linear(5, 3), weights

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        if self.weights:
            edge_index, weight = pyg.conv.gcn_conv.gcn_norm(edge_index, edge_weight, len(x))
        else:
            edge_index, weight = remove_self_loops(edge_index, edge_weight)
        weight.mul_(0.5)
        out: Tensor = self.propagate(edge_index, x=self.lin(x), edge_weight=weight)
        return out

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight[:, None] * x_j


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("kind", ["directed", "isolated"])  # the second one has self-loops
def test_results_of_functions_on_edges_may_be_changed_in_place(weights: bool, kind: str, tmp_path: Path) -> None:
    data, shard = one_rank(tmp_path, kind)
    assert shard.edge_weight is not None
    plain, before = InPlace(weights).double(), shard.edge_weight.clone()
    layer = single(copy.deepcopy(plain), shard)
    for _ in range(3):
        ours = epoch(layer, shard.x, shard.adjacency, shard.edge_weight)
        same(ours, epoch(plain, data.x, data.edge_index, data.edge_weight.clone()))
    assert torch.equal(shard.edge_weight, before)


def test_a_kept_result_that_numpy_changes_is_computed_anew(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    layer = single(pyg.SimpleConv(), shard)
    expected = pyg.SimpleConv()(data.x, data.edge_index)
    for _ in range(3):
        out = layer(shard.x, shard.adjacency)
        same([out], [expected])
        shown = out.detach().numpy()
        shown -= shown.mean(0)
