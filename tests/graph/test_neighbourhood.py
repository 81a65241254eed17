"""What other ranks answer of their in-edges, against a search over the whole graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.graph.neighbourhood import fetch_plan, in_neighbourhood, ranges
from pygdist.testing import RankPool, random_graph


def _check(rank: int, world_size: int, folder: str, kind: str, num_hops: int) -> None:
    data, parts = random_graph(kind)
    part = torch.from_numpy(parts[world_size])
    communicator = Communicator(dist.new_group(), check_order=True)
    shard = Shard.load(folder, rank)
    found = in_neighbourhood(shard, communicator, num_hops)
    source, target = data.edge_index
    assert torch.equal(found.n_id[: shard.n_id.numel()], shard.n_id)
    assert torch.equal(found.owner, part[found.n_id])

    near = part == rank  # nodes within so many hops
    for hop in range(num_hops + 1):
        have_edges = near.clone() if hop == num_hops - 1 else None
        if have_edges is not None:
            edges_of = have_edges
        if hop < num_hops:
            near = near.index_put((source[near[target]],), torch.tensor(True))
    assert set(found.n_id.tolist()) == set(near.nonzero()[:, 0].tolist())
    assert found.n_id.unique().numel() == found.n_id.numel()
    for row, node in list(enumerate(found.n_id.tolist()))[::3]:
        mine = found.n_id[found.index[found.indptr[row] : found.indptr[row + 1]]]
        assert torch.equal(mine, source[target == node]) if edges_of[node] else mine.numel() == 0

    # rows begin among the edges of their owner
    degree = found.indptr.diff()[: found.start.numel()]
    assert found.indptr[-1] == degree.sum()
    row = torch.repeat_interleave(torch.arange(found.n_id.numel()), found.indptr.diff())
    place = ranges(found.start, degree)
    for owner in range(world_size):
        there = (part[target] == owner).nonzero().squeeze(1)
        mine = found.owner[row] == owner
        edge = there[place[mine]]
        assert torch.equal(source[edge], found.n_id[found.index[mine]])
        assert torch.equal(target[edge], found.n_id[row[mine]])

    others = found.n_id[shard.num_owned :].flip(0)
    plan, order = fetch_plan(shard, communicator, others, found.owner[shard.num_owned :].flip(0))
    arrived = communicator.exchange_rows(shard.owned_id[:, None].double(), plan)
    assert torch.equal(arrived[:, 0].long(), others[order])


@pytest.mark.parametrize("world_size", [1, 3])
def test_in_edges_of_nodes_near_by(world_size: int, tmp_path: Path, pool: RankPool) -> None:
    for kind in ("directed", "empty-part"):
        data, parts = random_graph(kind)
        folder = tmp_path / kind
        write_store(data, parts[world_size], folder, num_parts=world_size, method=kind, arguments={}, notes=[])
        for num_hops in (1, 3):
            pool.run(_check, world_size, str(folder), kind, num_hops)
