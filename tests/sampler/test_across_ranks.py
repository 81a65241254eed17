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
from pygdist.sampler.across_ranks import DistributedNeighborSampler
from pygdist.sampler.hot_nodes import hottest, out_degrees
from pygdist.sampler.owners import NodeOwners, RemoteRows
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
    owners = NodeOwners(owned, lambda ids: _owner_of(ids) % world_size, NODES)
    sampler = DistributedNeighborSampler(
        part, torch.arange(NODES), owners, communicator, fan_out, replace=replace, seed=2**63 + 1
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
    owners = NodeOwners(owned, lambda ids: _owner_of(ids) % world_size, NODES)
    sampler = DistributedNeighborSampler(part, torch.arange(NODES), owners, Communicator(dist.new_group()), [2])
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
        patch.setattr("pygdist.sampler.owners._IDS_AT_A_TIME", 8)
        mine = (owner == rank).nonzero().view(-1)
        owners = NodeOwners.of(mine, NODES, communicator)
        assert torch.equal(owners.owner_of(nodes.flip(0)), owner.flip(0))
        assert torch.equal(owners.row_of(mine.flip(0)), torch.arange(mine.numel()).flip(0))
        with pytest.raises(InputError, match="1 of 90 nodes have no owner, 1 have two"):
            NodeOwners.of(torch.cat([mine[1:], nodes[owner == 1][:1]]) if rank == 0 else mine, NODES, communicator)


def test_all_ranks_know_the_owners(pool: RankPool) -> None:
    pool.run(owners_on_ranks, 3)


def wrong_owners_on_ranks(rank: int, world_size: int) -> None:
    part, owned = part_of_rank(random_graph(NODES, EDGES), rank, world_size, perm=False)
    communicator, columns = Communicator(dist.new_group()), torch.arange(NODES)

    def sampler(csr: CSR, ids: Tensor, shift: int = 0, column_id: Tensor = columns) -> DistributedNeighborSampler:
        owners = NodeOwners(ids, lambda nodes: (_owner_of(nodes) + shift) % world_size, NODES)
        return DistributedNeighborSampler(csr, column_id, owners, communicator, [2])

    with pytest.raises(InputError, match="owner_of names another rank for nodes in the owned_id of rank 0"):
        sampler(part, owned, 1)
    without = CSR(part.indptr[:-1], part.index[: int(part.indptr[-2])], NODES)
    with pytest.raises(InputError, match="the ranks own 89 nodes, but the graph has 90"):
        sampler(without if rank else part, owned[:-1] if rank else owned)
    with pytest.raises(InputError, match=f"the matrix of in-edges has {part.num_rows if rank else '[0-9]+'} rows"):
        sampler(part, owned[:-1] if rank else owned)
    with pytest.raises(InputError, match=r"column_id must be in 0\.\.89"):
        sampler(part, owned, 0, columns + rank)
    with pytest.raises(InputError, match=r"1 ids of owned nodes are not in 0\.\.89"):
        NodeOwners.of(torch.tensor([90]) if rank else owned, NODES, communicator)


def test_owners_that_do_not_fit_are_refused(pool: RankPool) -> None:
    pool.run(wrong_owners_on_ranks, 2)


def rows_on_ranks(rank: int, world_size: int, dtype: torch.dtype) -> None:
    communicator, nodes = Communicator(dist.new_group()), torch.arange(NODES)
    rows = torch.arange(NODES * 3).view(NODES, 3).to(dtype)
    owner = _owner_of(nodes) % world_size
    mine = (owner == rank).nonzero().view(-1)
    remote = RemoteRows(rows[mine], lambda ids: torch.searchsorted(mine, ids), NODES, communicator, label="features")
    wanted = [torch.randperm(NODES, generator=torch.Generator().manual_seed(seed))[:50] for seed in (rank, 7)]
    wanted.append(nodes[:0] if rank else torch.tensor([5, 5, 0]))
    remote.asked = torch.zeros(NODES, dtype=torch.int32)
    for ids in wanted:
        assert torch.equal(remote.fetch(ids, owner[ids]), rows[ids])
    of_others = torch.cat(wanted)[owner[torch.cat(wanted)] != rank]
    assert torch.equal(remote.asked.long(), torch.bincount(of_others, minlength=NODES))
    assert communicator.meter.total.bytes_by_label["features, rows"] % (3 * dtype.itemsize) == 0
    kept = nodes[owner != rank].flip(0)[: 20 if rank else 0]  # of one rank none
    remote.keep(kept, owner[kept])
    before = communicator.meter.total.received_bytes
    assert torch.equal(remote.fetch(kept, owner[kept]), rows[kept])
    assert communicator.meter.total.received_bytes - before == 8 * (world_size - 1), "lengths alone"
    assert torch.equal(remote.fetch(wanted[0], owner[wanted[0]]), rows[wanted[0]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8], ids=str)
def test_rows_come_from_their_owners(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(rows_on_ranks, 3, dtype)


def hot_on_ranks(rank: int, world_size: int) -> None:
    csr, communicator, nodes = random_graph(NODES, EDGES), Communicator(dist.new_group()), torch.arange(NODES)
    part, owned = part_of_rank(csr, rank, world_size, perm=False)
    owners = NodeOwners(owned, lambda ids: _owner_of(ids) % world_size, NODES)
    degree = out_degrees(part, nodes, owners, communicator)
    whole = torch.bincount(csr.index, minlength=NODES)
    assert torch.equal(degree, whole[owned])
    others = nodes[owners.owner_of(nodes) != rank]
    for count in (0, 7, NODES):
        ids = hottest(degree, count, owners, communicator)
        assert not bool((owners.owner_of(ids) == rank).any())
        assert ids.unique().numel() == ids.numel() == min(count, others.numel())
        assert torch.equal(whole[ids], whole[others].sort(descending=True).values[:count])


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_nodes_with_most_edges_are_found(pool: RankPool, world_size: int) -> None:
    pool.run(hot_on_ranks, world_size)
