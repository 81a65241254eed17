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
from pygdist.kernels import CSR
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
        self._ids = torch.int32 if owners.num_nodes < 1 << 31 and csr.perm is None else torch.int64

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
        node, first, wrong = seeds.to(torch.int64), 0, self._wrong(seeds)
        hops: list[tuple[Tensor, Tensor, Tensor]] = []
        num_nodes = [node.numel()]
        for number, most in enumerate(self.num_neighbors):
            key = _native.hop_key(seeds, number, seed=self.seed, epoch=epoch)
            count, source, edge = self._ask(node[first:] if not wrong else node[:0], key, most, wrong)
            target = torch.repeat_interleave(torch.arange(first, node.numel()), count)
            first = node.numel()
            node, position = _native.place(node, source)
            num_nodes.append(node.numel() - first)
            hops.append((position, target, edge))
        source, target, edge = (torch.cat(parts) for parts in zip(*hops, strict=True))
        return Sampled(node, source, target, edge, num_nodes, [position.numel() for position, _, _ in hops])

    def _ask(self, nodes: Tensor, key: int, fan_out: int, wrong: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of edges into each node, and their sources and ids, from the owners of the nodes."""
        communicator = self._communicator
        owner = self._owners.owner_of(nodes)
        grouped = owner.argsort(stable=True)
        asked = torch.bincount(owner, minlength=communicator.world_size).tolist()
        head = torch.cat([torch.tensor([key], dtype=torch.uint64).view(self._ids), torch.tensor([wrong]).to(self._ids)])
        questions = [torch.cat([head, ids]) for ids in nodes[grouped].to(self._ids).split(asked)]
        arrived = communicator.all_to_all(questions, label="sampling, nodes")
        for rank, question in enumerate(arrived):
            if question[head.numel() - 1]:
                raise InputError(
                    f"rank {rank} has seed nodes that repeat, or that are not in 0..{self._owners.num_nodes - 1}"
                )
        answers = [self._answer(question, head.numel(), fan_out) for question in arrived]
        edges_by_owner = communicator.all_to_all(answers, label="sampling, edges")
        parts = [_read(answer.to(torch.int64), number) for answer, number in zip(edges_by_owner, asked, strict=True)]
        count, source, edge = (torch.cat(part) for part in zip(*parts, strict=True))
        return _ungrouped(grouped, count, source, edge)

    def _answer(self, question: Tensor, head: int, fan_out: int) -> Tensor:
        key = int(question[: head - 1].view(torch.int64)) % 2**64
        ids = question[head:].to(torch.int64)
        rows = self._owners.row_of(ids)
        count, source, edge = _native.draw(self._csr, rows, ids, fan_out, replace=self.replace, key=key)
        edge = edge if self._csr.perm is not None else edge[:0]
        return torch.cat([count, self._column_id[source], edge]).to(self._ids)

    def _wrong(self, seeds: Tensor) -> bool:
        outside = (seeds < 0) | (seeds >= self._owners.num_nodes)
        return bool(outside.any()) or seeds.unique().numel() < seeds.numel()


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


def _read(answer: Tensor, asked: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split an owner's answer into numbers of edges, sources, and ids of edges if it has them."""
    count = answer[:asked]
    edges = int(count.sum())
    return count, answer[asked : asked + edges], answer[asked + edges :]


def _ungrouped(grouped: Tensor, count: Tensor, source: Tensor, edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring edges, whose destinations are grouped by owner, into the order in which the destinations were."""
    start = torch.empty_like(count)
    start[grouped] = count.cumsum(0) - count
    ordered = torch.empty_like(count)
    ordered[grouped] = count
    before = ordered.cumsum(0) - ordered
    take = torch.repeat_interleave(start - before, ordered) + torch.arange(source.numel())
    return ordered, source[take], edge[take] if edge.numel() else edge
