"""The in-edges that ranks hold, once or in copies: batches are the same, whoever holds what."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.kernels import CSR
from pygdist.sampler import NeighborBatches
from pygdist.sampler.across_ranks import DistributedNeighborSampler
from pygdist.sampler.topology import Topology
from pygdist.testing import RankPool
from tests.kernels.oracle import needs_library
from tests.lightning import runs

pytestmark = needs_library
SEED, FAN_OUT = 5, [3, 2]


def _sampled(rank: int, world_size: int, store: str, num_parts: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of 20 seeds, alike on all ranks, with the weights of their edges."""
    shard, communicator = Shard.load(store, rank), Communicator(dist.new_group())
    held = Topology.of(shard, ["edge_weight"], communicator, num_parts=num_parts)
    assert held.is_whole == (num_parts == 1)
    sampler = DistributedNeighborSampler(held.csr, held.column_id, held.owners, held.communicator, FAN_OUT, seed=SEED)
    weights, batches = held.by_edge_id("edge_weight"), []
    for first in range(0, 80, 20):
        found = sampler.sample(torch.arange(first, first + 20), epoch=2)
        weight = weights.fetch(found.edge, held.owners.owner_of(found.node)[found.target])
        batches.append((found.node, torch.stack([found.source, found.target]), weight))
    held.close()
    communicator.close()
    return batches


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_sampled_alike_by_any_number_of_ranks_holders_and_workers(
    num_workers: int, pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = runs.graph()
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], num_rows=160, num_cols=160)
    part = Data(x=data.x, edge_weight=data.edge_weight, edge_index=data.edge_index, train_mask=torch.arange(160) < 80)
    loader = NeighborBatches(FAN_OUT, batch_size=20, shuffle=False).loader(
        part, csr, seed=SEED, num_workers=num_workers
    )
    loader.set_epoch(2)
    expected = [(one.n_id, one.edge_index, one.edge_weight) for one in loader]
    for world_size, num_parts in ((1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (4, 1)):
        store = tmp_path_factory.mktemp("parts") / "store"
        partition = torch.arange(160) * 7 % 5 % world_size
        write_store(data, partition, store, num_parts=world_size, method="test", arguments={})
        for found in pool.run(_sampled, world_size, str(store), num_parts):
            for one, other in zip(found, expected, strict=True):
                assert all(map(torch.equal, one, other))
