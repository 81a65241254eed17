"""The traffic meter: counts what a rank sends and receives, and the seconds that it waits, since the last reset.

Bytes are payload bytes handed to the process group, without the framing of the transport. Waiting is the time that the
calling thread is blocked in an exchange. On CUDA it is the time between events of the stream; reading waits for them.
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
    """Counters of one rank.

    Attributes:
        sent_bytes: Payload bytes sent to other ranks.
        received_bytes: Payload bytes received from other ranks.
        sent_messages: Point-to-point messages sent (a rank without rows for another sends it none).
        calls: Collective calls, counted once per rank whatever the number of messages.
        exchange_s: Seconds blocked in collective calls.
        bytes_by_label: ``sent_bytes`` by the label of the exchange.
        stage_s: Seconds of the stages of mini-batches, by name (:meth:`TrafficMeter.stage`).
        summed_bytes: The ``sent_bytes`` of sums over all ranks, by label.
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
        """Return the bytes that were sent under labels that begin so."""
        return sum(count for label, count in self.bytes_by_label.items() if label.startswith(prefix))


@dataclass
class TrafficMeter:
    """Counts into ``total``; :meth:`reset` starts a new period, such as an epoch.

    Threads may count bytes and calls at once; the main thread alone counts what it waits.
    """

    total: Traffic = field(default_factory=Traffic)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque, init=False, repr=False)

    def called(self) -> None:
        """Count a collective call."""
        with self._lock:
            self.total.calls += 1

    def sent(self, num_bytes: int, label: str) -> None:
        """Count one message sent in the exchange ``label``."""
        with self._lock:
            self.total.sent_bytes += num_bytes
            self.total.sent_messages += 1
            self.total.bytes_by_label[label] += num_bytes

    def received(self, num_bytes: int) -> None:
        """Count the payload of one message received."""
        with self._lock:
            self.total.received_bytes += num_bytes

    def summed(self, num_bytes: int, label: str) -> None:
        """Count what this rank sends and receives for a sum over all ranks."""
        self.sent(num_bytes, label)
        self.received(num_bytes)
        with self._lock:
            self.total.summed_bytes[label] += num_bytes

    @contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count the time inside the block as blocked in an exchange."""
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
        """Count the time inside the block as that of a stage, which a thread may be in while the main thread trains."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.total.stage_s[name] = self.total.stage_s.get(name, 0.0) + time.perf_counter() - begin

    def read(self) -> Traffic:
        """Return the counters since the last reset."""
        self._take_up(_has_ended)
        return self.total

    def _take_up(self, is_over: Callable[[torch.cuda.Event], bool]) -> None:
        """Add up the waits that are over on the device; they end in their order."""
        while self._events and is_over(self._events[0][1]):
            start, end = self._events.popleft()
            self.total.exchange_s += start.elapsed_time(end) / 1e3

    def reset(self) -> Traffic:
        """Return the counters, and count from zero again."""
        with self._lock:
            total, self.total = self.read(), Traffic()
        return total


def _has_ended(event: torch.cuda.Event) -> bool:
    event.synchronize()
    return True
