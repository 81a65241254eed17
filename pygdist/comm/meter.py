"""The traffic meter: counts a rank's bytes, messages and seconds of waiting since the last reset.

Bytes are payload bytes handed to the process group, without the framing of the transport. Waiting is the time in which
an exchange blocks the calling thread. On CUDA, waiting is the time between events of the stream; reading the meter
waits for these events.

The meter counts exchanges of rows and columns, and sums over ranks. It does not count small calls: gathers of numbers
and texts, barriers, :meth:`~pygdist.comm.Communicator.send_to` and ``receive_from``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Traffic:
    """Counters of one rank. Gathers of numbers and texts, barriers and ``send_to`` are not counted.

    Attributes:
        sent_bytes: Payload bytes sent to other ranks.
        received_bytes: Payload bytes received from other ranks.
        sent_messages: Messages sent to other ranks; a sum over all ranks counts as one message, and an empty message
            does not count.
        calls: Exchanges and sums over ranks that this rank took part in, each counted once.
        exchange_s: Seconds in which the rank waited in these calls.
        bytes_by_label: The ``sent_bytes`` of each label of an exchange.
        stage_s: Seconds of each stage of mini-batches, by name (:meth:`TrafficMeter.stage`).
        summed_bytes: The ``sent_bytes`` of each label of a sum over all ranks.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    calls: int = 0
    exchange_s: float = 0.0
    bytes_by_label: Counter[str] = field(default_factory=Counter)
    summed_bytes: Counter[str] = field(default_factory=Counter)
    stage_s: dict[str, float] = field(default_factory=dict)

    def bytes_of(self, prefix: str) -> int:
        """Return the bytes sent in all exchanges whose label begins with ``prefix``."""
        return sum(count for label, count in self.bytes_by_label.items() if label.startswith(prefix))


@dataclass
class TrafficMeter:
    """Counts the traffic of a rank, in ``total``; :meth:`reset` starts a new period, such as an epoch.

    Several threads may count bytes and calls at once. Only the main thread counts seconds of waiting.
    """

    total: Traffic = field(default_factory=Traffic)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque, init=False, repr=False)

    def called(self) -> None:
        """Count a call in which all ranks take part."""
        with self._lock:
            self.total.calls += 1

    def sent(self, num_bytes: int, label: str) -> None:
        """Count one message sent in the exchange ``label``."""
        with self._lock:
            self.total.sent_bytes += num_bytes
            self.total.sent_messages += 1
            self.total.bytes_by_label[label] += num_bytes

    def received(self, num_bytes: int) -> None:
        """Count the bytes of one received message."""
        with self._lock:
            self.total.received_bytes += num_bytes

    def summed(self, num_bytes: int, label: str) -> None:
        """Count the bytes that this rank sends, and receives, for a sum over all ranks, as one message."""
        self.sent(num_bytes, label)
        self.received(num_bytes)
        with self._lock:
            self.total.summed_bytes[label] += num_bytes

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count the time inside the block as waiting in an exchange."""
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            self._take_up(torch.cuda.Event.query)  # who never reads would keep them all
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.total.exchange_s += time.perf_counter() - begin

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the block for the stage ``name``; another thread may run it during training."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.total.stage_s[name] = self.total.stage_s.get(name, 0.0) + time.perf_counter() - begin

    def read(self) -> Traffic:
        """Return the counters since the last reset. The object goes on counting; copy it to keep the values."""
        self._take_up(_has_ended)
        return self.total

    def _take_up(self, is_over: Callable[[torch.cuda.Event], bool]) -> None:
        """Add up the waits that are over on the device; they end in their order."""
        while self._events and is_over(self._events[0][1]):
            start, end = self._events.popleft()
            self.total.exchange_s += start.elapsed_time(end) / 1e3

    def reset(self) -> Traffic:
        """Return the counters since the last reset, and start from zero with new counters."""
        with self._lock:
            total, self.total = self.read(), Traffic()
        return total


def _has_ended(event: torch.cuda.Event) -> bool:
    event.synchronize()
    return True
