"""A shard: one rank's part of a store as tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.testing import random_graph


@pytest.fixture
def store(tmp_path: Path) -> Path:
    data, part = random_graph("empty-part")
    write_store(data, part[3], tmp_path / "store", num_parts=3, method="test", arguments={})
    return tmp_path / "store"


def test_parts_are_the_graph(store: Path) -> None:
    data, part = random_graph("empty-part")
    shards = [Shard.load(store, rank, num_parts=3) for rank in range(3)]
    assert [shard.num_owned for shard in shards] == [int((part[3] == rank).sum()) for rank in range(3)]
    assert shards[2].num_owned == 0
    for shard in shards:
        ends = shard.adjacency.as_tensor()
        assert torch.equal(shard.n_id[ends[0]], data.edge_index[0, shard.e_id])
        assert torch.equal(shard.n_id[ends[1]], data.edge_index[1, shard.e_id])
        assert torch.equal(shard.x, data.x[shard.owned_id])
        assert shard.y is not None
        assert torch.equal(shard.y, data.y[shard.owned_id])
        assert shard.counts["train_mask"] == int(data.train_mask.sum())
        assert (shard.plan.num_received, shard.num_nodes, shard.num_classes) == (shard.num_halo, 37, 3)
    assert repr(shards[2]) == "Shard(2 of 3: 0 nodes, 0 halo rows, 0 edges)"


def test_types(store: Path) -> None:
    shard = Shard.load(store, 0)
    assert shard.to("cpu") is shard
    assert shard.astype(torch.float64) is shard
    half = shard.astype(torch.float32)
    assert (half.x.dtype, half.edge_weight.dtype, half.y.dtype) == (torch.float32, torch.float32, torch.int64)  # type: ignore[union-attr]
    assert half.adjacency is shard.adjacency


def test_changes_never_reach_the_files(store: Path) -> None:
    shard = Shard.load(store, 0)
    before = shard.x.clone()
    shard.x.zero_()
    assert torch.equal(Shard.load(store, 0).x, before)


def test_another_number_of_ranks_is_refused(store: Path) -> None:
    with pytest.raises(InputError, match="made for 3 parts, but the run has 2 ranks"):
        Shard.load(store, 0, num_parts=2)
