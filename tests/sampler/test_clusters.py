"""Batches of whole clusters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.utils import subgraph

from pygdist.errors import InputError
from pygdist.native import library
from pygdist.partition import ChunkPartitioner, HashPartitioner
from pygdist.sampler import ClusterBatches
from pygdist.sampler.clusters import _InEdges
from tests.sampler.oracle import edges_of, part_of, random_graph

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")


def test_a_batch_is_some_clusters_with_all_edges_among_them() -> None:
    csr = random_graph(200, 3000)
    part, edges = part_of(csr), edges_of(csr)
    part.train_mask[:] = True
    partitioner = HashPartitioner(seed=2)
    loader = ClusterBatches(20, clusters_per_batch=3, partitioner=partitioner).loader(part, csr, seed=1)
    seen = []
    for batch in loader:
        wanted, _ = subgraph(batch.n_id, edges, relabel_nodes=False, num_nodes=200)
        assert sorted(batch.n_id[batch.edge_index].t().tolist()) == sorted(wanted.t().tolist())
        assert bool((batch.n_id.diff() > 0).all())
        assert torch.equal(batch.train_mask, part.train_mask[batch.n_id])
        seen += batch.n_id.tolist()
    assert len(loader) == 7  # 20 clusters, 3 at a time
    assert sorted(seen) == list(range(200))


def test_other_clusters_meet_in_each_epoch() -> None:
    csr = random_graph(200, 3000)
    loader = ClusterBatches(20, 2, partitioner=ChunkPartitioner()).loader(part_of(csr), csr, seed=1)
    together = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        together.append({tuple(batch.n_id.tolist()) for batch in loader})
    assert len(together[0] & together[1]) < 5


def test_clusters_without_training_nodes_are_not_drawn() -> None:
    csr = random_graph(200, 3000)
    part = part_of(csr)
    part.train_mask[50:] = False
    loader = ClusterBatches(10, partitioner="chunk").loader(part, csr, seed=1)
    assert 0 < len(loader) < 10
    assert all(bool(batch.train_mask.any()) for batch in loader)


def test_the_partitioner_sees_the_edges_of_the_part() -> None:
    csr = random_graph(200, 3000, permuted=False)
    source = _InEdges(csr)
    pieces = [source.read(start, min(start + 700, 3000)) for start in range(0, 3000, 700)]
    assert np.array_equal(np.concatenate(pieces, axis=1), edges_of(csr).numpy())
    assert pieces[0].dtype == np.int64


@pytest.mark.parametrize("partitioner", ["metis", "spring", "fennel", "chunk", "hdrf"])
def test_any_partitioner_serves(partitioner: str) -> None:
    csr = random_graph(200, 3000)
    loader = ClusterBatches(6, partitioner=partitioner).loader(part_of(csr), csr, seed=1)
    assert 0 < len(loader) <= 6


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match="num_clusters is 0, expected at least 1"):
        ClusterBatches(0)
    with pytest.raises(InputError, match="clusters_per_batch is 0, expected at least 1"):
        ClusterBatches(3, 0)
    with pytest.raises(InputError, match="unknown partitioner 'kmeans'"):
        ClusterBatches(3, partitioner="kmeans")
    with pytest.raises(InputError, match=r"partitioner 'hash'.*colour"):
        ClusterBatches(3, partitioner="hash", partitioner_args={"colour": 1})
