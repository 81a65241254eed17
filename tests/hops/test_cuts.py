"""First layers cut by columns: the terms of all ranks, and the rest, are the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import nn

from pygdist.hops.cuts import InEdges, cut_of
from pygdist.hops.cuts.cut import kept_share, summed
from pygdist.kernels import CSR
from tests.kernels.oracle import needs_library

pytestmark = needs_library
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
    "SG": lambda: nn.SGConv(WIDTH, 4),
    "TAG": lambda: nn.TAGConv(WIDTH, 4, K=1),
    "TAG, not normalised": lambda: nn.TAGConv(WIDTH, 4, K=1, normalize=False),
    "GAT": lambda: nn.GATConv(WIDTH, 4, heads=3),
    "GAT, averaged": lambda: nn.GATConv(WIDTH, 4, heads=2, concat=False, residual=True, bias=False),
    "GAT, no loops": lambda: nn.GATConv(WIDTH, 4, heads=2, add_self_loops=False, negative_slope=-0.1),
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
    if weighted and not isinstance(layer, (nn.GCNConv, nn.GraphConv, nn.SGConv, nn.TAGConv)):
        pytest.skip("the layer takes no weights")
    x, ids = torch.randn(NODES, WIDTH, dtype=torch.float64), torch.randperm(2 * NODES)[:NODES]
    features = torch.full((2 * NODES, WIDTH), float("nan"), dtype=torch.float64)
    features[ids] = x
    source, target = edges
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(target, minlength=ROWS).cumsum(0)])
    block = InEdges(CSR(indptr, ids[source].to(torch.int32), 2 * NODES), ids[:ROWS], weight)
    cut = cut_of(layer)
    slices = (slice(0, 3), slice(3, 3), slice(3, WIDTH))  # the second rank has no column
    found = cut.rest(layer, summed(cut, layer, block, features, slices))
    expected = layer(x, edges, *([] if weight is None else [weight]))[:ROWS]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "aggr_module", nn.MaxAggregation()),
        lambda layer: setattr(layer, "root_weight", False),
    ],
)
def test_a_layer_that_is_changed_is_tried_again(change: Any) -> None:
    layer = nn.SAGEConv(WIDTH, 4).double()
    before = cut_of(layer)
    assert cut_of(layer) is before
    change(layer)
    assert cut_of(layer) is not before


def test_hooks_on_the_modules_of_a_layer_are_seen() -> None:
    layer = nn.SAGEConv(WIDTH, 4).double()
    cut_of(layer)
    layer.lin_l.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ValueError, match="has other linear modules than PyG's"):
        cut_of(layer)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.SGConv(WIDTH, 4, K=3),
        lambda: nn.SGConv(WIDTH, 4, K=2, add_self_loops=False),
        lambda: nn.TAGConv(WIDTH, 4, K=3),
        lambda: nn.TAGConv(WIDTH, 4, K=2, normalize=False),
    ],
    ids=["SG", "SG, no loops", "TAG", "TAG, not normalised"],
)
def test_several_hops_compute_the_rows_whose_neighbourhood_is_here(make: Any, weighted: bool) -> None:
    """Rows of 3, 5, 8 and 13 nodes by hop; edges into a hop come from all nodes up to the next one."""
    torch.manual_seed(0)
    layer, ends, generator = make().double(), (16, 8, 3), torch.Generator().manual_seed(2)
    starts = (0, *reversed(ends), 29)
    target = torch.randint(16, (90,), generator=generator).sort().values
    reach = torch.tensor([29 if row >= 8 else 16 if row >= 3 else 8 for row in target.tolist()])
    source = (torch.rand(90, generator=generator) * reach).long()
    weight = torch.rand(90, generator=generator, dtype=torch.float64) if weighted else None
    x, ids = torch.randn(29, WIDTH, dtype=torch.float64), torch.randperm(60)[:29]
    features = torch.full((60, WIDTH), float("nan"), dtype=torch.float64)
    features[ids] = x
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(target, minlength=16).cumsum(0)])
    block = InEdges(CSR(indptr, ids[source].to(torch.int32), 60), ids[:16], weight, ends=ends)
    cut = cut_of(layer)
    found = cut.rest(layer, summed(cut, layer, block, features, (slice(0, 3), slice(3, WIDTH))))
    expected = layer(x, torch.stack([source, target]), weight)[: starts[4 - layer.K]]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_dropout_keeps_the_share_and_the_mean() -> None:
    """As torch's does: zeros and 1 / keeps; other keys draw other numbers, none keeps all."""
    factors = kept_share(torch.empty(400, 50, dtype=torch.float64), 0.7, key=3)
    assert set(factors.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((factors > 0).double().mean()) - 0.7) < 0.02
    assert not torch.equal(factors, kept_share(factors, 0.7, key=4))
    assert bool((kept_share(factors, 1.0, key=3) == 1).all())


def test_attention_drops_the_same_weights_on_all_ranks() -> None:
    """Terms of two ranks add up to that of one, for each key its own; in evaluation nothing is dropped."""
    torch.manual_seed(0)
    layer, (edges, _) = nn.GATConv(WIDTH, 4, heads=2, dropout=0.5).double(), edges_of(weighted=False)
    x = torch.randn(NODES, WIDTH, dtype=torch.float64)
    csr = CSR.from_coo(edges[1], edges[0], num_rows=ROWS, num_cols=NODES)
    cut, halves = cut_of(layer), (slice(0, 3), slice(3, WIDTH))
    outs = []
    for key in (1, 2):
        block = InEdges(csr, torch.arange(ROWS), key=key)
        outs.append(summed(cut, layer, block, x, [slice(0, WIDTH)]))
        torch.testing.assert_close(summed(cut, layer, block, x, halves), outs[-1])
    assert not torch.allclose(outs[0], outs[1])
    layer.eval()
    torch.testing.assert_close(cut.rest(layer, summed(cut, layer, block, x, halves)), layer(x, edges)[:ROWS])


class _Relu(nn.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


class _Dormant(nn.SAGEConv):
    """Its scale does nothing at first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.scale


class _SameByAnotherWay(nn.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j - x_j


REFUSED: dict[str, tuple[Any, str]] = {
    "attention": (lambda: nn.GATv2Conv(WIDTH, 4), "GATv2Conv is none of the layers that are cut by columns"),
    "bipartite": (lambda: nn.GATConv((WIDTH, WIDTH), 4), "has a weight for sources and another one"),
    "attributes": (lambda: nn.GATConv(WIDTH, 4, edge_dim=2), "with edge_dim reads attributes of edges"),
    "cached": (lambda: nn.SGConv(WIDTH, 4, cached=True), "with cached=True keeps the rows"),
    "projected": (lambda: nn.SAGEConv(WIDTH, 4, project=True), "with project=True is not linear"),
    "lstm": (lambda: nn.SAGEConv(WIDTH, 4, aggr="lstm"), "aggregates by LSTMAggregation, expected a sum"),
    "subclass": (lambda: _Relu(WIDTH, 4), "_Relu computes something else than SAGEConv"),
    "dormant": (lambda: _Dormant(WIDTH, 4), "_Dormant computes something else than SAGEConv"),
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
