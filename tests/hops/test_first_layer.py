"""First layers cut by columns: the terms of all ranks, and the rest, are the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import nn

from pygdist.hops.first_layer import InEdges, cut_of
from pygdist.kernels import CSR

NODES, ROWS, WIDTH = 30, 12, 7

LAYERS = {
    "GCN": lambda: nn.GCNConv(WIDTH, 4),
    "improved": lambda: nn.GCNConv(WIDTH, 4, improved=True),
    "no loops": lambda: nn.GCNConv(WIDTH, 4, add_self_loops=False, bias=False),
    "not normalised": lambda: nn.GCNConv(WIDTH, 4, normalize=False),
    "mean": lambda: nn.SAGEConv(WIDTH, 4),
    "max": lambda: nn.SAGEConv(WIDTH, 4, aggr="max", normalize=True),
    "no root": lambda: nn.SAGEConv(WIDTH, 4, aggr="sum", root_weight=False),
    "GraphConv": lambda: nn.GraphConv(WIDTH, 4),
    "GIN": lambda: nn.GINConv(nn.MLP([WIDTH, 5, 4], norm=None), train_eps=True),
    "GIN, own network": lambda: nn.GINConv(torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.ReLU()), eps=0.3),
}


def edges_of(*, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """Edges into the first rows alone, from all nodes, with self-loops and doubled edges."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(ROWS - 1, (70,), generator=generator).sort().values  # the last row has none
    source = torch.randint(NODES, (70,), generator=generator)
    source[:3] = target[:3]
    weight = torch.rand(70, generator=generator, dtype=torch.float64) if weighted else None
    return torch.stack([source, target]), weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_terms_of_all_ranks_and_the_rest_are_the_layer(name: str, weighted: bool) -> None:
    """Nodes are known by global ids that are not their places, and most sources are no rows."""
    torch.manual_seed(0)
    layer, (edges, weight) = LAYERS[name]().double(), edges_of(weighted=weighted)
    if weighted and not isinstance(layer, (nn.GCNConv, nn.GraphConv)):
        pytest.skip("the layer takes no weights")
    x, ids = torch.randn(NODES, WIDTH, dtype=torch.float64), torch.randperm(2 * NODES)[:NODES]
    features = torch.full((2 * NODES, WIDTH), float("nan"), dtype=torch.float64)
    features[ids] = x
    source, target = edges
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(target, minlength=ROWS).cumsum(0)])
    block = InEdges(CSR(indptr, ids[source].to(torch.int32), 2 * NODES), ids[:ROWS], weight)
    cut = cut_of(layer)
    slices = (slice(0, 3), slice(3, 3), slice(3, WIDTH))  # the second rank has no column
    terms = [cut.partial(layer, cut.parameters(layer), block, features[:, mine].contiguous(), mine) for mine in slices]
    found = cut.rest(layer, terms[0] + terms[1] + terms[2])
    expected = layer(x, edges, *([] if weight is None else [weight]))[:ROWS]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class _Relu(nn.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


class _SameByAnotherWay(nn.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j - x_j


REFUSED: dict[str, tuple[Any, str]] = {
    "attention": (lambda: nn.GATConv(WIDTH, 4), "GATConv is none of the layers that are cut by columns"),
    "projected": (lambda: nn.SAGEConv(WIDTH, 4, project=True), "with project=True is not linear"),
    "lstm": (lambda: nn.SAGEConv(WIDTH, 4, aggr="lstm"), "aggregates by LSTMAggregation, expected a sum"),
    "subclass": (lambda: _Relu(WIDTH, 4), "_Relu computes something else than SAGEConv"),
    "network": (lambda: nn.GINConv(torch.nn.ReLU()), "has a network that does not begin with a linear module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        cut_of(REFUSED[name][0]())


def test_large_weights_and_subclasses_that_compute_the_same_are_not_refused() -> None:
    layer = _SameByAnotherWay(WIDTH, 4)
    with torch.no_grad():
        layer.lin_l.weight *= 1e7
    assert cut_of(layer).weights == ("lin_l.weight", "lin_r.weight")
