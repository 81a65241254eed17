"""Norms over all ranks where the exactness suite does not go: evaluation, special cases, errors."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_geometric.nn import BatchNorm, GraphNorm, LayerNorm

from pygdist import InputError, Shard, distribute
from pygdist.backends import CommBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.testing import RankPool, random_graph


def _check_modes(rank: int, world_size: int, store: str) -> None:
    """Several steps of training, then evaluation; cumulative averages, no affine map, no running statistics."""
    data, _ = random_graph("empty-part")
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        plain = nn.BatchNorm1d(5, **options).double()  # type: ignore[arg-type]
        ours = distribute(nn.Sequential(copy.deepcopy(plain)), backend=backend, check=False)
        for scale in (1.0, 3.0, -2.0):
            assert torch.allclose(ours(shard.x * scale), plain(data.x * scale)[shard.owned_id], rtol=0, atol=1e-10)
        plain.eval(), ours.eval()
        assert torch.allclose(ours(shard.x), plain(data.x)[shard.owned_id], rtol=0, atol=1e-10)
        for name, value in plain.state_dict().items():
            assert torch.allclose(ours.state_dict()[f"0.{name}"].double(), value.double(), rtol=0, atol=1e-12), name


def test_batch_norm_in_training_and_evaluation(pool: RankPool, tmp_path: Path) -> None:
    data, part = random_graph("empty-part")
    write_store(data, part[3], tmp_path / "store", num_parts=3, method="test", arguments={})
    pool.run(_check_modes, 3, str(tmp_path / "store"))


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return Shard.load(tmp_path / "store", 0)


def test_what_needs_several_graphs_is_refused(shard: Shard) -> None:
    backend = CommBackend()
    backend.bind(shard, Communicator())
    norm = distribute(GraphNorm(5).double(), backend=backend, check=False)
    with pytest.raises(InputError, match=r"DistributedGraphNorm: a 'batch' vector"):
        norm(shard.x, torch.zeros(37, dtype=torch.int64))
    with pytest.raises(InputError, match=r"expected rows of nodes \(n, channels\), got \(37, 5, 1\)"):
        distribute(nn.BatchNorm1d(5).double(), backend=backend, check=False)(shard.x[..., None])
    rows = LayerNorm(5, mode="node").double()
    expected = rows(shard.x)
    assert torch.equal(distribute(rows, backend=backend, check=False)(shard.x), expected)


def test_a_graph_of_one_node(shard: Shard) -> None:
    backend = CommBackend()
    backend.bind(shard.replace(num_nodes=1, num_owned=1), Communicator())
    x = shard.x[:1]
    plain = BatchNorm(5, allow_single_element=True).double()
    assert torch.equal(distribute(copy.deepcopy(plain), backend=backend, check=False)(x), plain(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        distribute(BatchNorm(5).double(), backend=backend, check=False)(x)
