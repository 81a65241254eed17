"""The first layer of a model over the whole graph, where ranks hold columns of the features (P3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.sampling.blocks import Pusher
from pygdist.backends.sampling.copies import slices_of
from pygdist.backends.sampling.totals import FirstLayer, Flight
from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.hops.cuts import Cut, InEdges, products_of
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest

_ROWS = 1 << 14  # at a time


def whole_first_layer(layer: Any, cut: Cut, shard: Shard, communicator: Communicator, *, weighted: bool) -> Tensor:
    """Return the layer's output for this rank's own nodes, without gradients; every rank makes the call.

    Args:
        layer: The layer.
        cut: The way in which it is cut.
        shard: This rank's part.
        communicator: The ranks.
        weighted: The layer gets the graph's edge weights.
    """
    shard, degree = shard.to("cpu"), None
    if cut.degrees is not None:
        degree = _degrees(layer, cut, shard, communicator, weighted=weighted)

    def edges_from(start: int) -> InEdges:
        edges, index = _chunk(shard, start, weighted=weighted)
        return edges if degree is None else replace(edges, source_degree=degree[index])

    with torch.no_grad():
        out: Tensor = cut.rest(layer, _summed(layer, cut, shard, communicator, edges_from))
    return out


def whole_products(layer: Any, cut: Cut, shard: Shard, communicator: Communicator) -> Tensor:
    """Return the products of this rank's rows of features with a layer's weights, ``(n, sum of H)``, likewise."""
    shard = shard.to("cpu")

    def rows_from(start: int) -> InEdges:
        ids = shard.owned_id[start : start + _ROWS]
        no_edges = CSR(torch.zeros(ids.numel() + 1, dtype=torch.int64), ids[:0].to(torch.int32), shard.num_nodes)
        return InEdges(no_edges, ids)

    return _summed(layer, products_of(cut), shard, communicator, rows_from)


def _summed(
    layer: Any, cut: Cut, shard: Shard, communicator: Communicator, edges_from: Callable[[int], InEdges]
) -> Tensor:
    """Return the sum over ranks for this rank's own nodes, some at a time."""
    columns, width = shard.columns, shard.x.size(1)
    assert columns is not None, "the placement is columns"
    first = FirstLayer(layer, cut, columns, slices_of(width, communicator.world_size), communicator)
    pusher, sums = Pusher(shard.num_nodes, communicator.on_host()), list[Tensor]()
    num_chunks = int(communicator.gather([float(-(-shard.num_owned // _ROWS))]).max())
    with torch.no_grad():
        for number in range(max(num_chunks, 1)):
            (blocks,) = pusher.push([edges_from(number * _ROWS)])
            flight = Flight(first, blocks, trains=False)
            flight.post_terms()
            sums.append(flight.total().detach())
    return torch.cat(sums)


def _chunk(shard: Shard, start: int, *, weighted: bool) -> tuple[InEdges, Tensor]:
    """Return the edges into some rows, and the local ids of their sources."""
    csr = shard.adjacency.csr()
    start, end = min(start, shard.num_owned), min(start + _ROWS, shard.num_owned)
    first, last = int(csr.indptr[start]), int(csr.indptr[end])
    local = csr.index[first:last].long()
    index = shard.n_id[local].to(narrowest(shard.num_nodes))
    weight = None if shard.edge_weight is None or not weighted else shard.edge_weight[first:last]
    rows = CSR(csr.indptr[start : end + 1] - first, index, shard.num_nodes)
    return InEdges(rows, shard.owned_id[start:end], weight), local


def _degrees(layer: Any, cut: Cut, shard: Shard, communicator: Communicator, *, weighted: bool) -> Tensor:
    """Return the in-degrees of all rows that this rank knows, as the layer counts them; float64."""
    assert cut.degrees is not None, "the caller asked"
    starts = range(0, max(shard.num_owned, 1), _ROWS)
    mine = [cut.degrees(layer, _chunk(shard, start, weighted=weighted)[0], torch.float64) for start in starts]
    degree = torch.cat(mine)
    halo = communicator.on_host().exchange_rows(degree.unsqueeze(1), shard.plan, label="degrees").squeeze(1)
    return torch.cat([degree, halo])
