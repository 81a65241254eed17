"""Neighbourhoods across ranks: the rank that holds a node's in-edges samples them (P3, Sec. 3.2.1).

Random numbers are counted, not drawn from a state: an edge depends on the seed, the epoch, the batch's seed nodes, the
hop and the node. So whoever samples a node finds the same edges, and a batch is the one that a process with the whole
graph would make.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import ranges
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest
from pygdist.native import library
from pygdist.sampler import _native
from pygdist.sampler._native import Sampled
from pygdist.sampler.csr_neighbors import check_fan_out, check_seed
from pygdist.sampler.owners import NodeOwners


class DistributedNeighborSampler:
    r"""Samples in-neighbours hop by hop, each node's on the rank that holds its in-edges (P3, Sec. 3.2.1).

    Batches equal those of :class:`CSRNeighborSampler` over the whole graph, bit for bit, for any number of ranks and
    any owners, if the in-edges of each node have the same order. A hop takes two exchanges: nodes go to their owners,
    edges come back. **Every rank makes every call of** :meth:`sample`, without seeds if it has none. Per hop travel 4
    bytes for each node asked for, 4 for its number of edges and 4 for each edge (8 in graphs of :math:`2^{31}` nodes or
    more; with edge ids 8, and 16 for each edge).

    Args:
        csr: In-edges of this rank's nodes, a row for each, on the CPU. With ``perm``, the ids of the edges travel too;
            all ranks have it or none.
        column_id: Ids of the matrix's columns in the whole graph.
        owners: The ranks that hold the in-edges of nodes.
        communicator: The ranks.
        num_neighbors: Most edges into a node, for each hop; -1 takes all.
        replace: Draw with replacement: a node with any in-edge then gets exactly that number.
        seed: Seed of the random numbers.

    Shapes:
        ``column_id`` is :math:`(m)` int64, with :math:`m` = ``csr.num_cols``; ``owners`` has as many nodes of this rank
        as ``csr`` has rows.

    Raises:
        InputError: On all ranks, if a rank's matrix and ids do not fit, a fan-out is 0 or below -1, or there is none.

    Example:
        >>> owners = NodeOwners.of(shard.owned_id, shard.num_nodes, communicator)
        >>> sampler = DistributedNeighborSampler(shard.adjacency.csr(), shard.n_id, owners, communicator, [25, 10])
        >>> batch = sampler.sample(seeds, epoch=0)
    """

    def __init__(
        self,
        csr: CSR,
        column_id: Tensor,
        owners: NodeOwners,
        communicator: Communicator,
        num_neighbors: Sequence[int],
        *,
        replace: bool = False,
        seed: int = 0,
    ) -> None:
        library.require("DistributedNeighborSampler")
        self.num_neighbors, self.seed = check_fan_out("num_neighbors", num_neighbors), check_seed(seed)
        self.replace = replace
        communicator.agree(_misfit(csr, column_id, owners))
        owners.check(communicator)
        if not communicator.are_alike([csr.perm is not None, replace, *self.num_neighbors]):
            raise InputError("ranks must sample alike: edge ids, fan-outs or replace are not equal")
        self._csr, self._column_id, self._owners, self._communicator = csr, column_id, owners, communicator
        self._ids = narrowest(owners.num_nodes) if csr.perm is None else torch.int64

    def sample(self, seeds: Tensor, *, epoch: int) -> Sampled:
        """Sample the neighbourhood of this rank's seed nodes, while others sample theirs.

        Args:
            seeds: Ids of distinct nodes, of any owner, ``(s,)`` int64; none if this rank has no batch left.
            epoch: Chooses the random numbers, with ``seed``.

        Returns:
            The batch. Its ``edge`` is empty if the matrix has no ``perm``.

        Raises:
            InputError: On all ranks, if seeds of a rank repeat or are out of range.
        """
        return self.sample_all([seeds], epoch=epoch)[0]

    def sample_all(self, seeds: Sequence[Tensor], *, epoch: int) -> list[Sampled]:
        """Sample several batches in the exchanges of one, as many on all ranks; see :meth:`sample`."""
        batches = [_Growing(one.to(torch.int64)) for one in seeds]
        wrong = any(map(self._wrong, seeds))
        for number, most in enumerate(self.num_neighbors):
            keys = [_native.hop_key(one, number, seed=self.seed, epoch=epoch) for one in seeds]
            answers = self._ask([one.node[one.first :][: 0 if wrong else None] for one in batches], keys, most, wrong)
            for batch, (count, source, edge) in zip(batches, answers, strict=True):
                batch.grow(count, source, edge)
        return [one.done() for one in batches]

    def _ask(
        self, nodes: list[Tensor], keys: list[int], fan_out: int, wrong: bool
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return, for the nodes of each batch, their numbers of in-edges, and the sources and ids of these."""
        communicator = self._communicator
        ranks = range(communicator.world_size)
        owners = [self._owners.owner_of(one) for one in nodes]
        grouped = [owner.argsort(stable=True) for owner in owners]
        asked = [torch.bincount(owner, minlength=len(ranks)).tolist() for owner in owners]
        questions: list[list[Tensor]] = [[] for _ in ranks]
        for one, order, counts, key in zip(nodes, grouped, asked, keys, strict=True):
            key_words = torch.tensor([key], dtype=torch.uint64).view(self._ids)
            for pieces, ids in zip(questions, one[order].to(self._ids).split(counts), strict=True):
                pieces += [key_words, torch.tensor([wrong, ids.numel()]).to(self._ids), ids]
        arrived = communicator.all_to_all([torch.cat(pieces) for pieces in questions], label="sampling, nodes")
        head = 2 + 8 // self._ids.itemsize
        for rank, first in enumerate(arrived):
            if first[head - 2]:
                raise InputError(
                    f"rank {rank} has seed nodes that repeat, or that are not in 0..{self._owners.num_nodes - 1}"
                )
        answers = [self._answer(one, head, len(nodes), fan_out) for one in arrived]
        parts = communicator.all_to_all(answers, label="sampling, edges")
        found: list[list[tuple[Tensor, Tensor, Tensor]]] = [[] for _ in nodes]
        for rank, part in zip(ranks, parts, strict=True):
            rest = part.to(torch.int64)
            for batch, counts in zip(found, asked, strict=True):
                count, rest = rest[: counts[rank]], rest[counts[rank] :]
                edges = int(count.sum())
                source, rest = rest[:edges], rest[edges:]
                ids = edges if self._csr.perm is not None else 0
                edge, rest = rest[:ids], rest[ids:]
                batch.append((count, source, edge))
        return [
            _ungrouped(order, *(torch.cat(part) for part in zip(*batch, strict=True)))
            for order, batch in zip(grouped, found, strict=True)
        ]

    def _answer(self, question: Tensor, head: int, num_batches: int, fan_out: int) -> Tensor:
        answers = []
        for _ in range(num_batches):
            key, count = int(question[: head - 2].clone().view(torch.int64)) % 2**64, int(question[head - 1])
            ids, question = question[head : head + count].to(torch.int64), question[head + count :]
            rows = self._owners.row_of(ids)
            degree, source, edge = _native.draw(self._csr, rows, ids, fan_out, replace=self.replace, key=key)
            answers += [degree, self._column_id[source], edge if self._csr.perm is not None else edge[:0]]
        return torch.cat(answers).to(self._ids)

    def _wrong(self, seeds: Tensor) -> bool:
        outside = (seeds < 0) | (seeds >= self._owners.num_nodes)
        return bool(outside.any()) or seeds.unique().numel() < seeds.numel()


class _Growing:
    """A batch while it grows hop by hop."""

    def __init__(self, seeds: Tensor) -> None:
        self.node, self.first = seeds, 0
        self._num_nodes, self._hops = [seeds.numel()], list[tuple[Tensor, Tensor, Tensor]]()

    def grow(self, count: Tensor, source: Tensor, edge: Tensor) -> None:
        """Add the edges into the nodes from ``first`` on, and their sources."""
        target = torch.repeat_interleave(torch.arange(self.first, self.node.numel())[: count.numel()], count)
        self.first = self.node.numel()
        self.node, position = _native.place(self.node, source)
        self._num_nodes.append(self.node.numel() - self.first)
        self._hops.append((position, target, edge))

    def done(self) -> Sampled:
        """Return the batch."""
        source, target, edge = (torch.cat(parts) for parts in zip(*self._hops, strict=True))
        num_edges = [position.numel() for position, _, _ in self._hops]
        return Sampled(self.node, source, target, edge, self._num_nodes, num_edges)


def _misfit(csr: CSR, column_id: Tensor, owners: NodeOwners) -> str | None:
    """Tell what is wrong with a matrix and the ids of its rows and columns."""
    if csr.num_rows != owners.owned_id.numel():
        return f"the matrix of in-edges has {csr.num_rows} rows for {owners.owned_id.numel()} nodes"
    if column_id.dtype != torch.int64 or column_id.shape != (csr.num_cols,):
        return f"column_id must be int64 of shape ({csr.num_cols},), got {column_id.dtype} {tuple(column_id.shape)}"
    if column_id.numel() and not 0 <= int(column_id.min()) <= int(column_id.max()) < owners.num_nodes:
        return f"column_id must be in 0..{owners.num_nodes - 1}"
    if csr.indptr.device.type != "cpu":
        return f"DistributedNeighborSampler samples on the CPU, but the graph is on {csr.indptr.device}"
    return None


def _ungrouped(grouped: Tensor, count: Tensor, source: Tensor, edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring edges, whose destinations are grouped by owner, into the order in which the destinations were."""
    start = torch.empty_like(count)
    start[grouped] = count.cumsum(0) - count
    ordered = torch.empty_like(count)
    ordered[grouped] = count
    take = ranges(start, ordered)
    return ordered, source[take], edge[take] if edge.numel() else edge
