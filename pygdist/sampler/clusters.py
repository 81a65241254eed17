"""Batches of whole clusters: Cluster-GCN (Chiang et al., KDD 2019)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.kernels import CSR
from pygdist.partition import Partitioner, resolve_partitioner
from pygdist.sampler import _native
from pygdist.sampler.base import BatchLoader, InducedBatches, MiniBatches, check_at_least, check_part, load_all
from pygdist.sampler.csr_neighbors import check_seed
from pygdist.sampler.epoch import SharedEpoch


class ClusterBatches(MiniBatches):
    """Batches of random clusters of nodes, with all edges among the nodes of a batch (Cluster-GCN, Sec. 3.2).

    Each epoch draws other groups of clusters. Every training node is in one batch of an epoch. Clusters without
    training nodes are not drawn. Unlike PyG's ``ClusterData``, this class needs neither pyg-lib nor torch_sparse.

    Args:
        num_clusters: Number of clusters into which a part is divided, at most one for each row of the part.
        clusters_per_batch: Number of clusters in a batch; the last batch of an epoch may have fewer.
        partitioner: The partitioner that makes the clusters, by name or as an object.
        partitioner_args: Arguments of the partitioner, if the partitioner is given by name.

    Raises:
        InputError: If a number is below 1, or there is no such partitioner.

    Example:
        >>> batches = ClusterBatches(1500, clusters_per_batch=20).loader(part, csr, seed=0)
    """

    def __init__(
        self,
        num_clusters: int,
        clusters_per_batch: int = 1,
        partitioner: str | Partitioner = "metis",
        partitioner_args: dict[str, Any] | None = None,
    ) -> None:
        self.num_clusters = check_at_least("num_clusters", num_clusters)
        self.clusters_per_batch = check_at_least("clusters_per_batch", clusters_per_batch)
        self.partitioner = resolve_partitioner(partitioner, **(partitioner_args or {}))

    @override
    def precompute(self, part: Data, csr: CSR, *, seed: int) -> dict[str, Tensor]:
        """Compute the ``cluster`` of each row; see :meth:`MiniBatches.precompute`."""
        _native.require("ClusterBatches", csr)
        if not check_part(part, csr).numel():
            return {}
        edges = EdgeStream(_InEdges(csr), num_nodes=csr.num_rows)
        return {"cluster": torch.from_numpy(self.partitioner.assign(edges, min(self.num_clusters, csr.num_rows)))}

    @override
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """See :meth:`MiniBatches.loader`; uses ``part.cluster``, a number from 0 for each row, if the part has it."""
        _native.require("ClusterBatches", csr)
        seeds, epoch = check_part(part, csr), SharedEpoch()
        if not seeds.numel():
            return BatchLoader(part, [], epoch)
        cluster = (part if "cluster" in part else self.precompute(part, csr, seed=seed))["cluster"].numpy()
        order = np.argsort(cluster, kind="stable")
        members = np.split(order, np.cumsum(np.bincount(cluster))[:-1])
        train = part.train_mask.numpy()
        clusters = [torch.from_numpy(nodes) for nodes in members if train[nodes].any()]
        nodes_of = partial(_nodes_of, clusters, self.clusters_per_batch, check_seed(seed), epoch)
        batches = InducedBatches(csr, -(-len(clusters) // self.clusters_per_batch), nodes_of)
        return BatchLoader(part, load_all(batches, num_workers), epoch)


def _nodes_of(clusters: list[Tensor], per_batch: int, seed: int, epoch: SharedEpoch, number: int) -> Tensor:
    """Return the nodes of a batch, ascending."""
    order = np.random.default_rng([seed, epoch.number]).permutation(len(clusters))
    chosen = order[number * per_batch : (number + 1) * per_batch]
    return torch.cat([clusters[cluster] for cluster in chosen]).sort().values


class _InEdges:
    """A source of streams that reads the edges of a matrix, without a list of all edges."""

    def __init__(self, csr: CSR) -> None:
        self.num_edges = csr.num_entries
        self._indptr, self._index = csr.indptr.numpy(), csr.index.numpy()

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """See :class:`~pygdist.graph.EdgeSource`."""
        target = np.searchsorted(self._indptr, np.arange(start, stop), side="right") - 1
        return np.stack([self._index[start:stop].astype(np.int64), target])
