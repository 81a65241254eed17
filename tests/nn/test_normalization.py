"""Degree normalisation over all ranks: kept on a fixed graph, exact and differentiable in learned edge weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pygdist import InputError, Shard, distribute
from pygdist.backends import CommBackend, Savings
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.nn import GlobalGCNNorm
from pygdist.testing import RankPool, random_graph


def _store(folder: Path, world_size: int) -> str:
    data, part = random_graph("directed")
    write_store(data, part[world_size], folder / "store", num_parts=world_size, method="test", arguments={})
    return str(folder / "store")


def _bound(rank: int, store: str) -> tuple[CommBackend, Shard]:
    backend, shard = CommBackend(), Shard.load(store, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    return backend, shard


def _check_weights(rank: int, world_size: int, store: str, options: dict[str, Any]) -> None:
    data, _ = random_graph("directed")
    backend, shard = _bound(rank, store)
    edges, weight = GlobalGCNNorm(backend)(shard.adjacency, shard.edge_weight, shard.num_owned, **options)
    expected, values = gcn_norm(data.edge_index, data.edge_weight, data.num_nodes, **options)
    wanted = torch.zeros(data.num_nodes, data.num_nodes, dtype=torch.float64)
    wanted.index_put_((expected[0], expected[1]), values, accumulate=True)
    found = torch.zeros_like(wanted)
    ends = shard.n_id[edges.as_tensor()[0]], shard.n_id[edges.as_tensor()[1]]
    found.index_put_(ends, weight, accumulate=True)
    assert torch.allclose(found[:, shard.owned_id], wanted[:, shard.owned_id], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"improved": True}, {"add_self_loops": False}], ids=str)
def test_weights_are_those_of_the_whole_graph(options: dict[str, Any], pool: RankPool, tmp_path: Path) -> None:
    pool.run(_check_weights, 3, _store(tmp_path, 3), options)


def _check_kept(rank: int, world_size: int, store: str) -> list[int]:
    backend, shard = _bound(rank, store)
    torch.manual_seed(0)
    layer = distribute(GCNConv(5, 3).double(), backend=backend, savings=Savings(first_hop=False), check=False)
    calls, weight = [], shard.edge_weight
    assert weight is not None
    for change in (False, False, True):
        if change:
            weight.mul_(2)
        layer(shard.x, shard.adjacency, weight)
        calls.append(backend.communicator.meter.reset().calls)
    return calls


def test_degrees_travel_once_and_again_when_the_weights_change(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_check_kept, 2, _store(tmp_path, 2)) == [[2, 1, 2], [2, 1, 2]]


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}], ids=str)
def test_edges_stay_the_same_object_while_weights_are_learned(options: dict[str, Any], tmp_path: Path) -> None:
    shard = Shard.load(_store(tmp_path, 1), 0)
    backend = CommBackend()
    backend.bind(shard, Communicator())
    norm = GlobalGCNNorm(backend)
    assert shard.edge_weight is not None
    found = []
    for factor in (1.0, 2.0):
        weight = (factor * shard.edge_weight).requires_grad_()
        found.append(norm(shard.adjacency, weight, shard.num_owned, **options))
        expected = GlobalGCNNorm(backend)(shard.adjacency, weight.detach(), shard.num_owned, **options)
        assert torch.equal(found[-1][1], expected[1])
    assert found[0][0] is found[1][0]


def _check_learned(rank: int, world_size: int, store: str) -> None:
    torch.manual_seed(4)  # the same layer on every rank
    data, _ = random_graph("directed")
    backend, shard = _bound(rank, store)
    layer = GCNConv(5, 3).double()
    weight = data.edge_weight.clone().requires_grad_()
    layer(data.x, data.edge_index, weight).square().sum().backward()
    assert shard.edge_weight is not None
    local = shard.edge_weight.clone().requires_grad_()
    distribute(layer, backend=backend, check=False)
    layer(shard.x, shard.adjacency, local).square().sum().backward()
    assert local.grad is not None
    assert weight.grad is not None
    assert torch.allclose(local.grad, weight.grad[shard.e_id], rtol=0, atol=1e-10)


def test_gradients_reach_learned_edge_weights_through_the_degrees(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_check_learned, 3, _store(tmp_path, 3))


def test_out_edges_are_refused() -> None:
    norm = GlobalGCNNorm(CommBackend())
    with pytest.raises(InputError, match="flow='target_to_source' needs the out-edges"):
        norm(torch.zeros(2, 0, dtype=torch.int64), flow="target_to_source")
    with pytest.raises(InputError, match="needs num_nodes"):
        norm(torch.zeros(2, 0, dtype=torch.int64))
