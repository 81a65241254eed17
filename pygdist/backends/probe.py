"""What a model's hops cost on this device, and rows on this network: measured, on little (NeutronStar, Sec. 3).

The paper's T_v and T_e are seconds per value, the same in every layer. Here a forward and backward pass is timed in and
between hops, so each has its own: a layer of 600 features costs more than its width says, and a hop whose sums are kept
(:class:`~pygdist.backends.Savings`) costs nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.comm import Communicator, ExchangePlan
from pygdist.errors import InputError

__all__ = ["Clock", "HopCosts", "Network", "probe_exchange", "probe_reduce", "running_s"]

_WIDTH = 32  # of the rows that travel while the network is measured
_FIRST_ROWS = 256  # for each pair of ranks; four times as many each time, until an exchange takes long enough
_LONG_ENOUGH_S = 0.03  # token buckets and the kernel's buffers hide the rate of a link for the first milliseconds
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class HopCosts:
    """Seconds, forward and backward together, by hop.

    Attributes:
        row: ``row[l]`` for each row between hop ``l`` (0 for the start) and the next (the end).
        edge: ``edge[l - 1]`` for each edge in hop ``l``.
        fetch: ``fetch[l - 1]`` for each row that is fetched for hop ``l``.
    """

    row: tuple[float, ...]
    edge: tuple[float, ...]
    fetch: tuple[float, ...]

    def to_dict(self) -> dict[str, list[float]]:
        """For JSON."""
        return {name: list(values) for name, values in asdict(self).items()}


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


class Clock:
    """Tells the time that a model spends in each hop from that between hops, forward and backward.

    Args:
        device: Where the model runs.

    Attributes:
        graded: The hops that have a backward pass: not those over features, which need no gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graded: set[int] = set()
        # when, the hop that runs from then on, if any, and after which hop that is
        self._marks: list[tuple[float, int | None, int]] = []

    def begin(self, hop: int) -> None:
        """A hop begins, which may be kept and so take no time: what follows comes after it."""
        self._mark(None, hop)

    def timed(self, hop: int, run: Callable[..., Tensor], kwargs: Mapping[str, Any]) -> Tensor:
        """``run(**kwargs)`` as (a part of) hop number ``hop``, from 1."""
        inside = {name: self._leaving(value, hop) for name, value in kwargs.items()}
        self._mark(hop, hop)
        out = run(**inside)
        self._mark(None, hop)
        if isinstance(out, Tensor) and out.requires_grad:  # not where attention's weights are left to the hop
            self.graded.add(hop)
            out.register_hook(lambda _: self._mark(hop, hop))  # a layer may write into it
        return out

    def seconds(self, step: Callable[[], Tensor], parameters: list[Tensor], num_hops: int) -> tuple[list[float], ...]:
        """Seconds between hops (``num_hops + 1`` of them) and in hops, of one forward and backward pass."""
        between, inside = [0.0] * (num_hops + 1), [0.0] * num_hops
        for backward in (False, True):
            self._marks = []
            self._mark(None, num_hops if backward else 0)
            if not backward:
                out = step()
            elif out.requires_grad and parameters:
                _backward(out, parameters)
            self._mark(None, 0)
            for (start, hop, after), (end, _, _) in itertools.pairwise(self._marks):
                if hop is None:
                    between[after] += end - start
                else:
                    inside[hop - 1] += end - start
        return between, inside

    def _leaving(self, value: Any, hop: int) -> Any:
        """Marks where the gradient leaves a hop: by what the hop reads, apart from its other uses."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._leaving(one, hop) for one in value)
        if isinstance(value, Tensor) and value.requires_grad:
            return _Mark.apply(value, self, hop - 1)  # type: ignore[no-untyped-call]
        return value

    def _mark(self, hop: int | None, after: int) -> None:
        self._marks.append((running_s(self._device), hop, after))


def _backward(out: Tensor, parameters: list[Tensor]) -> None:
    try:
        torch.autograd.grad(out, parameters, allow_unused=True)
    except RuntimeError as error:
        if "torch.utils.checkpoint" not in str(error):
            raise
        raise InputError(
            "activation checkpointing (torch.utils.checkpoint) is not supported by backends that time the model's hops "
            "or compute rows of neighbours; 'comm' does"
        ) from error


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, after: int) -> Tensor:
        ctx.clock, ctx.after = clock, after
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock._mark(None, ctx.after)
        return grad, None, None


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


def running_s(device: torch.device) -> float:
    """Seconds for which this thread ran.

    Ranks that share a processor stop each other, and would count that to what is short by itself. On CUDA seconds on a
    clock, once the device has done what it was asked to.
    """
    return _now(device) if device.type == "cuda" else time.thread_time()


def _now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
