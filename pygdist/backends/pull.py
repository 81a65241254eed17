"""``pull``: mini-batches sampled across ranks, whose feature rows are pulled from their owners (the baseline of P3).

DistDGL and PyG train this way: each rank trains on sampled neighbourhoods of its own nodes. The owner of a node samples
the node's in-edges. The features of all sampled nodes come from their owners in one exchange, while the previous batch
trains. Gradients are averaged. Any partition works, and every supported layer does, as a batch is a graph by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from torch import nn
from typing_extensions import override

from pygdist.backends.sampling.backend import SampledBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.sampler.base import MiniBatches
from pygdist.sampler.hot_nodes import KeptAfterEpoch, hottest, out_degrees
from pygdist.sampler.owners import NodeOwners, RemoteRows
from pygdist.sampler.steps import Fields, Steps

CacheBy = Literal["degree", "epoch"]
_GIB = 2**30


class PullBackend(SampledBackend):
    """Train on mini-batches sampled across ranks; pull the features of their nodes from the owners.

    Layers run on a batch as in plain PyG: norms over nodes take the statistics of the rank's own batch, as under PyG's
    ``NeighborLoader`` and DDP. A layer leaves out the rows that no later layer reads, unless the model reads all nodes
    at once, as norms do; a trial on the first batch tells. Evaluation runs on the whole graph, and is exact.

    Args:
        cache_gib: Memory of each rank, in GiB, for copies of other ranks' feature rows.
        cache_by: Rule for the feature rows that a rank keeps copies of. ``degree`` keeps the rows of the nodes with
            most out-edges, from the start. ``epoch`` counts the rows that the batches of the first epoch read, and
            keeps the most frequent ones from the second epoch on; counting takes 4 bytes for each node of the graph.

    Raises:
        InputError: If ``cache_gib`` is negative or not finite, or ``cache_by`` is unknown.

    Example:
        >>> data = GraphDataModule("sbm", batches=NeighborBatches([25, 10], batch_size=1000))
        >>> trainer.fit(NodeClassifier(GraphSAGE(-1, 64, 2, 10), backend="pull"), datamodule=data)
    """

    name = "pull"

    def __init__(self, *, cache_gib: float = 0.0, cache_by: CacheBy = "degree") -> None:
        super().__init__()
        if not 0 <= cache_gib < math.inf:
            raise InputError(f"cache_gib is {cache_gib}, expected a finite number of GiB, 0 or more")
        if cache_by not in get_args(CacheBy):
            raise InputError(f"cache_by is '{cache_by}', expected one of {', '.join(get_args(CacheBy))}")
        self.cache_gib, self.cache_by = cache_gib, cache_by

    @override
    def steps(self, shard: Shard, batches: MiniBatches | None, model: nn.Module, *, seed: int) -> Steps:
        batches = self.batches_of(batches)
        aside, topology = self.beside(shard, model)
        owners = topology.owners
        features = RemoteRows(shard.x, owners.row_of, shard.num_nodes, aside, label="features")
        fields = Fields(topology, features, aside, self._cached(features, shard, owners, aside))
        return batches.across_ranks(shard, fields, self.communicator, seed=seed)

    def _cached(
        self, features: RemoteRows, shard: Shard, owners: NodeOwners, communicator: Communicator
    ) -> Callable[[], None]:
        """Keep the rows asked for most, if there is memory for any; return what is to be called before an epoch."""
        row_bytes = shard.x[:1].numel() * shard.x.itemsize + shard.n_id.itemsize
        count = min(int(self.cache_gib * _GIB) // max(row_bytes, 1), shard.num_nodes)
        if not count:
            return lambda: None
        if self.cache_by == "epoch":
            return KeptAfterEpoch(features, owners, count)
        degree = out_degrees(shard.adjacency.csr(), shard.n_id, owners, communicator)
        ids = hottest(degree, count, owners, communicator)
        features.keep(ids, owners.owner_of(ids))
        return lambda: None
