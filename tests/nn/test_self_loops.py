"""Self-loops out of an adjacency: what is computed for the same attributes may be kept, on every rank or on none."""

from __future__ import annotations

import torch
from torch_geometric.utils import remove_self_loops

from pygdist.graph import Adjacency
from pygdist.nn.self_loops import KeptSelfLoops

LOOPS = torch.tensor([[0, 1, 2, 1], [0, 0, 1, 2]])


def test_the_same_attributes_stay_the_same_tensor_with_loops_or_without() -> None:
    for edge_index in (LOOPS, LOOPS[:, 1:]):
        adjacency, loops = Adjacency(edge_index, num_src=3, num_dst=3), KeptSelfLoops()
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
    adjacency, loops = Adjacency(LOOPS, num_src=3, num_dst=3), KeptSelfLoops()
    weight = torch.ones(4, requires_grad=True)
    for _ in range(2):
        _, without = loops.remove(adjacency, weight)
        assert without is not None
        weight.grad = None
        without.sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [0, 1, 1, 1]
