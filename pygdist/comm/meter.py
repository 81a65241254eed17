"""The traffic meter: what a rank sent, received and waited for since the last reset.

Bytes are payload bytes handed to the process group; framing of the transport is not included. Waiting is the time
that the calling thread was blocked in an exchange; on CUDA it is read off stream events, so reading the meter there
is meaningful only after the device was synchronised (:class:`pygdist.lightning.ExchangeMonitor` does).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Traffic", "TrafficMeter"]


@dataclass
class Traffic:
    """Counters of one rank.

    Attributes:
        sent_bytes: Payload bytes sent to other ranks.
        received_bytes: Payload bytes received from other ranks.
        sent_messages: Point-to-point messages sent (a pair of ranks without rows exchanges none).
        calls: Collective calls, counted once per rank whatever the number of messages.
        exchange_s: Seconds blocked in them.
        summed_bytes: Of the bytes sent, those of sums over all ranks, by their label.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    calls: int = 0
    exchange_s: float = 0.0
    summed_bytes: Counter[str] = field(default_factory=Counter)


@dataclass
class TrafficMeter:
    """Counts into :attr:`total`; :meth:`reset` starts a new period, such as an epoch."""

    total: Traffic = field(default_factory=Traffic)
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list, repr=False)

    def sent(self, num_bytes: int) -> None:
        """Count one message that leaves this rank."""
        self.total.sent_bytes += num_bytes
        self.total.sent_messages += 1

    def received(self, num_bytes: int) -> None:
        """Count the payload of one message that arrives."""
        self.total.received_bytes += num_bytes

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count the time spent inside as blocked in an exchange."""
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.total.exchange_s += time.perf_counter() - begin

    def read(self) -> Traffic:
        """The counters so far; on CUDA call it after a synchronisation."""
        for start, end in self._events:
            self.total.exchange_s += start.elapsed_time(end) / 1e3
        self._events.clear()
        return self.total

    def reset(self) -> Traffic:
        """The counters so far, and start again from zero."""
        total, self.total = self.read(), Traffic()
        return total
