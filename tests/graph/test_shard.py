"""A shard: one rank's part of a store as tensors, with or without what surrounds it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard, Surroundings, hold_out, write_store
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
    with pytest.raises(InputError, match="has 3 parts, but the run has 2 ranks"):
        Shard.load(store, 0, num_parts=2)


# --- the placement replicas -------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2, 3], ids=lambda num_hops: f"{num_hops}-hops")
def replicas(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    data, part = random_graph("empty-part")
    options = {"num_hops": request.param, "placement": "replicas", "method": "test", "arguments": {}}
    write_store(data, part[3], tmp_path / f"replicas-{request.param}", num_parts=3, **options)  # type: ignore[arg-type]
    return tmp_path / f"replicas-{request.param}"


def _around(shard: Shard) -> Surroundings:
    assert shard.surroundings is not None
    return shard.surroundings


def _assert_same(shard: Shard, other: Shard) -> None:
    for name, value in vars(shard).items():
        expected = getattr(other, name)
        if isinstance(value, Adjacency):
            assert (value.num_src, value.num_dst) == (expected.num_src, expected.num_dst)
            for mine, theirs in zip(
                (value.csr().indptr, value.csr().index), (expected.csr().indptr, expected.csr().index), strict=True
            ):
                assert mine.dtype == theirs.dtype
                assert torch.equal(mine, theirs)
        elif isinstance(value, torch.Tensor):
            assert value.dtype == expected.dtype, name
            assert torch.equal(value, expected), name
        elif name == "plan":
            assert torch.equal(value.send_index, expected.send_index)
            assert (value.send_counts, value.recv_counts) == (expected.send_counts, expected.recv_counts)
        elif name not in ("folder", "surroundings"):
            assert value == expected, name


@pytest.mark.parametrize("rank", range(3))
def test_the_shard_is_that_of_the_placement_of_nodes(rank: int, store: Path, replicas: Path) -> None:
    shard, expected = Shard.load(replicas, rank, num_parts=3), Shard.load(store, rank)
    assert expected.surroundings is None
    _assert_same(shard, expected)
    _assert_same(shard.astype(torch.float32), expected.astype(torch.float32))


@pytest.mark.parametrize("rank", range(3))
def test_surroundings_are_the_graph(rank: int, replicas: Path) -> None:
    data, _ = random_graph("empty-part")
    shard = Shard.load(replicas, rank)
    around = _around(shard)
    assert len(around.ends) == around.num_hops + 1
    assert around.ends[0] == shard.num_owned
    assert around.ends[1] == shard.n_id.numel()
    assert around.ends[-1] == around.n_id.numel() == around.adjacency.num_src == around.adjacency.num_dst
    assert torch.equal(around.n_id[: around.ends[1]], shard.n_id)
    assert torch.equal(around.x, data.x[around.n_id])
    ends = around.adjacency.as_tensor()
    assert torch.equal(around.n_id[ends], data.edge_index[:, around.e_id])
    for name in ("edge_weight", "edge_attr", "edge_type"):
        assert torch.equal(getattr(around, name), data[name][around.e_id])
    # inner rows have all their edges, those of the rim are told how many they would have
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)[around.n_id]
    assert torch.equal(around.in_degree[:, 0], degree.double())
    inner = around.ends[-2]
    assert torch.equal(around.adjacency.csr().indptr.diff()[:inner], degree[:inner])
    assert bool(((ends[0] < inner) | (ends[1] < inner) | (ends[0] == ends[1])).all())
    assert repr(around).startswith(f"Surroundings(rows within 0 to {around.num_hops} hops: ({around.ends[0]}, ")


def test_what_is_converted_is_held_once(replicas: Path) -> None:
    shard = Shard.load(replicas, 0)
    assert shard.astype(torch.float64) is shard
    assert shard.to("cpu") is shard
    half = shard.astype(torch.float32)
    around, before = _around(half), _around(shard)
    assert (around.x.dtype, around.edge_weight.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
    assert (around.in_degree.dtype, around.edge_type.dtype) == (torch.float64, torch.int64)  # type: ignore[union-attr]
    assert around.adjacency is before.adjacency
    assert torch.equal(around.x, before.x.float())
    for name in ("x", "n_id", "e_id", "edge_weight", "edge_attr", "edge_type"):
        assert getattr(half, name).data_ptr() == getattr(around, name).data_ptr(), name
    # but what somebody changed is theirs
    other = shard.replace(x=shard.x * 2).astype(torch.float32)
    assert torch.equal(other.x, (shard.x * 2).float())
    assert torch.equal(_around(other).x, around.x)
    assert shard.replace(x=half.x).astype(torch.float64).x.dtype == torch.float64


def test_surroundings_move_with_the_shard(replicas: Path) -> None:
    shard = Shard.load(replicas, 0).to("meta")
    around = _around(shard)
    assert {
        value.device.type for one in (shard, around) for value in vars(one).values() if hasattr(value, "device")
    } == {"meta"}
    assert shard.x.untyped_storage()._cdata == around.x.untyped_storage()._cdata
    assert shard.plan.send_index.device.type == "meta"


def test_surroundings_go_where_edges_are_held_out(replicas: Path) -> None:
    shard = Shard.load(replicas, 0)
    assert shard.replace(rank=1).surroundings is shard.surroundings
    assert hold_out(shard, (0.1, 0.1)).surroundings is None


def test_without_features_and_values_of_edges(tmp_path: Path) -> None:
    data, part = random_graph("directed")
    for name in ("edge_weight", "edge_attr", "edge_type", "x"):
        del data[name]
    data.num_nodes = len(part[2])
    options = {"placement": "replicas", "method": "test", "arguments": {}}
    write_store(data, part[2], tmp_path / "plain", num_parts=2, fingerprint="none", **options)  # type: ignore[arg-type]
    shard = Shard.load(tmp_path / "plain", 1)
    around = _around(shard.astype(torch.float64))
    assert (shard.x.shape, around.x.shape) == ((shard.num_owned, 0), (around.ends[-1], 0))
    assert around.in_degree.shape == (around.ends[-1], 2)
    assert around.edge_weight is None


@pytest.mark.parametrize("placement", ["nodes", "replicas"])
def test_checksums_may_have_been_compared_before(placement: str, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    options = {"placement": placement, "method": "test", "arguments": {}}
    write_store(data, part[2], tmp_path / "store", num_parts=2, **options)  # type: ignore[arg-type]
    path = tmp_path / "store" / "part_1" / "x.npy"
    np.load(path, mmap_mode="r+")[0, 0] += 1
    with pytest.raises(InputError, match=r"part_1/x.npy: is damaged, its checksum"):
        Shard.load(tmp_path / "store", 1)
    Shard.load(tmp_path / "store", 1, verify=False)
    Shard.load(tmp_path / "store", 0)
