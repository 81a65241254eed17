"""The edges of all ranks on each of them: what a rank needs that aggregates some columns of every node.

Rows of all ranks stand one rank after the other, each rank's in its own order; so do their in-edges. What a rank knows
by local ids is put together once for each set of edges, and kept with them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.comm.slices import share_rows
from pygdist.graph import Adjacency, Shard
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest
from pygdist.memory.overflow import Overflow
from pygdist.nn.relations import of_relation

__all__ = ["Everyone", "Topology"]


@dataclass(frozen=True)
class Topology:
    """Edges of all ranks.

    Attributes:
        edges: In-edges of all nodes; an :class:`~pygdist.graph.Adjacency` if those of the rank were one.
        counts: How many each rank has.
    """

    edges: Tensor
    counts: tuple[int, ...]


class Everyone:
    """The nodes of all ranks, in the order in which each rank holds them.

    Args:
        shard: What this rank holds.
        communicator: The ranks; each makes this call, and every other one.
        overflow: Where the edges of all ranks are to be; on the rank's device by default.

    Attributes:
        counts: How many nodes each rank owns.
        draws_alike: A seed gives the same random numbers on all ranks.
        overflow: As given.
        place: Where each of the shard's rows (owned, then halo) stands among all; ``(n + h,)`` int64.
    """

    def __init__(self, shard: Shard, communicator: Communicator, overflow: Overflow | None = None) -> None:
        self._communicator, self.overflow = communicator, overflow
        self._made = 0  # topologies; by number: the rank's edges and those of all, and who asked for which
        self._known: dict[int, tuple[Adjacency, Topology]] = {}
        self._asked: dict[tuple[object, ...], int] = {}
        found = communicator.gather([float(shard.num_owned), float(_drawn(shard.n_id.device))])
        self.counts = tuple(int(count) for count in found[:, 0])
        self.draws_alike = bool((found[:, 1] == found[0, 1]).all())
        first = sum(self.counts[: communicator.rank])
        own = torch.arange(first, first + shard.num_owned, device=shard.n_id.device)
        halo = communicator.exchange_rows(own[:, None], shard.plan, label="places of rows").squeeze(1)
        self.place = torch.cat([own, halo])

    def forget(self) -> None:
        """Let go of all edges, and of who asked for them; all ranks at once."""
        self._known.clear()
        self._asked.clear()

    @property
    def num_rows(self) -> int:
        """Nodes of all ranks."""
        return sum(self.counts)

    def topology(self, edge_index: Tensor, reader: tuple[object, ...]) -> Topology:
        """The edges of all ranks, from this rank's in local ids; put together once for an adjacency.

        Args:
            edge_index: The edges.
            reader: Who asks, the same on all ranks: a layer, and which of its hops. Who asks for the edges of the time
                before gets them without a word, unless they are a relation's, which may be others on some ranks alone.
                Otherwise ranks agree on whether all have met these before: two relations of which a rank has no edge
                are one to it, and two to others.
        """
        if not isinstance(edge_index, Adjacency):
            with torch.no_grad():
                return self._of_list(edge_index)
        own, number = edge_index.origin, self._asked.get(reader)
        if number is None or self._known[number][0] is not own or of_relation(own):
            met = [1.0, *(float(one is own) for one, _ in self._known.values())]
            everywhere = self._communicator.gather(met).amin(0)[1:].tolist()
            number = next((one for one, met_by_all in zip(self._known, everywhere, strict=True) if met_by_all), None)
            if number is None:
                number, self._made = self._made, self._made + 1
                with torch.inference_mode(False), torch.no_grad():
                    self._known[number] = own, self._of_rows(edge_index.csr())
            self._asked[reader] = number
            asked = set(self._asked.values())
            self._known = {one: kept for one, kept in self._known.items() if one in asked}
        return self._known[number][1]

    def _of_rows(self, csr: CSR) -> Topology:
        communicator = self._communicator
        index = self.place.to(narrowest(self.num_rows)).index_select(0, csr.index)
        counts = tuple(int(count) for count in communicator.gather([float(csr.num_entries)])[:, 0])
        every = share_rows(index, counts, communicator, label="in-edges of all", overflow=self.overflow)
        degrees = share_rows(csr.indptr.diff(), self.counts, communicator, label="in-edges of all, numbers")
        indptr = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=every.device)
        torch.cumsum(degrees.to(every.device), 0, out=indptr[1:])
        return Topology(Adjacency.from_csr(CSR(indptr, every, self.num_rows)), counts)

    def _of_list(self, edge_index: Tensor) -> Topology:
        size = self._communicator.world_size
        placed = self.place[edge_index].t().contiguous()
        found = self._communicator.all_to_all([placed] * size, label="edges of all")
        return Topology(torch.cat(found).t().contiguous(), tuple(part.size(0) for part in found))


def _drawn(device: torch.device) -> int:
    """What a seed gives on a device, as a number: on GPUs that depends on their kind, with more values than threads."""
    values = torch.ones(1 << 22 if device.type == "cuda" else 1 << 12, device=device)
    values.bernoulli_(0.5, generator=torch.Generator(device).manual_seed(0))
    return zlib.crc32(values.to(torch.uint8).cpu().numpy().tobytes())
