"""Graphs of the tests of loops, and the comparison with PyG."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pygdist import accelerate
from tests.lightning.runs import graph as small_graph


def masked_graph() -> Data:
    """A graph of 160 nodes, each in one of the three sets."""
    data = small_graph()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(160, generator=generator)
    masks = {name: torch.zeros(160, dtype=torch.bool) for name in ("train_mask", "val_mask", "test_mask")}
    for name, chosen in zip(masks, order.split((80, 40, 40)), strict=True):
        masks[name][chosen] = True
    return data.update(masks)


def reordered(graph: Data, order: Tensor) -> Data:
    graph = graph.clone()
    for name in ("edge_index", "edge_weight", "edge_attr", "edge_type"):
        if graph.get(name) is not None:
            graph[name] = graph[name].index_select(1 if name == "edge_index" else 0, order)
    return graph


def assert_same_as_pyg(model: nn.Module, data: Data, *calls: tuple[Any, ...], atol: float = 1e-12) -> None:
    """Compare the outputs of calls before and after ``accelerate``."""
    expected = [model(*call) for call in calls]
    accelerate(model, data)
    for call, one in zip(calls, expected, strict=True):
        found = model(*call)
        assert found.shape == one.shape
        assert torch.allclose(found, one, rtol=0, atol=atol)
