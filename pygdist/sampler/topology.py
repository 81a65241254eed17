"""The in-edges that each rank holds: those of its own nodes, or, where memory allows, of more (P3, Secs. 3.1, 3.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.graph.neighbourhood import ranges
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest, pointers_of
from pygdist.sampler.owners import NodeOwners, RemoteRows


@dataclass(frozen=True, eq=False)
class Topology:
    """In-edges of some nodes; the ranks of a group hold those of all nodes together.

    Attributes:
        csr: The edges, a row for each node of ``owners.owned_id``; ``csr.perm`` has the edges' ids in the whole graph,
            ``None`` if no values of edges are needed.
        column_id: Ids of the columns in the whole graph, ``(m,)`` int64.
        owners: The ranks of the group that hold the in-edges of nodes.
        communicator: The group, for exchanges of the thread that samples.
        values: Values of the edges that batches need, in the order of ``csr``, by name.
        num_edges: Edges of the whole graph.
    """

    csr: CSR
    column_id: Tensor
    owners: NodeOwners
    communicator: Communicator
    values: Mapping[str, Tensor]
    num_edges: int

    @classmethod
    def of(
        cls, shard: Shard, names: Sequence[str], communicator: Communicator, *, num_parts: int | None = None
    ) -> Self:
        """Return the in-edges that this rank holds; every rank makes the call.

        Args:
            shard: This rank's part.
            names: Fields of the shard with the values of edges that batches need.
            communicator: All ranks, for exchanges of the thread that samples.
            num_parts: Ranks in a group: each holds the in-edges of ``world_size / num_parts`` parts, of which it gets
                copies now. By default all ranks are one group, and nothing is copied.
        """
        csr, values = shard.adjacency.csr(), {name: getattr(shard, name) for name in names}
        if num_parts is None or num_parts == communicator.world_size:
            owners = NodeOwners.of(shard.owned_id, shard.num_nodes, communicator)
            csr = CSR(csr.indptr, csr.index, csr.num_cols, shard.e_id if names else None)
            return cls(csr, shard.n_id, owners, communicator, values, shard.num_edges)
        holds = holders(communicator.rank, num_parts, communicator.world_size)

        def copies(mine: Tensor, label: str) -> Tensor:
            sent = [mine if holds_mine else mine[:0] for holds_mine in holds]
            return torch.cat(communicator.all_to_all(sent, label=f"copies, {label}"))

        # a rank may hold other parts than its own: it then sends itself nothing
        degree, ids = copies(csr.indptr.diff(), "degrees"), copies(shard.owned_id, "nodes")
        source = copies(shard.n_id[csr.index.long()].to(narrowest(shard.num_nodes)), "edges")
        order = ids.argsort()
        take = ranges((degree.cumsum(0) - degree)[order], degree[order])
        indptr = pointers_of(degree[order])
        perm = copies(shard.e_id, "edge ids")[take] if names else None
        merged = CSR(indptr, source[take], shard.num_nodes, perm)
        group = communicator.split(num_parts, quiet=True)
        owners = NodeOwners.of(ids[order], shard.num_nodes, group)
        values = {name: copies(value, name)[take] for name, value in values.items()}
        return cls(merged, torch.arange(shard.num_nodes), owners, group, values, shard.num_edges)

    @property
    def is_whole(self) -> bool:
        """True if this rank holds all edges."""
        return self.communicator.world_size == 1

    def by_edge_id(self, name: str) -> RemoteRows:
        """Return values of edges, to be fetched by the edges' ids from the ranks that hold them."""
        assert self.csr.perm is not None, "there are values"
        order = self.csr.perm.argsort()
        ids = self.csr.perm[order]
        return RemoteRows(
            self.values[name][order],
            lambda wanted: torch.searchsorted(ids, wanted),
            self.num_edges,
            self.communicator,
            label=name,
        )

    def close(self) -> None:
        """Close the group, if it is not that of all ranks."""
        self.communicator.close()


def holders(rank: int, size: int, num_ranks: int) -> list[bool]:
    """Tell for each rank if it holds the part of ``rank``, where groups of ``size`` ranks hold all parts."""
    return [other % size == rank // (num_ranks // size) for other in range(num_ranks)]
