"""The structure of batches, pushed to all ranks: what a rank must know to compute a first layer for others (P3)."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.hops.first_layer import InEdges
from pygdist.kernels import CSR
from pygdist.kernels.csr import pointers

_HEADER = 8  # numbers


class Pusher:
    """Sends the edges of each rank's rows to all ranks, by global ids; two messages to each, or three with weights.

    Per other rank travel 64 bytes, 4 bytes for each edge and 8 for each row (twice that in graphs of :math:`2^{31}`
    nodes or more), and the weights of edges if there are any.

    Args:
        num_nodes: Nodes of the whole graph.
        communicator: The ranks.
    """

    def __init__(self, num_nodes: int, communicator: Communicator) -> None:
        self._num_nodes, self._communicator = num_nodes, communicator
        self._ids = torch.int32 if num_nodes < 1 << 31 else torch.int64

    def push(self, edges: InEdges, *, values: Tensor | None = None) -> list[InEdges]:
        """Push this rank's edges; return those of all ranks, by rank. Every rank makes the call, with no row if so.

        Args:
            edges: This rank's edges.
            values: Numbers of edges to send as ``source_degree``, ``(E,)`` float64; on all ranks or none.
        """
        ranks, communicator = range(self._communicator.world_size), self._communicator
        own = InEdges(edges.csr, edges.row_id, edges.weight, values)
        if len(ranks) == 1:
            return [own]
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0], header[1] = edges.num_rows, edges.csr.num_entries
        headers = [torch.empty_like(header) for _ in ranks]
        communicator.send_and_receive([header] * len(ranks), headers, "push, sizes")
        sizes = [(int(one[0]), int(one[1])) for one in headers]
        sizes[communicator.rank] = 0, 0
        body = torch.cat([edges.csr.indptr.diff(), edges.row_id, edges.csr.index]).to(self._ids)
        bodies = [torch.empty(2 * rows + entries, dtype=self._ids) for rows, entries in sizes]
        communicator.send_and_receive([body] * len(ranks), bodies, "push, structure")
        extras = [self._pushed(one, sizes, label) for one, label in ((edges.weight, "weights"), (values, "degrees"))]
        pushed = []
        for rank in ranks:
            if rank == communicator.rank:
                pushed.append(own)
                continue
            rows, entries = sizes[rank]
            degree, row_id, index = bodies[rank].split([rows, rows, entries])
            csr = CSR(_starts(degree), index, self._num_nodes)
            pushed.append(InEdges(csr, row_id.long(), *(None if one is None else one[rank] for one in extras)))
        return pushed

    def _pushed(self, mine: Tensor | None, sizes: list[tuple[int, int]], label: str) -> list[Tensor] | None:
        if mine is None:
            return None
        incoming = [mine.new_empty(entries) for _, entries in sizes]
        self._communicator.send_and_receive([mine.contiguous()] * len(sizes), incoming, f"push, {label}")
        return incoming


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
