"""Edges of one relation: picked once from an adjacency, the same as PyG picks."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn.conv.rgcn_conv import masked_edge_index

from pygdist.graph import Adjacency
from pygdist.nn.relations import KeptRelations

EDGES = torch.tensor([[3, 0, 2, 1, 3, 2], [0, 0, 1, 2, 2, 4]])
KINDS = torch.tensor([1, 0, 1, 1, 0, 2])


def test_relations_are_those_of_pyg_and_are_kept() -> None:
    adjacency, relations = Adjacency(EDGES, num_src=5, num_dst=5), KeptRelations()
    for kind in range(4):  # nobody has the last
        chosen = kind == KINDS
        relations.begin_layer()
        found = relations.pick(adjacency, chosen)
        assert isinstance(found, Adjacency)
        assert torch.equal(found.as_tensor(), masked_edge_index(EDGES, chosen))
        assert (found.num_src, found.num_dst) == (5, 5)
        for again in (adjacency, adjacency.with_value(None)):
            relations.begin_layer()
            assert relations.pick(again, chosen.clone()) is found


def test_masks_by_the_same_types_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    adjacency, relations, kinds, read = Adjacency(EDGES, num_src=5, num_dst=5), KeptRelations(), KINDS.clone(), []
    by_values = KeptRelations._by_values
    monkeypatch.setattr(KeptRelations, "_by_values", lambda *args: (read.append(1), by_values(*args))[1])

    def picked(types: torch.Tensor) -> list[Adjacency]:
        relations.begin_layer()
        with relations.noting():
            return [relations.pick(adjacency, types == kind) for kind in range(5)]  # nobody has the last two

    first = picked(kinds)
    assert len({id(one) for one in first}) == 5
    assert all(one is other for one, other in zip(picked(kinds), first, strict=True))
    assert len(read) == 5
    assert all(one is other for one, other in zip(picked(kinds.clone()), first, strict=True))  # by their values
    assert len(read) == 10
    kinds[0] = 4  # in place
    for kind, one in enumerate(picked(kinds)):
        assert torch.equal(one.as_tensor(), masked_edge_index(EDGES, kinds == kind))
    with torch.inference_mode(), relations.noting():
        assert torch.equal(relations.pick(adjacency, kinds == 1).as_tensor(), masked_edge_index(EDGES, kinds == 1))
    with relations.noting():
        mask = kinds == 1
        mask[0] = True
        assert torch.equal(relations.pick(adjacency, mask).as_tensor(), masked_edge_index(EDGES, mask))


def test_relations_without_edges_are_told_apart_by_their_order() -> None:
    adjacency, relations, none = (
        Adjacency(EDGES, num_src=5, num_dst=5),
        KeptRelations(),
        torch.zeros(6, dtype=torch.bool),
    )
    first, second = relations.pick(adjacency, none), relations.pick(adjacency, none)
    assert first is not second
    relations.begin_layer()
    assert relations.pick(adjacency, none) is first
    assert relations.pick(adjacency, none) is second


def test_lists_of_edges_and_edges_with_weights_are_left_to_pyg() -> None:
    chosen = KINDS == 1
    assert torch.equal(KeptRelations().pick(EDGES, chosen), masked_edge_index(EDGES, chosen))
    weighted = Adjacency(EDGES, num_src=5, num_dst=5, value=torch.rand(6))
    assert torch.equal(torch.as_tensor(KeptRelations().pick(weighted, chosen)), masked_edge_index(EDGES, chosen))
