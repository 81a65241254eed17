"""Edges of one relation: picked once from an adjacency, the same as PyG picks."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index

from pygdist.graph import Adjacency
from pygdist.nn.relations import KeptRelations

EDGES = torch.tensor([[3, 0, 2, 1, 3, 2], [0, 0, 1, 2, 2, 4]])
KINDS = torch.tensor([1, 0, 1, 1, 0, 2])
LAYER = nn.Identity()


class Alone:
    """One rank."""

    def max_over_ranks(self, value: int) -> int:
        return value


def test_relations_are_those_of_pyg_and_are_kept() -> None:
    adjacency, relations = Adjacency(EDGES, num_src=5, num_dst=5), KeptRelations(Alone())
    for kind in range(4):  # nobody has the last
        chosen = kind == KINDS
        relations.begin_layer(LAYER, [adjacency, KINDS])
        found = relations.pick(adjacency, chosen)
        assert isinstance(found, Adjacency)
        assert torch.equal(found.as_tensor(), masked_edge_index(EDGES, chosen))
        assert (found.num_src, found.num_dst) == (5, 5)
        for again in (adjacency, adjacency.with_value(None)):
            relations.begin_layer(LAYER, [adjacency, KINDS])
            assert relations.pick(again, chosen.clone()) is found


def test_relations_without_edges_are_told_apart_by_their_order() -> None:
    adjacency, relations, none = (
        Adjacency(EDGES, num_src=5, num_dst=5),
        KeptRelations(Alone()),
        torch.zeros(6, dtype=torch.bool),
    )
    relations.begin_layer(LAYER, [adjacency, KINDS])
    first, second = relations.pick(adjacency, none), relations.pick(adjacency, none)
    assert first is not second
    relations.begin_layer(LAYER, [adjacency, KINDS])
    assert relations.pick(adjacency, none) is first
    assert relations.pick(adjacency, none) is second


def test_others_are_made_on_every_rank_when_types_change() -> None:
    """Also where a relation has the edges of before, as it may on this rank alone."""
    adjacency, relations, kinds = Adjacency(EDGES, num_src=5, num_dst=5), KeptRelations(Alone()), KINDS.clone()

    def pick() -> list[Adjacency]:
        relations.begin_layer(LAYER, [adjacency, kinds])
        return [relations.pick(adjacency, kinds == kind) for kind in range(3)]

    before = pick()
    assert all(one is other for one, other in zip(before, pick(), strict=True))
    kinds[2] = 2
    after = pick()
    assert not any(one is other for one, other in zip(before, after, strict=True))
    assert torch.equal(before[0].as_tensor(), after[0].as_tensor())
    assert len(adjacency.derived["relations"]) == 1  # those of before are let go of


def test_a_layer_finds_the_edges_that_another_has_picked() -> None:
    adjacency, relations, other = Adjacency(EDGES, num_src=5, num_dst=5), KeptRelations(Alone()), nn.Identity()
    relations.begin_layer(LAYER, [adjacency, KINDS])
    found = relations.pick(adjacency, KINDS == 1)
    relations.begin_layer(other, [adjacency, KINDS])
    assert relations.pick(adjacency, KINDS == 1) is found


def test_lists_of_edges_and_edges_with_weights_are_left_to_pyg() -> None:
    chosen = KINDS == 1
    assert torch.equal(KeptRelations(Alone()).pick(EDGES, chosen), masked_edge_index(EDGES, chosen))
    weighted = Adjacency(EDGES, num_src=5, num_dst=5, value=torch.rand(6))
    assert torch.equal(torch.as_tensor(KeptRelations(Alone()).pick(weighted, chosen)), masked_edge_index(EDGES, chosen))
