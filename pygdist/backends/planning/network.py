"""Measures the time of exchanges on this network, with few rows (NeutronStar, Sec. 3: T_c)."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pygdist.backends.passes.clock import wall_s
from pygdist.comm import Communicator, ExchangePlan

_WIDTH = 32  # of the rows that travel while the network is measured
_FIRST_ROWS = 256  # for each pair of ranks; four times as many each time, until an exchange takes long enough
_LONG_ENOUGH_S = 0.03  # token buckets and the kernel's buffers hide the rate of a link for the first milliseconds
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Network:
    """The time that exchanges take.

    Attributes:
        value_s: Seconds for each value on the busiest rank, there and back.
        latency_s: Seconds for each exchange, whatever its size.
        busy: Share of the exchange time, from 0 to 1, in which the processors of ranks copy rows, so that ranks cannot
            compute.
    """

    value_s: float
    latency_s: float
    busy: float


def probe_exchange(
    communicator: Communicator, plan: ExchangePlan, like: Tensor, *, ring: bool = False, wire: torch.dtype | None = None
) -> Network:
    """Time exchanges: fetch rows and give them back, as many as the plan has, or as many as a clock needs.

    Args:
        communicator: The ranks; each makes this call.
        plan: The rows that each rank fetches from each other.
        like: A tensor with the dtype and device of the rows.
        ring: Exchange with one peer after the other.
        wire: The dtype in which rows travel.
    """
    if communicator.world_size == 1:
        return Network(value_s=0.0, latency_s=0.0, busy=0.0)
    timed = partial(_exchanged, communicator, like, ring, wire)
    latency_s, _, _ = timed(_at_most(plan, 1))  # without a row nothing travels
    rows = _FIRST_ROWS
    while True:
        part = _at_most(plan, rows)
        seconds, _, _ = timed(part, rounds=1)
        is_whole = not communicator.gather([float(max(plan.send_counts + plan.recv_counts) > rows)]).any()
        if seconds >= _LONG_ENOUGH_S or is_whole:
            seconds, values, busy = timed(part)
            if seconds >= _LONG_ENOUGH_S or is_whole:  # else the first was slow for other reasons
                value_s = max(seconds - latency_s, 0.0) / values if values else 0.0
                return Network(value_s=value_s, latency_s=latency_s, busy=busy)
        rows *= 4


def probe_reduce(communicator: Communicator, num_bytes: int) -> float:
    """Seconds to sum so many bytes of gradients over all ranks; each rank makes this call."""
    if communicator.world_size == 1 or num_bytes == 0:
        return 0.0
    memory = torch.zeros(num_bytes // 4, device=communicator.device)
    taken = []
    for _ in range(_ROUNDS):
        communicator.barrier()
        start = wall_s(communicator.device)
        communicator.reduce_in_place(memory, "gradients, timed")
        taken.append(wall_s(communicator.device) - start)
    return float(communicator.gather([statistics.median(taken)]).max())


def _at_most(plan: ExchangePlan, rows: int) -> ExchangePlan:
    """The plan with at most ``rows`` rows for each pair of ranks."""
    send = tuple(min(count, rows) for count in plan.send_counts)
    index = [plan.send_index_of(peer)[:count] for peer, count in enumerate(send)]
    return ExchangePlan(
        send_index=torch.cat(index), send_counts=send, recv_counts=tuple(min(count, rows) for count in plan.recv_counts)
    )


def _exchanged(
    communicator: Communicator,
    like: Tensor,
    ring: bool,
    wire: torch.dtype | None,
    plan: ExchangePlan,
    *,
    rounds: int = _ROUNDS,
) -> tuple[float, int, float]:
    """Seconds of the slowest rank, values of the busiest, and the share of the time in which ranks compute."""
    num_rows = int(plan.send_index.max()) + 1 if plan.num_sent else 0
    x = like.new_ones(num_rows, _WIDTH)
    taken, computed = [], []
    for _ in range(rounds):
        communicator.barrier()
        start, before = wall_s(communicator.device), time.process_time()
        halo = communicator.exchange_rows(x, plan, label="rows, timed", ring=ring, wire=wire)
        communicator.return_rows(halo, plan, num_owned=num_rows, label="rows, timed, back", ring=ring, wire=wire)
        taken.append(wall_s(communicator.device) - start)
        computed.append(time.process_time() - before)
    moved = max(plan.num_sent, plan.num_received) * _WIDTH
    # the processor's part of an exchange on CUDA keeps no kernel waiting
    busy = 0.0 if communicator.device.type == "cuda" else min(sum(computed) / sum(taken), 1.0)
    everyone = communicator.gather([statistics.median(taken), float(moved), busy])
    seconds, values, _ = everyone.amax(0).tolist()
    return seconds, int(values), float(everyone[:, 2].mean())
