"""The fields of batches whose first layer all ranks compute: their structure, and no features (P3, Sec. 3.2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_geometric.data import Data
from typing_extensions import override

from pygdist.backends.sampling.blocks import Drawn, Pusher, block_of
from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.graph.shard import unknown_rows
from pygdist.sampler._native import Sampled
from pygdist.sampler.csr_neighbors import check_seed
from pygdist.sampler.steps import Fields
from pygdist.sampler.topology import Topology


class PushedFields(Fields):
    """Gives batches their structure for all ranks, instead of features.

    Args:
        topology: As for :class:`~pygdist.sampler.steps.Fields`, like ``aside``.
        shard: This rank's part.
        aside: See ``topology``.
        groups: The ranks that hold all columns between them, for exchanges of the thread, then communicators that are
            closed with it.
        batches: The kind of batches.
        seed: Seed of all random numbers.
    """

    def __init__(
        self,
        topology: Topology,
        shard: Shard,
        aside: Communicator,
        groups: Sequence[Communicator],
        batches: Any,
        seed: int,
    ) -> None:
        super().__init__(topology, None, aside)
        self._shard, self._groups = shard, groups
        drawn = Drawn(batches.fan_out, batches.replace, check_seed(seed), topology if topology.is_whole else None)
        self._pusher = Pusher(shard.num_nodes, groups[0], drawn)

    @override
    def add_structure(self, batches: Sequence[Data], sampled: Sequence[Sampled], epoch: int) -> None:
        super().add_structure(batches, sampled, epoch)
        num_nodes = self._shard.num_nodes
        mine = [block_of(one, num_nodes, batch.get("edge_weight")) for batch, one in zip(batches, sampled, strict=True)]
        for batch, blocks in zip(batches, self._pusher.push(mine, epoch), strict=True):
            batch.x = unknown_rows(int(batch.num_nodes or 0), self._shard.x.size(1), self._shard.x.dtype)
            batch.blocks = blocks

    @override
    def close(self) -> None:
        for one in self._groups:
            one.close()
        super().close()
