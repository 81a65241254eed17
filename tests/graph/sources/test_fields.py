"""Graphs as people have them: splits by ids, arrays, datasets, sparse features, ids beyond their type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from pygdist.errors import InputError
from pygdist.graph import GraphFiles, load_graph, prepare


def _graph(**fields: Any) -> Data:
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    return Data(x=torch.rand(4, 2), edge_index=edges, y=torch.tensor([0, 1, 0, 1]), **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"train_idx": torch.tensor([0, 1]), "val_idx": torch.tensor([2]), "test_idx": torch.tensor([3])},
        {"train_idx": np.array([1, 0]), "valid_idx": [2], "test_idx": np.array([3], dtype=np.int32)},
        {"split_idx": {"train": torch.tensor([0, 1]), "valid": torch.tensor([2]), "test": torch.tensor([3])}},
        {
            "train_mask": torch.tensor([True, True, False, False]),
            "valid_mask": torch.tensor([False, False, True, False]),
            "test_idx": torch.tensor([False, False, False, True]),
        },
    ],
    ids=["ids", "lists", "dictionary", "masks"],
)
def test_a_split_may_be_given_by_ids(fields: dict[str, Any]) -> None:
    given = _graph(**fields)
    data, notes = prepare(load_graph(given))
    assert data.train_mask.tolist() == [True, True, False, False]
    assert data.val_mask.tolist() == [False, False, True, False]
    assert data.test_mask.tolist() == [False, False, False, True]
    assert not notes
    assert set(given.keys()) == {"x", "edge_index", "y", *fields}, "the user's graph stays as it is"


@pytest.mark.parametrize("ids", [torch.tensor([4]), torch.tensor([-1]), torch.rand(2), torch.tensor([[0]])])
def test_ids_that_are_no_nodes_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"train_idx of shape .* expected ids of nodes from 0 to 3"):
        load_graph(_graph(train_idx=ids))


@pytest.mark.parametrize("splits", [{"train": [0], "tset": [1]}, {"train": [0], "valid": [1], "test": [2], 0: [3]}])
def test_unknown_stages_of_a_split_are_refused(splits: dict[Any, Any]) -> None:
    with pytest.raises(InputError, match=r"split_idx: unknown keys (tset|0); expected train, valid and test"):
        load_graph(_graph(split_idx=splits))
    data = HeteroData()
    data["a"].x, data["a"].y = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    data["a", "to", "a"].edge_index = torch.tensor([[0], [1]])
    data["a"].split_idx = splits
    with pytest.raises(InputError, match=r"'a': split_idx: unknown keys (tset|0)"):
        load_graph(data)


@pytest.mark.parametrize(
    ("largest", "dtype"), [(2**24, torch.float32), (2**24 + 1, torch.float64), (2**53 + 1, None), (2**63 - 1, None)]
)
def test_integer_weights_are_not_rounded(largest: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    graph = load_graph(_graph(edge_weight=torch.tensor([1, 2, -3, largest])))
    if dtype is None:
        with pytest.raises(InputError, match=f"edge_weight: edge 3 has weight {largest}, which float64 rounds"):
            prepare(graph)
    else:
        data, notes = prepare(graph)
        assert data.edge_weight.tolist() == [1, 2, -3, largest]
        assert data.edge_weight.dtype is dtype
        assert any(f"converted edge_weight from int64 to {dtype}".replace("torch.", "") in note for note in notes)
    for name in ("edge_index", "edge_weight"):
        np.save(tmp_path / f"{name}.npy", graph[name].numpy())
    (tmp_path / "scratch").mkdir()
    if dtype is torch.float32:
        assert GraphFiles(edges=tmp_path).open(tmp_path / "scratch").dtypes["edge_weight"] == np.float32
        return
    with pytest.raises(InputError, match=rf"edge_weight.npy: edge 3 has weight {largest}, which float32 rounds"):
        GraphFiles(edges=tmp_path).open(tmp_path / "scratch")


def test_fields_may_be_arrays() -> None:
    plain = _graph()
    arrays = Data(**{name: value.numpy() for name, value in plain.items()})
    arrays.y = arrays.y.astype(np.uint16)
    for data in (prepare(load_graph(arrays))[0], prepare(arrays)[0]):
        assert torch.equal(data.x, plain.x)
        assert torch.equal(data.y, plain.y)
        assert torch.equal(data.edge_index, plain.edge_index)


class One(InMemoryDataset):
    """A dataset of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.slices = self.collate([_graph()])


def test_a_dataset_object_is_a_source() -> None:
    assert load_graph(One()).num_edges == 4


def test_features_may_be_a_matrix_of_scipy() -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    plain = _graph()
    data, _ = prepare(load_graph(Data(x=sparse.csr_matrix(plain.x.numpy()), edge_index=plain.edge_index)))
    assert torch.equal(data.x, plain.x)


def test_ids_beyond_their_type_are_refused() -> None:
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.rand(4, 2), torch.rand(3, 2)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 5], [1, 0]])
    with pytest.raises(
        InputError, match=r"the source of edge 1 of \('paper', 'cites', 'paper'\) is node 5, but 'paper'"
    ):
        load_graph(data)
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0, 1], [1, -1]])
    with pytest.raises(InputError, match=r"the target of edge 1 .* is node -1"):
        load_graph(data)


def test_sparse_features_of_a_type_are_made_dense() -> None:
    data = HeteroData()
    data["a"].x = torch.eye(3).to_sparse()
    data["a", "to", "a"].edge_index = torch.tensor([[0], [1]])
    assert torch.equal(load_graph(data).x[:, :3], torch.eye(3))
