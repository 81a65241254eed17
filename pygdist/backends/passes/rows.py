"""The rows that a rank computes for a model, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.backends.fetching.arrival import Arrival
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Slot
from pygdist.graph.self_loops import NO_LOOPS
from pygdist.kernels import CSR


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a rank for a model of L hops.

    Attributes:
        n_id: Global ids.
        num_owned: Owned nodes; they come first.
        computed: ``computed[l]`` leading rows exist after hop ``l``, for ``l`` from 0 (the features) to L.
        num_sources: ``num_sources[l - 1]`` leading rows hold every source of hop ``l``.
        adjacency: In-edges of the first ``computed[1]`` rows; the other rows have none.
        fetched: At ``l - 1``: the rows that arrive for hop ``l``.
        inputs: Input rows of the replicas.
        everything: Rows of all nodes that are not owned.
        edges: Rows of the replicas' edges; positions are among the edges of ``adjacency``.
        num_own_edges: In-edges of owned nodes; they come first.
        exchanges: At ``l - 1``: True if any rank fetches rows for hop ``l``.
    """

    n_id: Tensor
    num_owned: int
    computed: tuple[int, ...]
    num_sources: tuple[int, ...]
    adjacency: Adjacency
    fetched: tuple[Arrival, ...]
    inputs: Arrival
    everything: Arrival
    edges: Arrival
    num_own_edges: int
    exchanges: tuple[bool, ...]

    @classmethod
    def all_here(
        cls, n_id: Tensor, num_owned: int, computed: tuple[int, ...], adjacency: Adjacency, num_own_edges: int
    ) -> Rows:
        """Rows of which none is fetched."""
        nothing, num_hops = Arrival.nothing(adjacency.device), len(computed) - 1
        return cls(
            n_id=n_id, num_owned=num_owned, computed=computed, num_sources=computed[:-1], adjacency=adjacency,
            fetched=(nothing,) * num_hops, inputs=nothing, everything=nothing, edges=nothing,
            num_own_edges=num_own_edges, exchanges=(False,) * num_hops,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Input rows of the model."""
        return self.computed[0]

    @property
    def num_hops(self) -> int:
        """Hops of the model."""
        return len(self.fetched)


#: The number of edges into the first rows, by the number of rows, where the host has counted them.
EDGES_INTO = Slot[Mapping[int, int]]("edges into the first rows")


def edges_into(adjacency: Adjacency, num_rows: int) -> int:
    """Return the number of edges into the first rows; the host waits for a GPU unless it has counted them before."""
    counted = adjacency.slot(EDGES_INTO) or {}
    return counted[num_rows] if num_rows in counted else int(adjacency.csr().indptr[num_rows])


def leading(adjacency: Adjacency, num_rows: int, num_with_edges: int, num_sources: int) -> Adjacency:
    """Cut to the first ``num_rows`` rows; those after the first ``num_with_edges`` lose their edges."""
    csr, end = adjacency.csr(), edges_into(adjacency, num_with_edges)
    indptr = torch.cat([csr.indptr[: num_with_edges + 1], csr.indptr.new_full((num_rows - num_with_edges,), end)])
    value = adjacency.value
    cut = Adjacency.from_csr(CSR(indptr, csr.index[:end], num_sources), None if value is None else value[:end])
    if adjacency.slot(NO_LOOPS):
        cut.keep(NO_LOOPS, True)
    return cut


def in_order(arrived: Tensor, arrival: Arrival) -> Tensor:
    """Sort rows by their places on this rank, from the order in which their owners send them."""
    return arrived.index_select(0, torch.argsort(arrival.position))
