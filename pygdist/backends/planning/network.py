"""What a model's hops cost on this device, and rows on this network: measured, on little (NeutronStar, Sec. 3).

The paper's T_v and T_e are seconds per value, the same in every layer. Here a forward and backward pass is timed in and
between hops, so each has its own: a layer of 600 features costs more than its width says, and a hop whose sums are kept
(:class:`~pygdist.backends.Savings`) costs nothing.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.backends.passes.clock import _now
from pygdist.comm import Communicator, ExchangePlan

__all__ = ["Network", "probe_exchange", "probe_reduce"]

_WIDTH = 32  # of the rows that travel while the network is measured
_FIRST_ROWS = 256  # for each pair of ranks; four times as many each time, until an exchange takes long enough
_LONG_ENOUGH_S = 0.03  # token buckets and the kernel's buffers hide the rate of a link for the first milliseconds
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Network:
    """What exchanges take.

    Attributes:
        value_s: Seconds for each value on the busiest rank, there and back.
        latency_s: Seconds for each exchange, whatever its size.
        busy: Share of that time in which ranks compute (they copy rows, and so does the system for them), from 0 to 1;
            nothing else can be done meanwhile.
    """

    value_s: float
    latency_s: float
    busy: float


def probe_exchange(
    communicator: Communicator, plan: ExchangePlan, like: Tensor, *, ring: bool = False, wire: torch.dtype | None = None
) -> Network:
    """What exchanges take: rows are fetched and given back, as many as the plan has or a clock needs.

    Args:
        communicator: The ranks; each makes this call.
        plan: Who fetches from whom.
        like: Tells dtype and device of the rows.
        ring: With one peer after the other.
        wire: The dtype in which they travel.

    """
    if communicator.world_size == 1:
        return Network(value_s=0.0, latency_s=0.0, busy=0.0)
    latency = _exchanged(communicator, _at_most(plan, 1), like, ring, wire)[0]  # without a row nothing travels
    rows = _FIRST_ROWS
    while True:
        part = _at_most(plan, rows)
        taken, _, _ = _exchanged(communicator, part, like, ring, wire, rounds=1)
        whole = int(communicator.gather([float(max(plan.send_counts + plan.recv_counts) > rows)]).max()) == 0
        if taken >= _LONG_ENOUGH_S or whole:
            taken, values, busy = _exchanged(communicator, part, like, ring, wire)
            if taken < _LONG_ENOUGH_S and not whole:  # the first was slow for other reasons
                rows *= 4
                continue
            value_s = max(taken - latency, 0.0) / values if values else 0.0
            return Network(value_s=value_s, latency_s=latency, busy=busy)
        rows *= 4


def probe_reduce(communicator: Communicator, num_bytes: int) -> float:
    """Seconds to sum so many bytes of gradients over all ranks; each makes this call."""
    if communicator.world_size == 1 or num_bytes == 0:
        return 0.0
    memory = torch.zeros(num_bytes // 4, device=communicator.device)
    taken = []
    for _ in range(_ROUNDS):
        communicator.barrier()
        start = _now(communicator.device)
        communicator.reduce_in_place(memory, "gradients, timed")
        taken.append(_now(communicator.device) - start)
    return float(communicator.gather([statistics.median(taken)]).max())


def _at_most(plan: ExchangePlan, rows: int) -> ExchangePlan:
    """The plan with no more than so many rows for each pair of ranks."""
    send = tuple(min(count, rows) for count in plan.send_counts)
    index = [plan.send_index_of(peer)[:count] for peer, count in enumerate(send)]
    return ExchangePlan(
        send_index=torch.cat(index), send_counts=send, recv_counts=tuple(min(count, rows) for count in plan.recv_counts)
    )


def _exchanged(
    communicator: Communicator,
    plan: ExchangePlan,
    like: Tensor,
    ring: bool,
    wire: torch.dtype | None,
    rounds: int = _ROUNDS,
) -> tuple[float, int, float]:
    """Seconds of the slowest rank, values of the busiest, share of the time in which ranks computed."""
    num_rows = int(plan.send_index.max()) + 1 if plan.num_sent else 0
    x = like.new_ones(num_rows, _WIDTH)
    taken, computed = [], []
    for _ in range(rounds):
        communicator.barrier()
        start, before = _now(communicator.device), time.process_time()
        halo = communicator.exchange_rows(x, plan, label="rows, timed", ring=ring, wire=wire)
        communicator.return_rows(halo, plan, num_owned=num_rows, label="rows, timed, back", ring=ring, wire=wire)
        taken.append(_now(communicator.device) - start)
        computed.append(time.process_time() - before)
    moved = max(plan.num_sent, plan.num_received) * _WIDTH
    # what the processor does for an exchange on CUDA keeps no kernel waiting
    busy = 0.0 if communicator.device.type == "cuda" else min(sum(computed) / sum(taken), 1.0)
    everyone = communicator.gather([statistics.median(taken), float(moved), busy])
    seconds, values, _ = everyone.amax(0).tolist()
    return seconds, int(values), float(everyone[:, 2].mean())
