"""The nodes and edges of all ranks: the rows that each rank owns, and its columns of all rows (NeutronTP, Sec. 3).

The nodes of all ranks are in rank order, and within a rank in the rank's own order; so are the in-edges. A rank's edges
hold local ids, which are translated once for each set of edges. Each rank owns some rows, and during a hop holds some
columns of all rows. A rank owns n of N rows, and holds c of C columns::

    split   (n, *, C) -> (N, *, c)   backward: gather; each row's owner gets all columns of its gradient
    gather  (N, *, c) -> (n, *, C)   backward: split; each rank gets its columns of all gradients
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.backends.passes.of_all_edges import OfAllEdges
from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, share_rows, split_columns
from pygdist.graph import Adjacency, Shard
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest, pointers_of
from pygdist.memory.overflow import Overflow

AHEAD = 2  # pieces of one tensor that are under way at once


@dataclass(frozen=True, kw_only=True)
class SliceLayout:
    """The rows that each rank owns, and the means by which a hop on slices runs; the same on every rank.

    Attributes:
        communicator: The ranks.
        counts: Number of rows that each rank owns.
        overflow: Memory for rows and edges of all ranks, if these do not stay on the device. A hop then runs chunk by
            chunk, and only the rows and edges of one chunk are on the device.
        overlap: Let rows travel while a chunk is computed. Without, all rows arrive before the first chunk, and the
            results of a chunk leave before the next one.
    """

    communicator: Communicator
    counts: tuple[int, ...]
    overflow: Overflow | None = None
    overlap: bool = True

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return sum(self.counts)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def memory(self) -> Overflow:
        """The overflow of a hop that runs chunk by chunk, which always has one."""
        assert self.overflow is not None
        return self.overflow

    @property
    def ahead(self) -> int:
        """Pieces of one tensor that are under way at once; with one, nothing travels during a computation."""
        return AHEAD if self.overlap else 1

    def columns(self, width: int) -> tuple[slice, ...]:
        """Columns that each rank holds of rows with ``width`` columns."""
        size = self.communicator.world_size
        return tuple(columns_of(width, rank, size) for rank in range(size))

    def held(self, width: int) -> int:
        """Number of columns that this rank holds of rows with ``width`` columns."""
        columns = self.columns(width)[self.rank]
        return int(columns.stop - columns.start)

    def split(self, x: Tensor, label: str) -> Tensor:
        """Turn all columns of this rank's rows into this rank's columns of all rows; ``label`` names them in errors."""
        return split_columns(x, self.counts, self.communicator, label=label)

    def gather(self, x: Tensor, width: int, label: str) -> Tensor:
        """Turn this rank's columns of all rows into all ``width`` columns of its rows; a phantom column is cut off."""
        return gather_columns(x[..., : self.held(width)], self.counts, width, self.communicator, label=label)


@dataclass(frozen=True)
class Topology:
    """Edges of all ranks.

    Attributes:
        edges: In-edges of all nodes; an :class:`~pygdist.graph.Adjacency` if the rank's edges were one.
        counts: Number of edges of each rank.
    """

    edges: Tensor
    counts: tuple[int, ...]


class AllNodes:
    """The nodes of all ranks. Every rank makes every call, this one included.

    Args:
        shard: The part of the graph that this rank holds.
        communicator: The ranks.
        overflow: Memory for the edges of all ranks; the rank's device by default.
        overlap: See :class:`SliceLayout`.

    Attributes:
        layout: The nodes that each rank owns.
        draws_alike: True if a seed gives the same random numbers on all ranks.
        positions: Position among all nodes of each row of the shard (owned, then halo); ``(n + h,)`` int64.
    """

    def __init__(
        self, shard: Shard, communicator: Communicator, overflow: Overflow | None = None, *, overlap: bool = True
    ) -> None:
        self._topologies = OfAllEdges[Topology](communicator)
        facts = communicator.gather([float(shard.num_owned), float(_drawn(shard.n_id.device))])
        counts = tuple(int(count) for count in facts[:, 0])
        self.layout = SliceLayout(communicator=communicator, counts=counts, overflow=overflow, overlap=overlap)
        self.draws_alike = bool((facts[:, 1] == facts[0, 1]).all())
        first = sum(counts[: communicator.rank])
        owned = torch.arange(first, first + shard.num_owned, device=shard.n_id.device)
        halo = communicator.exchange_rows(owned[:, None], shard.plan, label="positions of rows").squeeze(1)
        self.positions = torch.cat([owned, halo])

    def forget(self) -> None:
        """Drop all topologies; every rank makes the call."""
        self._topologies.forget()

    def topology(self, edge_index: Tensor, reader: tuple[object, ...]) -> Topology:
        """Return the edges of all ranks, from this rank's edges in local ids; translated once for an adjacency.

        A reader with the same edges as last time gets the topology without communication; see
        :class:`~pygdist.backends.passes.of_all_edges.OfAllEdges`.

        Args:
            edge_index: This rank's edges.
            reader: A layer and the number of its hop; the same on all ranks.
        """
        if not isinstance(edge_index, Adjacency):
            with torch.no_grad():
                return self._of_list(edge_index)
        return self._topologies.of(edge_index, lambda: self._of_rows(edge_index.csr()), reader=reader)

    def _of_rows(self, csr: CSR) -> Topology:
        layout, communicator = self.layout, self.layout.communicator
        index = self.positions.to(narrowest(layout.num_rows)).index_select(0, csr.index)
        counts = tuple(int(count) for count in communicator.gather([float(csr.num_entries)])[:, 0])
        sources = share_rows(index, counts, communicator, label="in-edges of all", overflow=layout.overflow)
        degrees = share_rows(csr.indptr.diff(), layout.counts, communicator, label="in-edges of all, numbers")
        indptr = pointers_of(degrees.to(sources.device))
        return Topology(Adjacency.from_csr(CSR(indptr, sources, layout.num_rows)), counts)

    def _of_list(self, edge_index: Tensor) -> Topology:
        communicator = self.layout.communicator
        edges = self.positions[edge_index].t().contiguous()
        by_rank = communicator.all_to_all([edges] * communicator.world_size, label="edges of all")
        return Topology(torch.cat(by_rank).t().contiguous(), tuple(part.size(0) for part in by_rank))


def _drawn(device: torch.device) -> int:
    """Return a number that tells devices apart on which one seed draws different random numbers.

    GPUs of different kinds do, as soon as more values are drawn than there are threads.
    """
    values = torch.ones(1 << 22 if device.type == "cuda" else 1 << 12, device=device)
    values.bernoulli_(0.5, generator=torch.Generator(device).manual_seed(0))
    return zlib.crc32(values.to(torch.uint8).cpu().numpy().tobytes())
