"""Hops in blocks: the numbers of PyG's own path, in memory that a budget bounds, in both passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import (
    MLP,
    CGConv,
    EdgeConv,
    FAConv,
    GATConv,
    GATv2Conv,
    MessagePassing,
    NNConv,
    RGATConv,
    SAGEConv,
    TransformerConv,
)
from typing_extensions import override

from pygdist import Savings, Shard, distribute
from pygdist.backends import CommBackend, SingleBackend, blocks
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.nn.inputs import edge_inputs
from pygdist.testing import LAYERS, RankPool, assert_exact, random_graph
from pygdist.testing.layers import build

TINY = Savings(block_mib=2e-3)
MIB = 2**20

# PyG fuses them, or their rows are needed all at once
FUSED = {"SAGEConv-detached", "SAGEConv-jk", "SAGEConv-mean", "GCNConv"}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The bounds of the blocks of each hop that runs in blocks."""
    found: list[list[int]] = []
    cut = blocks.destination_blocks

    def spy(*args: Any) -> list[int]:
        found.append(cut(*args))
        return found[-1]

    monkeypatch.setattr(blocks, "destination_blocks", spy)
    return found


@pytest.fixture
def graph(tmp_path: Any) -> tuple[Data, Shard]:
    data, part = random_graph("isolated")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return data, Shard.load(tmp_path / "store", 0)


def _blocked(model: nn.Module, shard: Shard | None = None, savings: Savings = TINY) -> nn.Module:
    backend = SingleBackend()
    if shard is not None:
        backend.bind(shard, Communicator())
    return distribute(model, backend=backend, savings=savings)


def _gradients(model: nn.Module, loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_the_same_in_blocks(name: str, graph: tuple[Data, Shard], counted: list[list[int]]) -> None:
    data, shard = graph
    model = build(name, 5, 3)
    inputs = edge_inputs(model, data)
    x = data.x.clone().requires_grad_()
    expected = model(x, data.edge_index, **inputs)
    weight = torch.randn_like(expected)
    gradients = _gradients(model, (expected * weight).sum(), x)
    model = build(name, 5, 3)
    _blocked(model, shard)
    out = model(x, shard.adjacency, **edge_inputs(model, shard))
    print(name, [len(b) - 1 for b in counted])
    _same([out, *_gradients(model, (out * weight).sum(), x)], [expected, *gradients])
