"""``accelerate``: edges, weights and caches that change between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import (
    GCN,
    GCNConv,
)

from pygdist import InputError, accelerate, undistribute
from tests.loop.graphs import assert_same_as_pyg


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


def test_layers_on_other_edges_run_as_in_pyg(data: Data) -> None:
    few = data.subgraph(torch.arange(data.num_nodes // 2))
    turned = data.edge_index.flip(0)
    calls = [(data.x, data.edge_index), (data.x, data.edge_index.clone()), (data.x, data.edge_index[:, :7])]
    calls += [(data.x, turned), (few.x, few.edge_index)]
    with pytest.warns(
        UserWarning, match="GCNConv runs as in plain PyG, no faster: its edges are not those for which"
    ) as told:
        assert_same_as_pyg(GCN(data.num_features, 3, num_layers=2).double(), data, *calls)
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
