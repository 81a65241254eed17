"""The structure of batches, pushed to all ranks: what a rank must know to compute a first layer for others (P3)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.hops.cuts import InEdges
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest, pointers, pointers_of
from pygdist.sampler import _native
from pygdist.sampler._native import Sampled
from pygdist.sampler.topology import Topology

_HEADER = 8  # numbers


@dataclass(frozen=True)
class Drawn:
    """The way in which batches are drawn from counted random numbers, so that any rank with the edges draws them alike.

    Attributes:
        fan_out: Most edges into a node, for each hop.
        replace: Neighbours are drawn with replacement.
        seed: Seed of the random numbers.
        topology: All edges, from which this rank draws the batches of others; ``None`` if it does not hold them.
    """

    fan_out: Sequence[int]
    replace: bool
    seed: int
    topology: Topology | None = None

    def key(self, seeds: Tensor, hop: int, epoch: int) -> int:
        """Return the key of a hop of the batch around some seed nodes; the one after the last chooses other numbers."""
        return _native.hop_key(seeds, hop, seed=self.seed, epoch=epoch)

    def edges(self, row_id: Tensor, ends: tuple[int, ...], epoch: int) -> InEdges:
        """Draw the edges into the rows of a batch again, without an exchange.

        Args:
            row_id: Ids of the rows.
            ends: As in :class:`~pygdist.hops.cuts.InEdges`.
            epoch: The epoch of the batch.
        """
        held, counts, sources, entries = self.topology, list[Tensor](), list[Tensor](), list[Tensor]()
        assert held is not None, "this rank holds all edges"
        csr = CSR(held.csr.indptr, held.csr.index, held.csr.num_cols)  # so that entries are positions, no ids
        starts = (0, *reversed(ends))
        for hop, fan_out in enumerate(self.fan_out):
            ids = row_id[starts[hop] : starts[hop + 1]]
            key = self.key(row_id[: ends[-1]], hop, epoch)
            rows = held.owners.row_of(ids)
            count, source, entry = _native.draw(csr, rows, ids, fan_out, replace=self.replace, key=key)
            counts.append(count)
            sources.append(held.column_id[source])
            entries.append(entry)
        index = torch.cat(sources).to(narrowest(held.owners.num_nodes))
        weight = held.values.get("edge_weight")
        weight = None if weight is None else weight[torch.cat(entries)]
        return InEdges(CSR(pointers_of(torch.cat(counts)), index, held.owners.num_nodes), row_id, weight, ends=ends)


class Pusher:
    """Sends the edges of each rank's rows to all ranks, by global ids.

    Per batch and other rank travel 64 bytes (8 more for each hop after the sixth), 4 bytes for each edge and 8 for each
    row (twice that in graphs of :math:`2^{31}` nodes or more), and the weights of edges if there are any. If all ranks
    hold all edges, they draw those of batches again: then only the rows travel, 4 bytes each.

    Args:
        num_nodes: Nodes of the whole graph.
        communicator: The ranks.
        drawn: The way in which batches are drawn; ``None`` for edges that are no batches.
    """

    def __init__(self, num_nodes: int, communicator: Communicator, drawn: Drawn | None = None) -> None:
        self._num_nodes, self._communicator, self._drawn = num_nodes, communicator, drawn
        self._redraws = drawn is not None and drawn.topology is not None
        self._ids = narrowest(num_nodes)

    def push(self, batches: Sequence[InEdges], epoch: int = 0) -> list[list[InEdges]]:
        """Push the edges of this rank's batches; every rank makes the call, with as many batches, empty ones too.

        Args:
            batches: Edges by batch, with ``source_degree`` (float64) on all ranks or none, and as many ``ends``.
            epoch: The epoch of the batches.

        Returns:
            For each batch, the edges of all ranks' batches, by rank.
        """
        communicator, size = self._communicator, self._communicator.world_size
        if size == 1:
            return [[self._keyed(one, epoch)] for one in batches]
        header = self._header(batches, epoch)
        headers = [torch.empty_like(header) for _ in range(size)]
        communicator.send_and_receive([header] * size, headers, "push, sizes")
        headers[communicator.rank] = torch.zeros_like(header)
        entries, rows = ([int(one[:, at].sum()) for one in headers] for at in (0, 2))
        body = torch.cat([part for one in batches for part in self._body(one)])
        bodies = [
            torch.empty(count if self._redraws else 2 * count + edges, dtype=self._ids)
            for count, edges in zip(rows, entries, strict=True)
        ]
        communicator.send_and_receive([body.to(self._ids)] * size, bodies, "push, structure")
        weights, degrees = (
            [None] * size if self._redraws else self._pushed([getattr(one, name) for one in batches], entries, label)
            for name, label in (("weight", "push, weights"), ("source_degree", "push, degrees"))
        )
        pushed = [
            list(batches) if rank == communicator.rank else self._read(headers[rank], body, weight, degree)
            for rank, body, weight, degree in zip(range(size), bodies, weights, degrees, strict=True)
        ]
        return [[self._keyed(one, epoch) for one in blocks] for blocks in zip(*pushed, strict=True)]

    def _header(self, batches: Sequence[InEdges], epoch: int) -> Tensor:
        """Return a line for each batch: edges, epoch, and the rows that can be computed after each hop."""
        width = max(_HEADER, 2 + max((len(one.ends) for one in batches), default=0))
        header = torch.zeros(len(batches), width, dtype=torch.int64)
        for line, one in zip(header, batches, strict=True):
            ends = one.ends or (one.num_rows,)
            line[: 2 + len(ends)] = torch.tensor([one.csr.num_entries, epoch, *ends])
        return header

    def _body(self, edges: InEdges) -> list[Tensor]:
        if self._redraws:
            return [edges.row_id]
        return [edges.csr.indptr.diff(), edges.row_id, edges.csr.index]

    def _read(self, header: Tensor, body: Tensor, weight: Tensor | None, degree: Tensor | None) -> list[InEdges]:
        """Return the edges of a rank's batches, from what came of it."""
        num_hops = 1 if self._drawn is None else len(self._drawn.fan_out)
        read, start = [], 0
        for entries, epoch, *numbers in header.tolist():
            ends = tuple(numbers[:num_hops])
            rows = ends[0]
            if self._redraws:
                assert self._drawn is not None, "else nothing is drawn"
                row_id, body = body[:rows].long(), body[rows:]
                read.append(self._drawn.edges(row_id, ends, epoch))
                continue
            in_degree, row_id, index = body[: 2 * rows + entries].split([rows, rows, entries])
            body = body[2 * rows + entries :]
            mine = slice(start, start + entries)
            of_edges = [None if one is None else one[mine] for one in (weight, degree)]
            csr = CSR(pointers_of(in_degree), index, self._num_nodes)
            read.append(InEdges(csr, row_id.long(), of_edges[0], of_edges[1], ends))
            start += entries
        return read

    def _keyed(self, edges: InEdges, epoch: int) -> InEdges:
        """Give a batch its key, which depends on its seeds alone."""
        if self._drawn is None:
            return edges
        seeds = edges.row_id[: edges.ends[-1]]
        return replace(edges, key=self._drawn.key(seeds, len(self._drawn.fan_out), epoch))

    def _pushed(self, mine: list[Tensor | None], entries: list[int], label: str) -> list[Tensor | None]:
        """Push values of edges, if there are any; return those of each rank."""
        values = [one for one in mine if one is not None]
        if not values:
            return [None] * len(entries)
        together = torch.cat(values)
        incoming = [together.new_empty(count) for count in entries]
        self._communicator.send_and_receive([together] * len(entries), incoming, label)
        return list(incoming)


def block_of(sampled: Sampled, num_nodes: int, weight: Tensor | None) -> InEdges:
    """Return the edges of a sampled neighbourhood by global ids.

    Args:
        sampled: The neighbourhood.
        num_nodes: Nodes of the whole graph.
        weight: Weights of its edges.
    """
    index = sampled.node[sampled.source].to(narrowest(num_nodes))
    ends = tuple(itertools.accumulate(sampled.num_nodes[:-1]))[::-1]
    csr = CSR(pointers(sampled.target, ends[0]), index, num_nodes)
    return InEdges(csr, sampled.node[: ends[0]], weight, ends=ends)
