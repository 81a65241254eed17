"""What an epoch of a plan is expected to take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pygdist.backends.planning.hop_costs import HopCosts
from pygdist.backends.planning.network import Network
from pygdist.comm import Communicator
from pygdist.graph.neighbourhood import Neighbourhood
from pygdist.native import NativeDependencies, load

__all__ = ["Expected", "computed_shares", "expected_epoch"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Seconds that an epoch is expected to take on the slowest rank, forward and backward.

    Attributes:
        epoch_s: All of it.
        compute_s: Computing, replicas included.
        exchange_s: Exchanging, whether it is hidden behind computing or not.
        other_s: What does not depend on the plan: averaging gradients over ranks, and what takes as long on any graph.
        computed: Share of the remote rows that are computed again, by hop; over all ranks.
    """

    epoch_s: float
    compute_s: float
    exchange_s: float
    other_s: float
    computed: tuple[float, ...]


def expected_epoch(
    communicator: Communicator,
    found: Neighbourhood,
    num_owned: int,
    num_halo: int,
    chosen: Sequence[Tensor],
    costs: HopCosts,
    *,
    network: Network,
    other_s: float,
    overlap: bool,
    shrinks: bool = True,
    exchanges: Sequence[int] | None = None,
    passes: Sequence[int] | None = None,
) -> Expected:
    """What a choice costs; every rank makes the call and gets the same.

    Args:
        communicator: The ranks.
        found: The nodes around this rank.
        num_owned: The first so many are its own.
        num_halo: After them, the sources of its edges.
        chosen: Which of these are computed here, by hop; see :func:`~pygdist.backends.recomputing.rows.replicas_of`.
        costs: Of rows and edges.
        network: Of it the latency, and what of an exchange cannot be hidden.
        other_s: What does not depend on the choice.
        overlap: Whether edges from this rank's own rows are aggregated while others' travel.
        shrinks: Whether what stands between hops works on the rows that are needed there; on all of them otherwise.
        exchanges: How many exchanges each hop makes; nothing hides those before that of its rows. One by default.
        passes: In how many passes its rows travel, forward and backward. Two by default.
    """
    num_hops = len(chosen)
    needed, edges = _followed(found, num_owned, num_halo, chosen)
    halo = slice(num_owned, num_owned + num_halo)
    replicas = [int(needed[hop if shrinks else 0].sum()) for hop in range(num_hops + 1)]
    compute = sum(cost * (num_owned + count) for cost, count in zip(costs.row, replicas, strict=True))
    compute += sum(costs.edge[hop] * edges[hop][0] for hop in range(num_hops))
    # a rank is as busy as what it receives or what others want of it
    size = communicator.world_size
    wants = [np.bincount(found.owner[halo].numpy()[needed[hop, halo] == 0], minlength=size) for hop in range(num_hops)]
    everyone = communicator.gather([float(count) for part in wants for count in part]).view(size, num_hops, size)
    received, sent = everyone.sum(2), everyone.sum(0).t()
    moved = torch.maximum(received, sent).amax(0).tolist()  # of the busiest rank, by hop
    # rows that cost nothing do not travel in every epoch
    latency = [network.latency_s * count / 2 for count in passes or (2,) * num_hops]
    exchange = [
        rows * cost + (wait if rows > 0 and cost > 0 else 0.0)
        for rows, cost, wait in zip(moved, costs.fetch, latency, strict=True)
    ]
    before = sum(
        wait * (count - 1)
        for count, seconds, wait in zip(exchanges or (), exchange, latency, strict=False)
        if seconds > 0
    )
    total, busy = compute, sum(exchange) + before
    idle = 1 - network.busy if overlap else 0.0
    hidden = sum(min(costs.edge[hop] * edges[hop][1], idle * exchange[hop]) for hop in range(num_hops))
    figures = communicator.gather([total + busy - hidden, total]).amax(0).tolist()
    return Expected(
        epoch_s=figures[0] + other_s,
        compute_s=figures[1],
        exchange_s=busy,
        other_s=other_s,
        computed=computed_shares(communicator, num_halo, chosen),
    )


def computed_shares(communicator: Communicator, num_halo: int, chosen: Sequence[Tensor]) -> tuple[float, ...]:
    """Of the remote rows that each hop reads, the share that is computed again; over all ranks, all of which call."""
    counts = communicator.gather([float(mask.sum()) for mask in chosen] + [float(num_halo)]).sum(0)
    return tuple((counts[:-1] / max(float(counts[-1]), 1.0)).tolist())


def _followed(
    found: Neighbourhood, num_owned: int, num_halo: int, chosen: Sequence[Tensor]
) -> tuple[np.ndarray, list[list[int]]]:
    """Replicas whose rows are needed after each hop, ``(hops + 1, N)``; edges of each hop, and those from rows here."""
    native = load()
    assert native is not None, "who plans has looked"
    indptr, index = found.indptr.numpy(), found.index.numpy()
    num_rows, num_hops = found.n_id.numel(), len(chosen)
    mine = np.ascontiguousarray(torch.stack(list(chosen))[:, num_owned : num_owned + num_halo].numpy(), dtype=np.uint8)
    needed, edges = np.empty((num_hops + 1, num_rows), dtype=np.uint8), np.empty((num_hops, 2), dtype=np.int64)
    given = NativeDependencies(
        num_rows=num_rows,
        num_owned=num_owned,
        num_halo=num_halo,
        indptr=indptr.ctypes.data,
        index=index.ctypes.data,
        num_hops=num_hops,
    )
    native.pygdist_follow_dependencies(ctypes.byref(given), mine.ctypes.data, needed.ctypes.data, edges.ctypes.data)
    return needed, edges.tolist()
