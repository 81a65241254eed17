"""Predicts the time of an epoch from a choice of rows to compute and from measured costs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.backends.planning.greedy import Halo
from pygdist.backends.planning.hop_costs import HopCosts
from pygdist.backends.planning.network import Network
from pygdist.comm import Communicator
from pygdist.native import require


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """All that the time of an epoch depends on, apart from the choice.

    Attributes:
        hops: Seconds of rows and edges, by hop.
        network: Latency of an exchange, and the share of it that cannot be hidden.
        overlap: True if edges from rows that are here are aggregated while other rows travel.
        other_s: Seconds that no choice changes.
        shrinks: True if layers work only on the rows that are still needed; else on all rows.
        exchanges: Exchanges that each hop makes, one by default. Only the last, that of its rows, can be hidden.
        passes: Passes in which the rows of each hop travel: forward, and backward if they need a gradient; both by
            default.
    """

    hops: HopCosts
    network: Network
    overlap: bool
    other_s: float = 0.0
    shrinks: bool = True
    exchanges: Sequence[int] = ()
    passes: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Predicted seconds of an epoch on the slowest rank, forward and backward together.

    Attributes:
        epoch_s: Seconds of the whole epoch.
        compute_s: Seconds of computing, replicas included.
        exchange_s: Seconds of exchanges, also of those that overlap computing.
        other_s: Seconds that no choice changes: averaging gradients over ranks, and work that does not depend on the
            graph.
        computed: For each hop, the share of all ranks' halo rows that are computed.
    """

    epoch_s: float
    compute_s: float
    exchange_s: float
    other_s: float
    computed: tuple[float, ...]


def expected_epoch(communicator: Communicator, halo: Halo, chosen: Tensor, costs: EpochCosts) -> Expected:
    """Predict the time of an epoch. Every rank makes the call and gets the same result.

    Args:
        communicator: The ranks.
        halo: The rows of this rank.
        chosen: Those that are computed, as :meth:`~.greedy.Halo.choice` describes them.
        costs: What they cost.
    """
    needed, edges, edges_from_here = _followed(halo, chosen)
    replicas = needed.sum(1).tolist() if costs.shrinks else [int(needed[0].sum())] * len(needed)
    compute_s = sum(row_s * (halo.num_owned + count) for row_s, count in zip(costs.hops.row, replicas, strict=True))
    compute_s += sum(edge_s * count for edge_s, count in zip(costs.hops.edge, edges, strict=True))
    exchange, before, num_hops = [], 0.0, len(halo.widths)
    for rows, fetch_s, passes, exchanges in zip(
        _moved(communicator, halo, needed), costs.hops.fetch, costs.passes or (2,) * num_hops,
        costs.exchanges or (1,) * num_hops, strict=True,
    ):  # fmt: skip
        # rows that cost nothing do not travel in every epoch
        latency_s = costs.network.latency_s * passes / 2 if rows > 0 and fetch_s > 0 else 0.0
        exchange.append(rows * fetch_s + latency_s)
        before += latency_s * (exchanges - 1)
    exchange_s = sum(exchange) + before
    idle = 1 - costs.network.busy if costs.overlap else 0.0
    hidden_s = sum(
        min(edge_s * count, idle * seconds)
        for edge_s, count, seconds in zip(costs.hops.edge, edges_from_here, exchange, strict=True)
    )
    slowest = communicator.gather([compute_s + exchange_s - hidden_s, compute_s]).amax(0).tolist()
    return Expected(
        epoch_s=slowest[0] + costs.other_s,
        compute_s=slowest[1],
        exchange_s=exchange_s,
        other_s=costs.other_s,
        computed=computed_shares(communicator, halo, chosen),
    )


def computed_shares(communicator: Communicator, halo: Halo, chosen: Tensor) -> tuple[float, ...]:
    """Share of all ranks' halo rows that each hop computes. Every rank makes the call."""
    *computed, num_halo = communicator.gather([*chosen.sum(1).tolist(), halo.num_halo]).sum(0).tolist()
    return tuple(count / max(num_halo, 1.0) for count in computed)


def _moved(communicator: Communicator, halo: Halo, needed: Tensor) -> list[float]:
    """Rows that each hop moves on the busiest rank, which is as busy as its rows or as the rows others want of it."""
    size, owner = communicator.world_size, halo.around.owner[halo.rows]
    wanted = [torch.bincount(owner[~computed[halo.rows]], minlength=size) for computed in needed[:-1]]
    everyone = communicator.gather(torch.cat(wanted).tolist()).view(size, len(halo.widths), size)
    received, sent = everyone.sum(2), everyone.sum(0).t()
    moved: list[float] = torch.maximum(received, sent).amax(0).tolist()
    return moved


def _followed(halo: Halo, chosen: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Follow a choice down to the features.

    Returns:
        The replicas whose row after each hop is needed, ``(hops + 1, N)`` bool; the edges of each hop on this rank; and
        those of them whose source row is here.
    """
    native = require("following a plan", ", or use a backend that fetches or computes all rows")
    computed = chosen[:, halo.rows].to(torch.uint8).contiguous()
    needed = torch.empty(len(halo.widths) + 1, halo.around.n_id.numel(), dtype=torch.uint8)
    edges = torch.empty(len(halo.widths), 2, dtype=torch.int64)
    native.pygdist_follow_dependencies(
        ctypes.byref(halo.native()), computed.data_ptr(), needed.data_ptr(), edges.data_ptr()
    )
    on_rank, from_here = edges.t().tolist()
    return needed.bool(), on_rank, from_here
