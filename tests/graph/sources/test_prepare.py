"""Preprocessing: each mistake has its line, each change is named, and edges keep their values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import check, fingerprint, prepare
from pygdist.graph.sources.prepare import labelled_nodes

NAN = float("nan")


def graph(**changes: Any) -> Data:
    """A path of four nodes, one of them unlabelled; ``None`` removes a field."""
    fields: dict[str, Any] = {
        "x": torch.arange(8.0).reshape(4, 2),
        "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]]),
        "y": torch.tensor([0, 1, 2, -1]),
        **changes,
    }
    return Data(**{name: value for name, value in fields.items() if value is not None})


def test_check_accepts_what_datasets_hold() -> None:
    check(graph(), num_classes=3)
    check(graph(y=None, edge_weight=torch.ones(3), edge_attr=torch.ones(3, 2)))
    check(graph(y=torch.tensor([[0.0], [1.0], [2.0], [NAN]])))
    check(graph(y=torch.tensor([[0.0, 1.0], [1.0, 1.0], [NAN, NAN], [0.5, 0.0]])), num_classes=2)
    check(graph(y=torch.ones(4, 3, dtype=torch.bool), train_mask=torch.tensor([0, 1, 1, 0])))
    check(graph(edge_index=torch.empty(2, 0, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": None}, "x: the graph has no node features"),
        ({"x": torch.ones(4)}, r"x: shape \(4,\), expected"),
        ({"x": torch.empty(0, 2)}, "x: the graph has no nodes"),
        ({"x": torch.tensor([[1.0], [NAN], [1.0], [float("inf")]])}, "x: 2 of 4 nodes hold NaN .* first is node 1"),
        ({"x": torch.ones(4, 2, dtype=torch.complex64)}, "x: torch.complex64"),
        ({"x": torch.tensor([[1.0], [NAN], [1.0], [1.0]]).to_sparse()}, "x: 1 of 4 stored values"),
        ({"edge_index": None}, "edge_index: is missing"),
        ({"edge_index": torch.tensor([[0, 1, 2]])}, r"edge_index: shape \(1, 3\)"),
        ({"edge_index": torch.ones(2, 3)}, "edge_index: torch.float32, expected integers"),
        ({"edge_index": torch.tensor([[0, 1], [1, 4]])}, "edge_index: edge 1 goes from 1 to 4, but .* nodes 0 to 3"),
        ({"edge_index": torch.tensor([[-1], [1]])}, "edge_index: edge 0 goes from -1 to 1"),
        ({"edge_weight": torch.ones(2)}, r"edge_weight: shape \(2,\), expected one entry for each of 3 edges"),
        ({"edge_weight": torch.ones(3, 2)}, "edge_weight: shape .* use edge_attr for vectors"),
        ({"edge_weight": torch.tensor([1.0, NAN, 1.0])}, "edge_weight: 1 of 3 edges .* first is edge 1"),
        ({"edge_attr": torch.tensor([[1.0], [1.0], [NAN]])}, "edge_attr: 1 of 3 edges .* first is edge 2"),
        ({"y": torch.zeros(3)}, r"y: shape \(3,\), expected one label for each of 4 nodes"),
        ({"y": torch.tensor([0.5, -float("inf"), 1.0, 1.0])}, "y: node 1 has inf to predict"),
        ({"y": torch.tensor([[0.5, 2.0]] * 3 + [[NAN, 0.0]])}, "y: node 3 has NaN for some of its numbers only"),
        ({"y": torch.ones(4, 2, 0)}, r"y: shape \(4, 2, 0\), expected one label for each of 4 nodes"),
        ({"y": torch.tensor([0.0, 1.0, float("inf"), 1.0])}, "y: node 2 has label inf"),
        ({"y": torch.tensor([0, 1, -2, 1])}, "y: node 2 has label -2; classes start at 0, and -1 means unlabelled"),
        ({"y": torch.zeros(4, dtype=torch.complex64)}, "y: torch.complex64"),
        ({"y": torch.tensor([[0.0, NAN]] * 4)}, "y: node 0 has NaN in some label columns only"),
        ({"train_mask": torch.ones(3, dtype=torch.bool)}, r"train_mask: shape \(3,\), expected \(4,\)"),
        ({"test_mask": torch.tensor([0, 1, 2, 3])}, "test_mask: torch.int64 with values other than 0 and 1"),
    ],
)
def test_check_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(graph(**changes))


@pytest.mark.parametrize(
    ("y", "num_classes", "message"),
    [
        (torch.tensor([0, 3, 5, 1]), 3, "y: 2 labels out of range, the first is 3 at node 1, but num_classes is 3"),
        (torch.zeros(4, 2), 3, "y: 2 label columns, but num_classes is 3"),
        (torch.tensor([[0.0, 1.0]] * 3 + [[2.0, 0.0]]), 2, "y: the label matrix of node 3 holds values outside 0 to 1"),
        (torch.zeros(4, 2, 2), 2, r"y: shape \(4, 2, 2\), but num_classes is 2"),
        (torch.tensor([0.0, 0.5, 1.0, 1.0]), 2, "y: node 1 has label 0.5, expected whole numbers"),
        (torch.zeros(4), 0, "num_classes is 0, expected 1 to"),
        (torch.zeros(4), 10**30, "num_classes is 10+, expected 1 to"),
    ],
)
def test_check_refuses_other_classes(y: torch.Tensor, num_classes: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(graph(y=y), num_classes=num_classes)


def test_prepare_leaves_a_clean_graph_alone() -> None:
    data = graph(train_mask=torch.tensor([True, False, False, False]))
    data.val_mask, data.test_mask = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]]).bool()
    prepared, notes = prepare(data)
    assert notes == []
    assert prepared.num_classes == 3
    for name in data.keys():  # noqa: SIM118 - Data is no mapping
        assert torch.equal(prepared[name], data[name])
    assert prepared.x.data_ptr() == data.x.data_ptr()


def test_prepare_unifies_types_and_says_so() -> None:
    data = graph(
        x=torch.arange(8).reshape(4, 2),
        y=torch.tensor([[1.0], [0.0], [NAN], [2.0]]),
        edge_weight=torch.ones(3, 1, dtype=torch.float64),
        edge_attr=torch.ones(3, 2, dtype=torch.float16),
        pos=torch.zeros(4, 3),
    )
    prepared, notes = prepare(data, num_classes=5)
    assert prepared.x.dtype == torch.int64
    assert prepared.y.tolist() == [1, 0, -1, 2]
    assert prepared.y.dtype == torch.int64
    assert prepared.edge_weight.dtype == torch.float64
    assert prepared.edge_weight.shape == (3,)
    assert prepared.edge_attr.dtype == torch.float32
    assert prepared.num_classes == 5
    assert "pos" not in prepared
    assert "left out unused attributes: pos" in notes
    assert "converted edge_attr from float16 to float32" in notes
    assert "converted y from float32 to int64 classes" in notes
    assert data.x.dtype == torch.int64, "the dataset's own object is not changed"


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_prepare_makes_sparse_features_dense(layout: torch.layout) -> None:
    dense = torch.eye(4)
    prepared, notes = prepare(graph(x=dense.to_sparse(layout=layout)))
    assert torch.equal(prepared.x, dense)
    assert "made sparse features dense: 4 x 4" in notes


def test_prepare_keeps_float64_features() -> None:
    assert prepare(graph(x=torch.ones(4, 2, dtype=torch.float64)))[0].x.dtype == torch.float64


def test_label_matrix() -> None:
    y = torch.tensor([[0, 1], [1, 1], [1, 0], [0, 0]], dtype=torch.float64)
    y[2] = NAN
    prepared, _ = prepare(graph(y=y), split=(1.0, 0.0, 0.0))
    assert prepared.y.dtype == torch.float32
    assert prepared.num_classes == 2
    assert labelled_nodes(prepared.y).tolist() == [True, True, False, True]
    assert prepared.train_mask.tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("y", "float_labels", "shape", "dtype"),
    [
        (torch.tensor([0.5, -1.0, NAN, 2.0]), False, (4, 1), torch.float32),
        (torch.tensor([3.0, -1.0, NAN, 2.0], dtype=torch.float64), True, (4, 1), torch.float64),
        (torch.tensor([[0.0, 1.0], [0.0, 1.0], [NAN, NAN], [1.0, 0.0]]), True, (4, 2), torch.float32),
        (
            torch.tensor([[0.5, 7.0], [0.0, 1.0], [NAN, NAN], [1.0, 0.0]], dtype=torch.float16),
            False,
            (4, 2),
            torch.float32,
        ),
        (torch.arange(24, dtype=torch.int32).reshape(4, 2, 3), False, (4, 2, 3), torch.int64),
        (torch.tensor([[5, -2]] * 4), False, (4, 2), torch.int64),
    ],
)
def test_numbers_to_predict_stay_as_they_are(
    y: torch.Tensor, float_labels: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    prepared, _ = prepare(graph(y=y), float_labels=float_labels, split=(1.0, 0.0, 0.0))
    assert prepared.y.dtype == dtype
    assert prepared.y.shape == shape
    assert torch.equal(torch.nan_to_num(prepared.y, nan=9.0), torch.nan_to_num(y.reshape(shape).to(dtype), nan=9.0))
    assert prepared.num_classes == 0
    assert torch.equal(prepared.train_mask, ~torch.isnan(y).reshape(4, -1).any(dim=1))


def test_whole_floats_are_classes_unless_told() -> None:
    y = torch.tensor([3.0, -1.0, 0.0, 2.0])
    assert prepare(graph(y=y))[0].y.tolist() == [3, -1, 0, 2]
    assert prepare(graph(y=y), float_labels=True)[0].y.tolist() == [[3.0], [-1.0], [0.0], [2.0]]
    with pytest.raises(InputError, match=r"y: torch.int64, but numbers to predict are floats; .*NodeClassifier"):
        prepare(graph(y=y.long()), float_labels=True)
    with pytest.raises(InputError, match=r"num_classes: labels are numbers to predict \(float_labels\), not classes"):
        prepare(graph(y=y), float_labels=True, num_classes=4)


def test_split_is_drawn_where_there_is_none() -> None:
    data = graph(x=torch.ones(100, 1), y=torch.arange(100) % 5 - 1)
    prepared, notes = prepare(data)
    again, _ = prepare(data)
    other, _ = prepare(data, split_seed=1)
    masks = torch.stack([prepared[name] for name in ("train_mask", "val_mask", "test_mask")])
    assert masks.sum(1).tolist() == [40, 20, 20]
    assert torch.equal(masks.any(0), data.y >= 0)
    assert masks.sum(0).max() == 1
    assert torch.equal(prepared.train_mask, again.train_mask)
    assert not torch.equal(prepared.train_mask, other.train_mask)
    assert notes == ["drew a random split of 80 labelled nodes into 40/20/20 (seed 0)"]


def test_a_stated_split_replaces_the_masks() -> None:
    data = graph(train_mask=torch.ones(4, dtype=torch.bool))
    prepared, notes = prepare(data, split=(0.34, 0.33, 0.33))
    assert int(prepared.train_mask.sum()) == 1
    assert "instead of the dataset's masks" in notes[0]


def test_masks_hold_labelled_nodes_only() -> None:
    data = graph(train_mask=torch.tensor([1, 0, 0, 1]), test_mask=torch.tensor([1, 1, 0, 0]))
    prepared, notes = prepare(data)
    assert prepared.train_mask.tolist() == [True, False, False, False]
    assert prepared.val_mask.tolist() == [False] * 4
    assert notes == [
        "removed 1 unlabelled nodes from train_mask",
        "the dataset has no val_mask: it is empty",
        "1 nodes are in more than one of the masks",
    ]


def test_no_labels() -> None:
    prepared, notes = prepare(graph(y=None))
    assert "y" not in prepared
    assert prepared.num_classes == 0
    assert not prepared.train_mask.any()
    assert notes == ["the graph has no labels: all masks are empty"]
    with pytest.raises(InputError, match="split: the graph has no labels"):
        prepare(graph(y=None), split=(0.5, 0.25, 0.25))


@pytest.mark.parametrize("split", [(0.5, 0.5), (0.9, 0.2, 0.1), (-0.1, 0.5, 0.5), (0.0, 0.0, 0.0)])
def test_prepare_refuses_a_split(split: Any) -> None:
    with pytest.raises(InputError, match=r"split: .* expected three shares"):
        prepare(graph(), split=split)


def test_edges_keep_their_values() -> None:
    data = graph(
        edge_index=torch.tensor([[0, 1, 1, 2, 0], [1, 0, 1, 3, 1]]),
        edge_weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        edge_attr=torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]]),
    )
    prepared, notes = prepare(data, symmetrize=True, remove_duplicates=True, remove_self_loops=True)
    edges = {
        (source, target): (weight, attribute)
        for source, target, weight, attribute in zip(
            *prepared.edge_index.tolist(),
            prepared.edge_weight.tolist(),
            prepared.edge_attr.flatten().tolist(),
            strict=True,
        )
    }
    assert edges == {(0, 1): (6.0, 3.0), (1, 0): (2.0, 2.0), (2, 3): (4.0, 4.0), (3, 2): (4.0, 4.0)}
    assert notes[:3] == [
        "removed 1 self-loops",
        "added 1 reverse edges, with the weights and attributes of the edges they reverse",
        "removed 1 duplicate edges; their weights were summed; their attributes were averaged",
    ]


edge_lists = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30)


@given(edges=edge_lists)
@settings(max_examples=60)
def test_symmetric_graph_without_duplicates(edges: list[tuple[int, int]]) -> None:
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    data = Data(x=torch.ones(6, 1), edge_index=edge_index)
    prepared, _ = prepare(data, symmetrize=True, remove_duplicates=True)
    found = list(zip(*prepared.edge_index.tolist(), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == {*edges, *((target, source) for source, target in edges)}
    again, notes = prepare(prepared, symmetrize=True, remove_duplicates=True)
    assert torch.equal(again.edge_index, prepared.edge_index)
    assert notes[0].startswith("added 0")


@given(edges=edge_lists)
@settings(max_examples=60)
def test_duplicates_add_up(edges: list[tuple[int, int]]) -> None:
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()
    weight = torch.arange(1.0, len(edges) + 1)
    prepared, _ = prepare(Data(x=torch.ones(6, 1), edge_index=edge_index, edge_weight=weight), remove_duplicates=True)
    expected = np.zeros((6, 6))
    for (source, target), value in zip(edges, weight.tolist(), strict=True):
        expected[source, target] += value
    found = np.zeros((6, 6))
    found[tuple(prepared.edge_index.numpy())] = prepared.edge_weight.numpy()
    np.testing.assert_array_equal(found, expected)
    assert list(zip(*prepared.edge_index.tolist(), strict=True)) == list(dict.fromkeys(edges)), "the order is kept"


def test_fingerprint_sees_every_field() -> None:
    data = graph(edge_weight=torch.ones(3), edge_attr=torch.ones(3, 1), train_mask=torch.ones(4, dtype=torch.bool))
    prepared, _ = prepare(data)
    seen = {fingerprint(prepared)}
    for name in ("x", "y", "edge_index", "edge_weight", "edge_attr", "train_mask"):
        changed = prepared.clone()
        changed[name].view(-1)[0] = ~changed[name].view(-1)[0] if name == "train_mask" else 3
        seen.add(fingerprint(changed))
    wider = prepared.clone()
    wider.x = wider.x.to(torch.float64)
    seen.add(fingerprint(wider))
    assert len(seen) == 8


def test_fingerprint_ignores_memory_layout() -> None:
    data, _ = prepare(graph())
    other = data.clone()
    other.edge_index = other.edge_index.t().contiguous().t()
    other.x = other.x.t().contiguous().t()
    assert fingerprint(other) == fingerprint(data)


# --- edge types -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edge_type", "message"),
    [
        (torch.zeros(2, dtype=torch.long), r"edge_type: shape \(2,\), expected one entry for each of 3 edges"),
        (torch.zeros(3), r"edge_type: torch.float32 of shape \(3,\), expected \(3,\) integers"),
        (torch.zeros(3, 2, dtype=torch.long), r"edge_type: torch.int64 of shape \(3, 2\)"),
        (torch.tensor([0, -2, 1]), "edge_type: edge 1 has type -2"),
    ],
)
def test_edge_types_that_are_none(edge_type: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(graph(edge_type=edge_type))


def test_edges_of_two_types_are_two_edges() -> None:
    edges, types = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 0]]), torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    data = graph(edge_index=edges, edge_type=types)
    merged, notes = prepare(data, remove_duplicates=True)
    assert merged.edge_index.tolist() == [[0, 0, 1], [1, 1, 0]]
    assert merged.edge_type.tolist() == [1, 0, 0]
    assert merged.edge_type.dtype == torch.int64
    assert "removed 1 duplicate edges" in notes
    both, _ = prepare(data, symmetrize=True, remove_duplicates=True)
    assert sorted(zip(*both.edge_index.tolist(), both.edge_type.tolist(), strict=True)) == [
        (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_one_hot_labels_are_classes(dtype: torch.dtype) -> None:
    y = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]]).to(dtype)
    prepared, notes = prepare(graph(y=y), split=(1.0, 0.0, 0.0))
    assert prepared.y.tolist() == [1, 0, 1, 0]
    assert prepared.num_classes == 3, "a column is a class, also without nodes"
    assert any("one-hot" in note for note in notes)
    if dtype.is_floating_point:
        y[3] = NAN
        assert prepare(graph(y=y))[0].y.tolist() == [1, 0, 1, -1]
    y[0, 0] = 1
    assert prepare(graph(y=y))[0].y.dim() == 2


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([1, -1, -1, 1]), "all labels are 1 or -1, but -1 means unlabelled"),
        (torch.tensor([1.0, -1.0, NAN, 1.0]), "all labels are 1 or -1, but -1 means unlabelled"),
        (
            torch.tensor([0.0, 1e300, 1.0, 1.0], dtype=torch.float64),
            r"y: node 1 has label 1e\+300, expected classes from 0",
        ),
        ([0, 1, "a", 2], "y: a list of <U21, expected a tensor or an array of numbers"),
        (torch.tensor([0, 1, 0, 1]).to_sparse(), r"y: a tensor of layout torch.sparse_coo, expected a dense one"),
    ],
)
def test_labels_that_are_none(y: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare(graph(y=y))


def test_categories_of_parallel_edges_have_no_average() -> None:
    edges = torch.tensor([[0, 0, 1], [1, 1, 0]])
    data = graph(edge_index=edges, edge_attr=torch.tensor([[3, 4], [3, 4], [5, 6]], dtype=torch.uint8))
    merged, notes = prepare(data, remove_duplicates=True)
    assert merged.edge_attr.tolist() == [[3, 4], [5, 6]]
    assert merged.edge_attr.dtype == torch.uint8
    assert "removed 1 duplicate edges; their attributes were equal" in notes
    data.edge_attr[1, 1] = 7
    with pytest.raises(InputError, match=r"edge_attr: edges 0 and 1 have the same ends and other torch.uint8"):
        prepare(data, remove_duplicates=True)


def test_values_of_edges_are_counted_by_the_edges() -> None:
    """PyG takes the number of edges from the field that was set first."""
    data = Data(edge_attr=torch.ones(4, 2))
    data.x, data.edge_index = torch.ones(4, 1), torch.tensor([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(InputError, match=r"edge_attr: shape \(4, 2\), expected one entry for each of 3 edges"):
        prepare(data)
    with pytest.raises(InputError, match="x: 4 rows, but num_nodes is 5"):
        prepare(graph(num_nodes=5))
