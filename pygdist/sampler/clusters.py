"""Batches of whole clusters: Cluster-GCN (Chiang et al., KDD 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.kernels import CSR
from pygdist.partition import Partitioner, resolve_partitioner
from pygdist.sampler import _native
from pygdist.sampler.base import BatchLoader, MiniBatches, check_at_least, check_part, induced, load_all
from pygdist.sampler.csr_neighbors import check_seed
from pygdist.sampler.epoch import SharedEpoch

__all__ = ["ClusterBatches"]


class ClusterBatches(MiniBatches):
    """Some clusters of the part, drawn anew in each epoch, with all edges among their nodes (Cluster-GCN, Sec. 3.2).

    Every training node is in one batch of an epoch. Clusters without any are not drawn, so each batch has some. PyG's
    ``ClusterData`` does the same with pyg-lib or torch_sparse, which are not needed here.

    Args:
        num_clusters: Clusters of the part; of fewer rows as many as there are.
        clusters_per_batch: Clusters in a batch; the last one of an epoch takes what is left.
        partitioner: What cuts the part into clusters: a partitioner of pygdist, by name or itself.
        partitioner_args: Arguments of the partitioner.

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
        """See :meth:`MiniBatches.precompute`: the ``cluster`` of each row."""
        _native.require("ClusterBatches", csr)
        if not check_part(part, csr).numel():
            return {}
        edges = EdgeStream(_InEdges(csr), num_nodes=csr.num_rows)
        return {"cluster": torch.from_numpy(self.partitioner.assign(edges, min(self.num_clusters, csr.num_rows)))}

    @override
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """See :meth:`MiniBatches.loader`; ``part`` may have a ``cluster`` for each row, from 0."""
        _native.require("ClusterBatches", csr)
        seeds, epoch = check_part(part, csr), SharedEpoch()
        if not seeds.numel():
            return BatchLoader(part, [], epoch)
        known = part if "cluster" in part else self.precompute(part, csr, seed=seed)
        cluster = known["cluster"].numpy()
        order = np.argsort(cluster, kind="stable")
        members = np.split(order, np.cumsum(np.bincount(cluster))[:-1])
        train = part.train_mask.numpy()
        drawn = [torch.from_numpy(nodes) for nodes in members if train[nodes].any()]
        batches = _Subgraphs(csr, drawn, self.clusters_per_batch, check_seed(seed), epoch)
        return BatchLoader(part, load_all(batches, num_workers), epoch)


class _Subgraphs(Dataset[Data]):
    """The batches of an epoch by their numbers."""

    def __init__(self, csr: CSR, clusters: list[Tensor], per_batch: int, seed: int, epoch: SharedEpoch) -> None:
        self._csr, self._clusters = csr, clusters
        self._per_batch, self._seed, self._epoch = per_batch, seed, epoch

    def __len__(self) -> int:
        return -(-len(self._clusters) // self._per_batch)

    def __getitem__(self, number: int) -> Data:
        order = np.random.default_rng([self._seed, self._epoch.number]).permutation(len(self._clusters))
        mine = order[number * self._per_batch : (number + 1) * self._per_batch]
        nodes = torch.cat([self._clusters[one] for one in mine]).sort().values  # owned rows first, as in the part
        return induced(self._csr, nodes)


class _InEdges:
    """A stream's source over a matrix: no list of all edges is made."""

    def __init__(self, csr: CSR) -> None:
        self.num_edges = csr.num_entries
        self._indptr, self._index = csr.indptr.numpy(), csr.index.numpy()

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """See :class:`~pygdist.graph.EdgeSource`."""
        target = np.searchsorted(self._indptr, np.arange(start, stop), side="right") - 1
        return np.stack([self._index[start:stop].astype(np.int64), target])
