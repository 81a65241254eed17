"""Mini-batches across ranks: in each step every rank samples one around nodes of its own, whoever holds the rest.

Sampling and fetching are exchanges, so all ranks make the same steps; a rank without batches left takes part with none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.sampler._native import Sampled
from pygdist.sampler.across_ranks import DistributedNeighborSampler
from pygdist.sampler.epoch import ShuffledOrder
from pygdist.sampler.one_ahead import OneAhead
from pygdist.sampler.owners import RemoteRows
from pygdist.sampler.topology import Topology

_CPU = torch.device("cpu")
SAMPLING, FETCHING, NEXT_BATCH = "sampling", "fetching", "next batch"
"""Stages of mini-batches: two of the thread that makes them, and the training thread's wait for it."""
_TOGETHER = 4  # steps
_END_S = 5.0  # a thread that takes longer waits for a rank that does not answer


class Steps(ABC):
    """The steps of an epoch, in each of which a rank has a mini-batch or none; a thread makes them ahead.

    An epoch has as many steps as the rank with most examples needs, and every rank spreads its own evenly over them. So
    no step trains on a small remainder, which would count as much as a full one.

    Args:
        num_examples: Training examples of this rank: nodes or edges.
        batch_size: Most examples in a batch.
        fields: Adds rows and values of edges to a sampled batch.
        sampler: Samples neighbourhoods.
        communicator: The ranks, for exchanges of the thread that iterates.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        fields: Fields,
        sampler: DistributedNeighborSampler,
        communicator: Communicator,
    ) -> None:
        self._fields, self._sampler, self._communicator = fields, sampler, communicator
        self._made: dict[int, tuple[Data, Sampled]] = {}  # batches without rows, by step
        self._num_examples = communicator.gather([float(num_examples)])[:, 0].long()
        if not int(self._num_examples.sum()):
            raise InputError(
                "there is nothing to learn: no rank has a labelled training node, or an edge to learn from"
            )
        self._num_steps = int(-(-self._num_examples.max() // batch_size))
        self._ahead: OneAhead[Data] | None = None
        communicator.before_close(self.close)

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on all ranks."""
        return self._num_steps

    def span(self, step: int) -> tuple[int, int]:
        """Return the first of this rank's examples in a step, in the order of the epoch, and the one after the last."""
        count = int(self._num_examples[self._communicator.rank])
        return step * count // len(self), (step + 1) * count // len(self)

    def num_in(self, step: int) -> int:
        """Return the number of examples of all ranks in a step."""
        counts = self._num_examples
        return int(((step + 1) * counts // len(self) - step * counts // len(self)).sum())

    @abstractmethod
    def seeds_of(self, epoch: int, step: int) -> tuple[Tensor, dict[str, Any]]:
        """Return the seeds of this rank's batch in a step, and further fields of the batch.

        ``num_in_step`` is one: the number of terms in the loss of all ranks, which are seeds or pairs of nodes.
        """

    def make(self, epoch: int, step: int) -> Data:
        """Make this rank's batch of a step, without seeds if it has none left; every rank makes the call.

        Fields are those of PyG's loaders, but ``y`` has labels of the seeds alone. Some steps are sampled at once, as
        small messages wait long behind large ones.
        """
        if step not in self._made:
            together = range(step, min(step + _TOGETHER, len(self)))
            chosen = [self.seeds_of(epoch, one) for one in together]
            with self._communicator.meter.stage(SAMPLING):
                sampled = self._sampler.sample_all([seeds for seeds, _ in chosen], epoch=epoch)
            batches = [as_data(one).update(fields) for one, (_, fields) in zip(sampled, chosen, strict=True)]
            with self._communicator.meter.stage(FETCHING):
                self._fields.add_structure(batches, sampled, epoch)
            self._made = dict(zip(together, zip(batches, sampled, strict=True), strict=True))
        batch, structure = self._made.pop(step)
        with self._communicator.meter.stage(FETCHING):
            self._fields.add_rows(batch, structure)
        return batch

    def epoch(self, number: int, first: int = 0) -> Iterator[Data]:
        """Iterate over the steps of an epoch from step ``first``; every rank does, and stops after as many."""
        self.close(None)  # the thread of an epoch that was cut

        def make(step: int) -> Data:
            if step == first:
                self._made = {}
                self._fields.begin_epoch()
            return self.make(number, step)

        ahead = self._ahead = OneAhead(make, range(first, len(self)), self._fields.depth)
        try:
            for _ in range(first, len(self)):
                self._communicator.begin_wait("next batch")
                meter = self._communicator.meter
                with meter.waiting(_CPU), meter.stage(NEXT_BATCH):
                    batch = ahead.take()
                self._communicator.done()
                yield batch
        finally:
            ahead.close(_END_S)

    def release(self) -> None:
        """End the thread, and close its process groups; every rank makes the call between two epochs."""
        self.close(None)
        self._fields.close()

    def close(self, timeout_s: float | None = _END_S) -> None:
        """End the thread, if one runs."""
        if self._ahead is not None:
            self._ahead.close(timeout_s)


class NodeSteps(Steps):
    """Sampled neighbourhoods of each rank's own training nodes, with rows of any owner.

    Args:
        seeds: Ids of this rank's training nodes, ``(s,)`` int64.
        labels: Their labels, ``(s,)`` or ``(s, C)``.
        batch_size: Most training nodes in a batch.
        order: Returns the order of the seeds in an epoch.
        fields: As for :class:`Steps`, like ``sampler`` and ``communicator``.
    """

    def __init__(
        self,
        seeds: Tensor,
        labels: Tensor,
        batch_size: int,
        order: ShuffledOrder,
        fields: Fields,
        sampler: DistributedNeighborSampler,
        communicator: Communicator,
    ) -> None:
        super().__init__(seeds.numel(), batch_size, fields, sampler, communicator)
        self._seeds, self._labels, self._order = seeds, labels, order

    @override
    def seeds_of(self, epoch: int, step: int) -> tuple[Tensor, dict[str, Any]]:
        first, end = self.span(step)
        chosen = self._order.of(epoch)[first:end]
        return self._seeds[chosen], {"y": self._labels[chosen], "num_in_step": self.num_in(step)}


class Fields:
    """The fields of nodes and edges that a batch needs, fetched from their owners.

    Args:
        topology: The edges that this rank holds, and their values.
        features: Rows of nodes; ``None`` if batches have none.
        aside: The ranks, on a process group for the thread that makes batches.
        begin_epoch: Called by all ranks before an epoch.
    """

    def __init__(
        self,
        topology: Topology,
        features: RemoteRows | None,
        aside: Communicator,
        begin_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        self.topology, self._features, self.aside, self.begin_epoch = topology, features, aside, begin_epoch
        self._of_edges = {name: topology.by_edge_id(name) for name in topology.values}

    @property
    def depth(self) -> int:
        """Batches to make ahead: one if they hold features, else those that are sampled at once."""
        return _TOGETHER if self._features is None else 1

    def add_structure(self, batches: Sequence[Data], sampled: Sequence[Sampled], epoch: int) -> None:
        """Add the values of edges to some batches of an epoch; every rank makes the call."""
        for batch, one in zip(batches, sampled, strict=True):
            owner = self.topology.owners.owner_of(one.node)
            for name, rows in self._of_edges.items():
                batch[name] = rows.fetch(one.edge, owner[one.target])

    def add_rows(self, batch: Data, sampled: Sampled) -> None:
        """Add ``x`` to a batch; every rank makes the call."""
        if self._features is not None:
            batch.x = self._features.fetch(sampled.node, self.topology.owners.owner_of(sampled.node))

    def close(self) -> None:
        """Close the process groups."""
        self.topology.close()
        self.aside.close()


def as_data(sampled: Sampled) -> Data:
    """Return a sampled neighbourhood as PyG's ``NeighborLoader`` names its fields, without rows."""
    batch = Data(
        edge_index=torch.stack([sampled.source, sampled.target]),
        n_id=sampled.node,
        num_nodes=sampled.node.numel(),
        batch_size=sampled.num_nodes[0],
        num_sampled_nodes=sampled.num_nodes,
        num_sampled_edges=sampled.num_edges,
    )
    if sampled.edge.numel():
        batch.e_id = sampled.edge
    return batch
