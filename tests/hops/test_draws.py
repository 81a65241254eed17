"""Random numbers are constants while models are compared: the same on any number of ranks, and usual afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.utils import dropout_edge, dropout_node, mask_feature, shuffle_node

from pygdist.testing import without_randomness

EDGES = torch.stack([torch.arange(12), torch.arange(12).roll(1)])
DRAWS: dict[str, Callable[[int], Any]] = {
    "rand": lambda n: torch.rand(n, 3),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 3)),
    "rand, out": lambda n: torch.rand(n, 3, out=torch.empty(n, 3)),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(-2, 2),
    "randn": lambda n: torch.randn(n, 3),
    "normal": lambda n: torch.normal(torch.ones(n, 3), 2.0),
    "normal of numbers": lambda n: torch.normal(1.0, 2.0, (n, 3)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 3), 0.3)),
    "bernoulli_": lambda n: torch.empty(n, 3).bernoulli_(0.3),
    "randint": lambda n: torch.randint(2, 9, (n, 3)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n, 3), 9),
    "random_": lambda n: torch.empty(n, 3).random_(9),
    "exponential_": lambda n: torch.empty(n, 3).exponential_(2.0),
    "log_normal_": lambda n: torch.empty(n, 3).log_normal_(),
    "gumbel_softmax": lambda n: functional.gumbel_softmax(torch.ones(n, 3)),
    "dropout": lambda n: functional.dropout(torch.ones(n, 3)),
    "dropout of LSTM": lambda n: nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True)(torch.ones(n, 2, 3))[0],
    "mask_feature": lambda n: mask_feature(torch.ones(n, 3), p=0.3)[0],
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_all_rows_get_the_same_numbers(draw: Callable[[int], Tensor]) -> None:
    """However many rows there are, and whatever the seed is."""
    with without_randomness():
        torch.manual_seed(1)
        few = draw(2)
        torch.manual_seed(2)
        more = draw(5)
    assert torch.equal(few[:1].expand_as(few), few)
    assert torch.equal(few[:1].expand_as(more), more)


def test_nodes_and_edges_stay_in_place() -> None:
    with without_randomness():
        assert torch.equal(torch.randperm(5), torch.arange(5))
        assert torch.equal(shuffle_node(EDGES.T)[0], EDGES.T)
        assert torch.equal(dropout_edge(EDGES, p=0.6)[0], EDGES)
        assert torch.equal(dropout_node(EDGES, p=0.5)[0], EDGES)


def test_generators_draw_as_usual_and_so_does_all_afterwards() -> None:
    with without_randomness():
        own = torch.rand(9, generator=torch.Generator().manual_seed(3))
    assert own.unique().numel() == 9
    assert torch.rand(9).unique().numel() == 9
    assert not bool(functional.dropout(torch.ones(99), 0.9).all())
