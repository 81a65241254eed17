"""The placement *columns*: each part has its columns of all nodes' features, and otherwise what *nodes* has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pygdist import InputError, Shard
from pygdist.backends import CommBackend
from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of
from pygdist.graph import GraphFiles, degree_corrected_sbm, read_meta
from pygdist.partition import partition_graph


def graph(width: int) -> Data:
    return degree_corrected_sbm(80, num_classes=3, num_features=max(width, 1), seed=2)


@pytest.mark.parametrize("width", [7, 2])
def test_columns_of_all_parts_are_the_features(width: int, tmp_path: Path) -> None:
    data = graph(width)
    data.x = data.x[:, :width]
    for placement in ("columns", "nodes"):
        partition_graph(data, tmp_path / placement, num_parts=3, placement=placement, partitioner="hash")
    meta = read_meta(tmp_path / "columns")
    assert meta["method"] == "hash"
    assert meta["num_features"] == width
    parts = [Shard.load(tmp_path / "columns", part) for part in range(3)]
    assert torch.equal(torch.cat([part.columns for part in parts], dim=1), data.x)
    for number, part in enumerate(parts):
        assert part.columns is not None
        assert part.columns.shape == (80, len(range(width)[columns_of(width, number, 3)]))
        other = Shard.load(tmp_path / "nodes", number)
        assert torch.equal(part.n_id, other.n_id)
        assert torch.equal(part.adjacency.csr().index, other.adjacency.csr().index)
        assert part.x.shape == other.x.shape
        assert bool(part.x.isnan().all())
        assert part.x.untyped_storage().nbytes() == part.x.itemsize
        moved = part.astype(torch.float64).to("cpu")
        assert moved.x.untyped_storage().nbytes() == 8
        assert moved.columns is not None
        assert moved.columns.dtype == torch.float32, "as on disk"
        assert not (tmp_path / "columns" / f"part_{number}" / "x.npy").exists()


def test_the_default_method_is_hash(tmp_path: Path) -> None:
    assert partition_graph(graph(4), tmp_path / "store", num_parts=2, placement="columns")["method"] == "hash"


def test_half_precision_stays_on_disk(tmp_path: Path) -> None:
    data = graph(5)
    np.save(tmp_path / "x.npy", data.x.numpy().astype(np.float16))
    np.save(tmp_path / "edge_index.npy", data.edge_index.numpy())
    files = GraphFiles(edges=tmp_path / "edge_index.npy", num_nodes=80, features=tmp_path / "x.npy")
    partition_graph(files, tmp_path / "store", num_parts=2, placement="columns")
    stored = np.load(tmp_path / "store" / "part_1" / "columns.npy")
    assert stored.dtype == np.float16
    assert np.array_equal(stored, np.load(tmp_path / "x.npy")[:, columns_of(5, 1, 2)])
    assert Shard.load(tmp_path / "store", 1).x.dtype == torch.float32


def test_a_backend_for_other_parts_refuses_them(tmp_path: Path) -> None:
    partition_graph(graph(4), tmp_path / "store", num_parts=1, placement="columns")
    with pytest.raises(InputError, match="needs placement nodes, but the graph was partitioned with placement columns"):
        CommBackend().bind(Shard.load(tmp_path / "store", 0), Communicator())


def test_columns_of_a_wrong_width_are_refused(tmp_path: Path) -> None:
    partition_graph(graph(4), tmp_path / "store", num_parts=2, placement="columns")
    path = tmp_path / "store" / "part_0" / "columns.npy"
    np.save(path, np.load(path)[:, :1])
    with pytest.raises(InputError, match=r"columns\.npy: is damaged"):
        Shard.load(tmp_path / "store", 0)
