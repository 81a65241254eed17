"""Self-loops out of an adjacency and into it, in its order; what was computed for the same attributes may be kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, remove_self_loops

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.nn.norms import Ranks
from pygdist.nn.self_loops import KeptSelfLoops

ALONE = cast(Ranks, SimpleNamespace(max_over_ranks=lambda value: value, splits_nodes=False))
LOOPS = torch.tensor([[0, 1, 2, 1], [0, 0, 1, 2]])


def test_the_same_attributes_stay_the_same_tensor_with_loops_or_without() -> None:
    for edge_index in (LOOPS, LOOPS[:, 1:]):
        adjacency, loops = Adjacency(edge_index, num_src=3, num_dst=3), KeptSelfLoops(ALONE)
        weight = torch.arange(edge_index.size(1), dtype=torch.float64)
        first, again = (loops.remove(adjacency, weight) for _ in range(2))
        assert first[0] is again[0]
        assert first[1] is again[1]
        expected = remove_self_loops(edge_index, weight)
        assert torch.equal(again[0].as_tensor(), expected[0])
        assert torch.equal(again[1], expected[1])
        weight.mul_(2)
        assert torch.equal(loops.remove(adjacency, weight)[1], remove_self_loops(edge_index, weight)[1])


def test_attributes_that_are_learned_get_their_gradient() -> None:
    adjacency, loops = Adjacency(LOOPS, num_src=3, num_dst=3), KeptSelfLoops(ALONE)
    weight = torch.ones(4, requires_grad=True)
    for _ in range(2):
        _, without = loops.remove(adjacency, weight)
        assert without is not None
        weight.grad = None
        without.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("pyg", [add_self_loops, add_remaining_self_loops])
@pytest.mark.parametrize("fill_value", [None, 2.0, "mean"])
def test_loops_are_added_in_the_order_of_the_edges(pyg: Callable[..., Any], fill_value: Any) -> None:
    adjacency, kept = Adjacency(LOOPS, num_src=4, num_dst=3), KeptSelfLoops(ALONE)
    add = kept.add if pyg is add_self_loops else kept.add_remaining
    weight = torch.tensor([5.0, 6.0, 7.0, 8.0])
    edges, weights = add(adjacency, weight, fill_value, 3)
    assert isinstance(edges, Adjacency)
    assert edges is add(adjacency, None, None, 3)[0]
    expected, expected_weights = pyg(LOOPS, weight, fill_value, 3)
    assert weights is not None
    ours, theirs = (
        sorted(zip(*one.tolist(), of.tolist(), strict=True))
        for one, of in ((edges.as_tensor(), weights), (expected, expected_weights))
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["add", "add_remaining"])
def test_how_many_nodes_there_are_must_be_said(name: str) -> None:
    with pytest.raises(InputError, match=r"add_(remaining_)?self_loops without num_nodes.*num_nodes=x.size\(0\)"):
        getattr(KeptSelfLoops(ALONE), name)(Adjacency(LOOPS, num_src=3, num_dst=3))
