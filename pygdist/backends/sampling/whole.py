"""The first layer of a model over the whole graph, where ranks hold columns of the features (P3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.sampling.blocks import Pusher
from pygdist.backends.sampling.totals import FirstLayer, Flight
from pygdist.comm import Communicator
from pygdist.graph import Shard
from pygdist.hops.first_layer import Cut, InEdges
from pygdist.kernels import CSR

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
    columns, width = shard.columns, shard.x.size(1)
    assert columns is not None, "the placement is columns"
    first, pusher = FirstLayer(layer, cut, columns, width, communicator), Pusher(shard.num_nodes, communicator)
    with torch.no_grad():
        degree = None if cut.degrees is None else _degrees(layer, cut, shard, communicator, weighted=weighted)
        num_chunks = int(communicator.gather([float(-(-shard.num_owned // _ROWS))]).max())
        sums = []
        for number in range(max(num_chunks, 1)):
            edges, index = _chunk(shard, number * _ROWS, weighted=weighted)
            edges = edges if degree is None else replace(edges, source_degree=degree[index])
            (blocks,) = pusher.push([edges])
            flight = Flight(first, blocks)
            flight.post_terms()
            sums.append(flight.total())
        out: Tensor = cut.rest(layer, torch.cat(sums))
    return out


def _chunk(shard: Shard, start: int, *, weighted: bool) -> tuple[InEdges, Tensor]:
    """Return the edges into some rows, and the local ids of their sources."""
    csr = shard.adjacency.csr()
    start, end = min(start, shard.num_owned), min(start + _ROWS, shard.num_owned)
    first, last = int(csr.indptr[start]), int(csr.indptr[end])
    local = csr.index[first:last].long()
    index = shard.n_id[local].to(torch.int32 if shard.num_nodes < 1 << 31 else torch.int64)
    weight = None if shard.edge_weight is None or not weighted else shard.edge_weight[first:last]
    rows = CSR(csr.indptr[start : end + 1] - first, index, shard.num_nodes)
    return InEdges(rows, shard.owned_id[start:end], weight), local


def _degrees(layer: Any, cut: Cut, shard: Shard, communicator: Communicator, *, weighted: bool) -> Tensor:
    """Return the in-degrees of all rows that this rank knows, as the layer counts them; float64."""
    assert cut.degrees is not None, "the caller asked"
    starts = range(0, max(shard.num_owned, 1), _ROWS)
    mine = [cut.degrees(layer, _chunk(shard, start, weighted=weighted)[0], torch.float64) for start in starts]
    degree = torch.cat(mine)
    halo = communicator.exchange_rows(degree.unsqueeze(1), shard.plan, label="degrees").squeeze(1)
    return torch.cat([degree, halo])
