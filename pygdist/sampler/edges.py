"""Batches of edges for link prediction, each with the sampled neighbourhoods of its ends (GraphSAGE, P3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, corrupted_sources, known_pairs, supervised
from pygdist.graph.links import drawn
from pygdist.kernels import CSR
from pygdist.sampler.across_ranks import DistributedNeighborSampler
from pygdist.sampler.base import BatchLoader, MiniBatches, check_at_least
from pygdist.sampler.csr_neighbors import check_fan_out, check_seed
from pygdist.sampler.epoch import ShuffledOrder
from pygdist.sampler.neighbors import sampler_of
from pygdist.sampler.steps import Fields, Steps


class EdgeBatches(MiniBatches):
    """Batches of edges and negative pairs, with the sampled neighbourhoods of all their ends.

    For :class:`~pygdist.lightning.LinkPredictor` and backends that sample across ranks (``pull``, ``pushpull``). Every
    edge except self-loops is in one batch of each epoch, on the rank that owns the edge's target. A negative pair has
    the edge's target and a random source that has no edge to this target. Negative pairs are the same on any number of
    ranks.

    Args:
        fan_out: For each hop (each layer of the model), the largest number of sampled edges into a node; -1 takes all
            edges.
        batch_size: Largest number of edges in a batch; the batches of an epoch have about equal sizes.
        negatives: Number of negative pairs for each edge.
        replace: Draw neighbours with replacement.
        shuffle: Group the edges into other batches in each epoch.

    Raises:
        InputError: If a number is out of range.

    Example:
        >>> data = GraphDataModule("sbm", edge_split=(0.05, 0.1), batches=EdgeBatches([10, 5], batch_size=1000))
        >>> trainer.fit(LinkPredictor(GraphSAGE(-1, 64, 2, 32), backend="pull"), datamodule=data)
    """

    of_edges: ClassVar[bool] = True

    def __init__(
        self,
        fan_out: Sequence[int] = (25, 10),
        batch_size: int = 1000,
        negatives: int = 1,
        replace: bool = False,
        shuffle: bool = True,
    ) -> None:
        self.fan_out = check_fan_out("fan_out", fan_out)
        self.batch_size = check_at_least("batch_size", batch_size)
        self.negatives = check_at_least("negatives", negatives)
        self.replace, self.shuffle = replace, shuffle

    @override
    def loader(self, part: Data, csr: CSR, *, seed: int, num_workers: int = 0) -> BatchLoader:
        """Refuse: the ends of an edge may lie in two parts.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "EdgeBatches have ends in two parts, but the model's backend trains each part by itself; use backend pull "
            "or pushpull"
        )

    @override
    def across_ranks(self, shard: Shard, fields: Fields, communicator: Communicator, *, seed: int) -> LinkSteps:
        """See :meth:`MiniBatches.across_ranks`."""
        sampler = sampler_of(fields, self.fan_out, replace=self.replace, seed=check_seed(seed))
        return LinkSteps(self, shard, fields, sampler, communicator, seed=seed)


class LinkSteps(Steps):
    """Batches of the edges into each rank's own nodes.

    A batch has the fields of PyG's ``LinkNeighborLoader``: ``edge_label_index``, as positions of the seeds, with edges
    first and then ``negatives`` pairs for each, and ``edge_label``.

    Args:
        batches: The kind of batches.
        shard: This rank's part.
        fields: As for :class:`Steps`, like ``sampler`` and ``communicator``.
        seed: Seed of the order and of the negative pairs.
    """

    def __init__(
        self,
        batches: EdgeBatches,
        shard: Shard,
        fields: Fields,
        sampler: DistributedNeighborSampler,
        communicator: Communicator,
        *,
        seed: int,
    ) -> None:
        self._shard, self._seed = shard, seed
        self._negatives, self._known = batches.negatives, known_pairs(shard)
        self._edges = supervised(shard).nonzero().view(-1)
        self._order = ShuffledOrder(self._edges.numel(), seed, shuffle=batches.shuffle)
        super().__init__(self._edges.numel(), batches.batch_size, fields, sampler, communicator)

    @override
    def seeds_of(self, epoch: int, step: int) -> tuple[Tensor, dict[str, Any]]:
        csr = self._shard.adjacency.csr()
        first, end = self.span(step)
        edges = self._edges[self._order.of(epoch)[first:end]]
        target = torch.searchsorted(csr.indptr, edges, right=True) - 1
        others = self._others(target, self._shard.e_id[edges], epoch)
        source = torch.cat([self._shard.n_id[csr.index[edges].long()], others.flatten()])
        pairs = torch.stack([source, self._shard.owned_id[target].repeat(1 + self._negatives)])
        seeds, place = pairs.unique(return_inverse=True)
        label = (torch.arange(pairs.size(1)) < edges.numel()).to(torch.get_default_dtype())
        count = self.num_in(step) * (1 + self._negatives)
        return seeds, {"edge_label_index": place, "edge_label": label, "num_in_step": count}

    def _others(self, target: Tensor, e_id: Tensor, epoch: int) -> Tensor:
        """Return the sources of the negative pairs, ``(negatives, k)``; the ``n``-th row by a seed of its own."""
        rows = [
            corrupted_sources(
                target, e_id, self._shard.num_nodes, known=self._known, seed=_seed_of(self._seed, number), epoch=epoch
            )
            for number in range(self._negatives)
        ]
        return torch.stack(rows)


def _seed_of(seed: int, number: int) -> int:
    """Return the seed of the ``number``-th negative pair of each edge; that of the first is ``seed`` itself."""
    return seed if not number else int(drawn(seed, torch.tensor(number)))
