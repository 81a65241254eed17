"""Edges of one relation: picked once from an adjacency, the same as PyG picks."""

from __future__ import annotations

import torch
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index

from pygdist.graph import Adjacency
from pygdist.nn.relations import edges_of_relation

EDGES = torch.tensor([[3, 0, 2, 1, 3, 2], [0, 0, 1, 2, 2, 4]])
KINDS = torch.tensor([1, 0, 1, 1, 0, 2])


def test_relations_are_those_of_pyg_and_are_kept() -> None:
    adjacency = Adjacency(EDGES, num_src=5, num_dst=5)
    for kind in range(4):  # nobody has the last
        chosen = kind == KINDS
        found = edges_of_relation(adjacency, chosen)
        assert isinstance(found, Adjacency)
        assert torch.equal(found.as_tensor(), masked_edge_index(EDGES, chosen))
        assert (found.num_src, found.num_dst) == (5, 5)
        assert edges_of_relation(adjacency, chosen.clone()) is found
        assert edges_of_relation(adjacency.with_value(None), chosen) is found


def test_lists_of_edges_and_edges_with_weights_are_left_to_pyg() -> None:
    chosen = KINDS == 1
    assert torch.equal(edges_of_relation(EDGES, chosen), masked_edge_index(EDGES, chosen))
    weighted = Adjacency(EDGES, num_src=5, num_dst=5, value=torch.rand(6))
    assert torch.equal(torch.as_tensor(edges_of_relation(weighted, chosen)), masked_edge_index(EDGES, chosen))
