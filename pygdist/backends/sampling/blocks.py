"""The structure of batches, pushed to all ranks: what a rank must know to compute a first layer for others (P3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.hops.first_layer import InEdges
from pygdist.kernels import CSR
from pygdist.kernels.csr import pointers

_HEADER = 8  # numbers


class Pusher:
    """Sends the edges of each rank's rows to all ranks, by global ids.

    Per batch and other rank travel 64 bytes, 4 bytes for each edge and 8 for each row (twice that in graphs of
    :math:`2^{31}` nodes or more), and the weights of edges if there are any.

    Args:
        num_nodes: Nodes of the whole graph.
        communicator: The ranks.
    """

    def __init__(self, num_nodes: int, communicator: Communicator) -> None:
        self._num_nodes, self._communicator = num_nodes, communicator
        self._ids = torch.int32 if num_nodes < 1 << 31 else torch.int64

    def push(self, batches: Sequence[InEdges]) -> list[list[InEdges]]:
        """Push the edges of this rank's batches; every rank makes the call, with as many batches, empty ones too.

        Args:
            batches: Edges by batch, with ``source_degree`` (float64) on all ranks or none.

        Returns:
            For each batch, the edges of all ranks' batches, by rank.
        """
        communicator, size = self._communicator, self._communicator.world_size
        if size == 1:
            return [[one] for one in batches]
        header = torch.zeros(len(batches), _HEADER, dtype=torch.int64)
        for line, one in zip(header, batches, strict=True):
            line[0], line[1] = one.num_rows, one.csr.num_entries
        headers = [torch.empty_like(header) for _ in range(size)]
        communicator.send_and_receive([header] * size, headers, "push, sizes")
        headers[communicator.rank] = torch.zeros_like(header)
        entries = [int(one[:, 1].sum()) for one in headers]
        body = torch.cat([part for one in batches for part in (one.csr.indptr.diff(), one.row_id, one.csr.index)])
        bodies = [
            torch.empty(2 * int(one[:, 0].sum()) + count, dtype=self._ids)
            for one, count in zip(headers, entries, strict=True)
        ]
        communicator.send_and_receive([body.to(self._ids)] * size, bodies, "push, structure")
        weights, degrees = (
            self._pushed([getattr(one, name) for one in batches], entries, f"push, {label}")
            for name, label in (("weight", "weights"), ("source_degree", "degrees"))
        )
        pushed = [
            list(batches) if rank == communicator.rank else self._read(headers[rank], body, weight, degree)
            for rank, body, weight, degree in zip(range(size), bodies, weights, degrees, strict=True)
        ]
        return [list(one) for one in zip(*pushed, strict=True)]

    def _read(self, header: Tensor, body: Tensor, weight: Tensor | None, degree: Tensor | None) -> list[InEdges]:
        """Return the edges of a rank's batches, from what came of it."""
        read, start = [], 0
        for rows, entries, *_ in header.tolist():
            in_degree, row_id, index = body[: 2 * rows + entries].split([rows, rows, entries])
            body = body[2 * rows + entries :]
            mine = slice(start, start + entries)
            values = (None if one is None else one[mine] for one in (weight, degree))
            read.append(InEdges(CSR(_starts(in_degree), index, self._num_nodes), row_id.long(), *values))
            start += entries
        return read

    def _pushed(self, mine: list[Tensor | None], entries: list[int], label: str) -> list[Tensor | None]:
        """Push values of edges, if there are any; return those of each rank."""
        values = [one for one in mine if one is not None]
        if not values:
            return [None] * len(entries)
        together = torch.cat(values)
        incoming = [together.new_empty(count) for count in entries]
        self._communicator.send_and_receive([together] * len(entries), incoming, label)
        return list(incoming)


def _starts(degree: Tensor) -> Tensor:
    starts = torch.zeros(degree.numel() + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=starts[1:])
    return starts


def block_of(
    node: Tensor, source: Tensor, target: Tensor, num_rows: int, num_nodes: int, weight: Tensor | None
) -> InEdges:
    """Return the edges of a sampled neighbourhood by global ids.

    Args:
        node: Ids of its nodes.
        source: Source of each edge, as a position among these.
        target: Destination of each edge, likewise, ascending and below ``num_rows``.
        num_rows: Nodes that are expanded; they come first.
        num_nodes: Nodes of the whole graph.
        weight: Weights of the edges.
    """
    index = node[source].to(torch.int32 if num_nodes < 1 << 31 else torch.int64)
    return InEdges(CSR(pointers(target, num_rows), index, num_nodes), node[:num_rows], weight)
