"""The pass over owned rows: every hop fetches its halo, so the backend need not know the model's hops in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.fetching.adjacency import ArrivingAdjacency
from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.fetcher import Fetcher, HopRows
from pygdist.backends.passes.base import Forward
from pygdist.hops.fused_attention import Unscored, defers_scores
from pygdist.hops.hop import Deferred, Hop

HaloRows = Callable[[Tensor, str], Tensor]
"""Fetches halo rows from owned ones; the label names the exchange in messages."""


class FetchedPass:
    """A forward pass over the rows that a rank owns.

    Args:
        fetcher: Fetches rows for hops.
        halo_rows: Fetches them in another way; hops then wait until all rows are here.
    """

    alone = False

    def __init__(self, fetcher: Fetcher, halo_rows: HaloRows | None = None) -> None:
        self._fetcher, self._halo_rows = fetcher, halo_rows
        self._hops = 0  # so far
        self._halo: Arrival | None = None
        shard = fetcher.shard
        if fetcher.communicator.world_size > 1:
            with torch.inference_mode(False):  # training uses what evaluation may ask for first
                position = torch.arange(shard.num_owned, shard.num_owned + shard.num_halo, device=shard.n_id.device)
            self._halo = Arrival(plan=shard.plan, position=position)

    @property
    def num_rows(self) -> int:
        """The owned nodes."""
        return self._fetcher.shard.num_owned

    @property
    def num_sources(self) -> int:
        """The owned nodes and the halo."""
        return self._fetcher.shard.num_owned + self._fetcher.shard.num_halo

    def begin(self) -> None:
        """Begin a forward pass."""
        self._hops = 0

    def begin_hop(self) -> None:
        """Count a hop."""
        self._hops += 1

    def run_layer(self, layer: MessagePassing, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer, in a forward pass of the model or outside of one."""
        with self._fetcher.around_layer():
            return forward(layer, *args, **kwargs)

    def propagate(self, hop: Hop) -> Tensor:
        """Run a hop: fetch its source rows, by group where the hop allows."""
        exchange = self._fetcher.by_group(hop, self._rows) if self._halo_rows is None else None
        if exchange is not None:
            return hop.run(ArrivingAdjacency.over(hop.edge_index, exchange))
        return self._with_all_rows(hop)

    def edge_updater(self, hop: Hop) -> Tensor | Deferred:
        """Run an ``edge_updater``; scores wait where the rows of the hop after it arrive."""
        if defers_scores(hop) and self._halo is not None and self._halo_rows is None:
            return Unscored()
        return self._with_all_rows(hop)

    def _with_all_rows(self, hop: Hop) -> Tensor:
        rows = self._rows
        fetched = self._fetcher.rows_of(hop, rows, self._halo_rows)
        return hop.run(rows=fetched, size=(rows.num_sources, rows.num_rows))

    @property
    def _rows(self) -> HopRows:
        return HopRows.of_shard(self._fetcher.shard, self._hops, self._halo)

    def source_rows(self, x: Tensor) -> Tensor:
        """The owned rows, then those of the halo."""
        plan = self._fetcher.shard.plan
        return torch.cat([x, self._fetcher.communicator.exchange_rows(x, plan, label="node values")])

    def owned_rows(self, x: Tensor) -> Tensor:
        """All rows."""
        return x
