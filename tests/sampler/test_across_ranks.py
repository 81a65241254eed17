"""Neighbourhoods sampled across ranks are those that one process samples from the whole graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.sampler import _native
from pygdist.sampler.across_ranks import DistributedNeighborSampler, owners_of_nodes
from pygdist.testing import RankPool
from tests.kernels.oracle import needs_library
from tests.sampler.oracle import random_graph

pytestmark = needs_library
NODES, EDGES = 90, 1500


def _owner_of(ids: Tensor) -> Tensor:
    return ids * 7 % 5


def _seeds(rank: int, world_size: int) -> Tensor:
    chosen = torch.randperm(NODES, generator=torch.Generator().manual_seed(4))[:40]
    return chosen[:0] if rank == 1 else chosen[rank::world_size]  # rank 1 has none


def part_of_rank(csr: CSR, rank: int, world_size: int, *, perm: bool) -> tuple[CSR, Tensor]:
    """The in-edges of a rank's nodes, as rows of the whole matrix, with ids of edges in the whole graph."""
    owned = (_owner_of(torch.arange(csr.num_rows)) % world_size == rank).nonzero().view(-1)
    rows = [torch.arange(int(csr.indptr[node]), int(csr.indptr[node + 1])) for node in owned.tolist()]
    entries = torch.cat([*rows, torch.empty(0, dtype=torch.int64)])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), csr.indptr.diff()[owned].cumsum(0)])
    ids = None if not perm else (entries if csr.perm is None else csr.perm[entries].long())
    return CSR(indptr, csr.index[entries].contiguous(), csr.num_cols, ids), owned


def sampled_on_ranks(rank: int, world_size: int, fan_out: list[int], replace: bool, perm: bool) -> None:
    csr = random_graph(NODES, EDGES)
    part, owned = part_of_rank(csr, rank, world_size, perm=perm)
    communicator = Communicator(dist.new_group())
    sampler = DistributedNeighborSampler(
        part, owned, lambda ids: _owner_of(ids) % world_size, communicator, fan_out, replace=replace, seed=2**63 + 1
    )
    for epoch in (0, 3):
        seeds = _seeds(rank, world_size)
        found = sampler.sample(seeds, epoch=epoch)
        expected = _native.sample(csr, seeds, fan_out, replace=replace, seed=2**63 + 1, epoch=epoch)
        for name in ("node", "source", "target", *(["edge"] if perm else [])):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert found.num_nodes == expected.num_nodes
        assert found.num_edges == expected.num_edges
        assert perm or not found.edge.numel()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("replace", [True, False], ids=["replace", "no-replace"])
@pytest.mark.parametrize("perm", [True, False], ids=["edge-ids", "no-edge-ids"])
@pytest.mark.parametrize("fan_out", [[4], [3, 2], [-1, 5], [2, 2, 2]], ids=str)
def test_sampled_across_ranks(pool: RankPool, fan_out: list[int], perm: bool, replace: bool, world_size: int) -> None:
    pool.run(sampled_on_ranks, world_size, fan_out, replace, perm)


def wrong_seeds_on_ranks(rank: int, world_size: int, seeds: list[int]) -> None:
    part, owned = part_of_rank(random_graph(NODES, EDGES), rank, world_size, perm=False)
    sampler = DistributedNeighborSampler(
        part, owned, lambda ids: _owner_of(ids) % world_size, Communicator(dist.new_group()), [2]
    )
    with pytest.raises(InputError, match=r"rank 1 has seed nodes that repeat, or that are not in 0\.\.89"):
        sampler.sample(torch.tensor(seeds if rank == 1 else [5]), epoch=0)
    assert sampler.sample(torch.tensor([5]), epoch=0).num_nodes[0] == 1  # the ranks are still at one place


@pytest.mark.parametrize("seeds", [[3, 3], [90], [-1, 2]], ids=str)
def test_wrong_seeds_are_refused_on_all_ranks(pool: RankPool, seeds: list[int]) -> None:
    pool.run(wrong_seeds_on_ranks, 2, seeds)


def owners_on_ranks(rank: int, world_size: int) -> None:
    communicator, nodes = Communicator(dist.new_group()), torch.arange(NODES)
    owner = nodes * 7 % 5 % world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pygdist.sampler.across_ranks._IDS_AT_A_TIME", 8)
        found = owners_of_nodes((owner == rank).nonzero().view(-1), NODES, communicator)
        assert torch.equal(found(nodes.flip(0)), owner.flip(0))
        mine = (owner == rank).nonzero().view(-1)
        with pytest.raises(InputError, match="1 of 90 nodes have no owner, 1 have two"):
            owners_of_nodes(torch.cat([mine[1:], nodes[owner == 1][:1]]) if rank == 0 else mine, NODES, communicator)


def test_all_ranks_know_the_owners(pool: RankPool) -> None:
    pool.run(owners_on_ranks, 3)


def wrong_owners_on_ranks(rank: int, world_size: int) -> None:
    part, owned = part_of_rank(random_graph(NODES, EDGES), rank, world_size, perm=False)
    communicator = Communicator(dist.new_group())

    def sampler(csr: CSR, ids: Tensor, shift: int) -> DistributedNeighborSampler:
        return DistributedNeighborSampler(
            csr, ids, lambda nodes: (_owner_of(nodes) + shift) % world_size, communicator, [2]
        )

    with pytest.raises(InputError, match="owner_of names another rank for nodes in the owned_id of rank 0"):
        sampler(part, owned, 1)
    without = CSR(part.indptr[:-1], part.index[: int(part.indptr[-2])], NODES)
    with pytest.raises(InputError, match="the ranks hold the in-edges of 89 nodes, but the graph has 90"):
        sampler(without if rank else part, owned[:-1] if rank else owned, 0)
    with pytest.raises(InputError, match=r"1 ids of owned nodes are not in 0\.\.89"):
        owners_of_nodes(torch.tensor([90]) if rank else owned, NODES, communicator)


def test_owners_that_do_not_fit_are_refused(pool: RankPool) -> None:
    pool.run(wrong_owners_on_ranks, 2)
