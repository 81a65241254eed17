"""A heterogeneous graph as one with types: nothing is lost, and layers of relations see what PyG's would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import HeteroData

from pygdist.errors import InputError
from pygdist.graph import as_homogeneous, load_graph, prepare


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


# --- forms of fields --------------------------------------------------------------------------------------------------


def _split(graph: HeteroData, form: str) -> None:
    """Give the papers 0 and 2 for training and paper 1 for test."""
    del graph["paper"].train_mask
    train, test = torch.tensor([0, 2]), torch.tensor([1])
    if form == "ids":
        graph["paper"].train_idx, graph["paper"].test_idx = train, test.numpy()
    elif form == "dictionary":
        graph["paper"].split_idx = {"train": train, "test": [1]}
    elif form == "by stage, then type":
        graph.split_idx = {"train": {"paper": train}, "test": {"paper": test}}
    elif form == "by type, then stage":
        graph.split_idx = {"paper": {"train": train, "test": test}}
    elif form == "by type":
        graph.train_idx, graph.test_idx = {"paper": train}, {"paper": test}
    elif form == "masks by type":
        graph.train_mask = {"paper": torch.tensor([1, 0, 1])}
        graph.test_mask = {"paper": torch.tensor([False, True, False])}


@pytest.mark.parametrize(
    "form", ["ids", "dictionary", "by stage, then type", "by type, then stage", "by type", "masks by type"]
)
def test_a_split_may_be_given_for_a_type(form: str) -> None:
    graph = _graph()
    _split(graph, form)
    keys = {name: set(store.keys()) for name, store in zip(graph.metadata()[0], graph.node_stores, strict=True)}
    data, notes = prepare(load_graph(graph))
    assert data.train_mask.tolist() == [False, False, True, False, True]
    assert data.test_mask.tolist() == [False, False, False, True, False]
    assert not any("random split" in note for note in notes)
    assert {name: set(graph[name].keys()) for name in keys} == keys, "the user's graph stays as it is"


def test_fields_of_a_type_may_be_arrays_lists_and_matrices() -> None:
    graph, expected = _graph(), as_homogeneous(_graph())
    graph["paper"].x = graph["paper"].x.numpy()
    graph["paper"].y = [1, 0, 1]
    graph["author"].num_nodes = np.int64(2)
    edges = graph["author", "writes", "paper"].edge_index
    graph["author", "writes", "paper"].adj_t = torch.sparse_coo_tensor(edges.flip(0), torch.ones(3), (3, 2))
    del graph["author", "writes", "paper"].edge_index
    graph["paper", "cites", "paper"].edge_index = EdgeIndex(graph["paper", "cites", "paper"].edge_index.int())
    data = as_homogeneous(graph)
    for name in ("x", "y", "edge_index", "edge_type", "train_mask"):
        assert torch.equal(data[name], expected[name]), name
        assert type(data[name]) is torch.Tensor


def test_integers_of_all_types_stay_integers() -> None:
    graph = _graph()
    graph["paper"].x = torch.tensor([[2**53 + 1], [0], [3]])
    graph["author"].x = torch.tensor([[7], [8]], dtype=torch.int16)
    data = as_homogeneous(graph)
    assert data.x.tolist() == [[7, 1, 0], [8, 1, 0], [2**53 + 1, 0, 1], [0, 0, 1], [3, 0, 1]]
    graph["author"].x = torch.tensor([[0.5], [1.0]])
    with pytest.raises(InputError, match=r"'paper': x: torch.int64 with numbers that torch.float32 rounds"):
        as_homogeneous(graph)
    graph["paper"].x = torch.tensor([[2], [0], [3]])
    data, notes = prepare(load_graph(graph))
    assert data.x[:, 0].tolist() == [0.5, 1.0, 2.0, 0.0, 3.0]
    assert "converted x of 'paper' from int64 to float32" in notes


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor([True, False, True]),
        torch.tensor([1, 0, 1], dtype=torch.uint8),
        torch.tensor([[1.0], [0.0], [float("nan")]]),
    ],
)
def test_nodes_of_other_types_are_unlabelled(y: torch.Tensor) -> None:
    graph = _graph()
    graph["paper"].y = y
    data, _ = prepare(load_graph(graph))
    assert data.y.tolist() == [-1, -1, 1, 0, -1 if y.dim() == 2 else 1]
    graph["paper"].y = torch.tensor([[1, 1], [0, 0], [1, 0]])
    data, _ = prepare(load_graph(graph))
    assert data.y[2:].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert bool(data.y[:2].isnan().all())


def test_what_is_left_out_is_noted() -> None:
    graph = _graph()
    graph["author"].train_mask = torch.tensor([True, False])
    graph["paper"].year = torch.tensor([1, 2, 3])
    graph["paper", "cites", "paper"].time = torch.tensor([1, 2])
    _, notes = prepare(load_graph(graph))
    assert "left out train_mask of 'author', which has no labels (y)" in notes
    assert "left out unused attributes of 'paper': year" in notes
    assert "left out unused attributes of ('paper', 'cites', 'paper'): time" in notes


CITES = ("paper", "cites", "paper")


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("paper", "y", torch.tensor([0, 1, 0, 1]), r"'paper': y: torch.int64 of shape \(4,\), .* each of 3 nodes"),
        ("paper", "x", torch.rand(3), r"'paper': x: torch.float32 of shape \(3,\)"),
        ("paper", "x", "text", r"'paper': x: a str"),
        ("paper", "x", torch.rand(3, 2, dtype=torch.complex64), r"'paper': x: torch.complex64"),
        ("paper", "num_nodes", 4, r"'paper': x: torch.float32 of shape \(3, 2\), .* each of 4 nodes"),
        ("paper", "val_mask", torch.ones(2), r"'paper': val_mask: torch.float32 of shape \(2,\)"),
        ("paper", "val_idx", torch.tensor([3]), r"'paper': val_idx of shape \(1,\), .* from 0 to 2"),
        ("paper", "train_idx", torch.tensor([1]), r"'paper': train_mask and train_idx name other nodes"),
        ("paper", "split_idx", {"fold": torch.tensor([1])}, r"'paper': split_idx: has keys fold"),
        ("author", "val_idx", torch.tensor([2]), r"'author': val_idx .* from 0 to 1"),
        (None, "val_idx", torch.tensor([2]), r"val_idx must be a dictionary by type of nodes \(author, paper\)"),
        (None, "val_idx", {"book": torch.tensor([2])}, r"val_idx must be a dictionary by type of nodes"),
        (CITES, "edge_index", torch.rand(2, 2), r"\('paper', 'cites', 'paper'\): edge_index: torch.float32 of shape"),
        (CITES, "edge_index", torch.tensor([0, 1]), r"\('paper', 'cites', 'paper'\): edge_index: torch.int64 of sha"),
        (CITES, "edge_attr", [1.0, 2.0], r"edge_attr of \('paper', 'cites', 'paper'\) would be lost"),
    ],
)
def test_a_field_that_does_not_fit_its_type_is_refused(kind: Any, field: str, value: Any, message: str) -> None:
    graph = _graph()
    setattr(graph if kind is None else graph[kind], field, value)
    with pytest.raises(InputError, match=message):
        load_graph(graph)


def test_labels_of_one_class_beside_a_type_without_labels() -> None:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(2, 2), torch.rand(3, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [1, 2]])
    data["a"].y = torch.tensor([1, 1])
    graph, _ = prepare(load_graph(data))
    assert graph.y.tolist() == [1, 1, -1, -1, -1]
    data["a"].y = torch.tensor([1, -1])
    with pytest.raises(InputError, match="all labels are 1 or -1"):
        prepare(load_graph(data))


def test_large_integers_to_predict_are_not_rounded() -> None:
    graph = _graph()
    kind = next(kind for kind in graph.node_types if "y" in graph[kind])
    graph[kind].y = torch.full((graph[kind].num_nodes, 2), (1 << 24) + 1)
    data = as_homogeneous(graph)
    assert data.y.nan_to_num(0).max() == (1 << 24) + 1
