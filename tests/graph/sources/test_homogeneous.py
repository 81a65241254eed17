"""A heterogeneous graph as one with types: nothing is lost, and layers of relations see what PyG's would."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import HeteroData

from pygdist.errors import InputError
from pygdist.graph import as_homogeneous, load_graph


def _graph() -> HeteroData:
    data = HeteroData()
    data["author"].num_nodes = 2
    data["paper"].x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    data["paper"].y = torch.tensor([1, 0, 1])
    data["paper"].train_mask = torch.tensor([True, False, True])
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1], [0, 0, 2]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 2], [1, 1]])
    data["paper", "like", "paper"].edge_index = torch.tensor([[0, 2], [2, 0]])
    return data


def test_types_follow_one_another() -> None:
    data = as_homogeneous(_graph())
    assert data.num_nodes == 5
    assert data.edge_index.tolist() == [[0, 1, 1, 2, 4, 2, 4], [2, 2, 4, 3, 3, 4, 2]]
    assert data.edge_type.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert data.node_type.tolist() == [0, 0, 1, 1, 1]
    assert data.y.tolist() == [-1, -1, 1, 0, 1]
    assert data.train_mask.tolist() == [False, False, True, False, True]
    assert data.x.tolist() == [[0, 0, 1, 0], [0, 0, 1, 0], [1, 2, 0, 1], [3, 4, 0, 1], [5, 6, 0, 1]]


def test_relations_the_other_way_round_are_relations_of_their_own() -> None:
    data = as_homogeneous(_graph(), reverse=True)
    assert data.edge_type.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4]  # what is both ways already stays as it is
    for there, back in ((0, 1), (2, 3)):
        forth, reverse = (data.edge_index[:, data.edge_type == kind] for kind in (there, back))
        assert torch.equal(reverse, forth.flip(0))


@pytest.mark.parametrize(("width", "columns"), [(2, 2), (3, 5)])
def test_features_of_several_types(width: int, columns: int) -> None:
    """Of one width they share their columns; of several each has its own."""
    graph = _graph()
    graph["author"].x = torch.full((2, width), 7.0)
    data = as_homogeneous(graph)
    assert data.x.shape == (5, columns + 2)
    assert torch.equal(data.x[:2, :width], graph["author"].x)
    assert torch.equal(data.x[2:, columns - 2 : columns], graph["paper"].x)
    assert float(data.x.sum()) == float(graph["author"].x.sum() + graph["paper"].x.sum()) + 5


def test_what_cannot_be_one_graph_is_refused() -> None:
    graph = _graph()
    graph["author"].y = torch.tensor([0, 1])
    with pytest.raises(InputError, match=r"nodes of author and paper have labels \(y\)"):
        as_homogeneous(graph)
    del graph["author"].y
    graph["author", "writes", "paper"].edge_weight = torch.ones(3)
    with pytest.raises(InputError, match=r"edge_weight of \('author', 'writes', 'paper'\) would be lost"):
        as_homogeneous(graph)
    del graph["author", "writes", "paper"].edge_weight
    graph["author", "knows", "author"].since = torch.ones(1)
    with pytest.raises(InputError, match=r"\('author', 'knows', 'author'\): edge_index is missing"):
        as_homogeneous(graph)


def test_a_double_is_loaded_by_name() -> None:
    data = load_graph("mag-like", scale=0.001, reverse=True)
    assert int(data.edge_type.max()) + 1 == 8
    assert data.x.size(1) == 128 + 4
    assert torch.equal(load_graph(_graph()).edge_index, as_homogeneous(_graph()).edge_index)
    with pytest.raises(InputError, match="unexpected keyword argument 'nodes'"):
        load_graph("mag-like", nodes=3)
