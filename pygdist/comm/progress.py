"""Exchanges that a GPU makes while the host goes on, as with nccl, and that are not over."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

import torch

from pygdist.comm.places import Place


class Event(Protocol):
    """An event of a GPU, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Tell if the GPU has passed the event; the host does not wait."""


class GpuEvent:
    """An event of a GPU after all work of the current stream; any thread may query it.

    Args:
        device: The GPU. Without it, a query from another thread would begin to use the first GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def query(self) -> bool:
        """See :class:`Event`."""
        with torch.cuda.device(self._device):
            return bool(self._event.query())


class DeviceProgress:
    """The exchanges of this rank that its GPU has not finished, oldest first. Any thread may call the methods."""

    def __init__(self) -> None:
        self._ahead = deque[tuple[Place, float, Event]]()
        self._lock = threading.Lock()

    def add(self, place: Place, over: Event) -> None:
        """Note an exchange that the host has handed to the GPU.

        Args:
            place: The place of the rank during the exchange.
            over: An event at the end of the exchange.
        """
        with self._lock:
            self._drop()
            self._ahead.append((place, time.monotonic(), over))

    def oldest(self) -> tuple[Place, float] | None:
        """Return the place of the oldest exchange that is not over, and the seconds for which it has been the oldest.

        In these seconds the GPU may still compute, before the exchange begins. ``None`` if all exchanges are over.
        """
        with self._lock:
            self._drop()
            return (self._ahead[0][0], time.monotonic() - self._ahead[0][1]) if self._ahead else None

    def clear(self) -> None:
        """Forget all exchanges."""
        with self._lock:
            self._ahead.clear()

    def _drop(self) -> None:
        """Drop the exchanges that are over; the next one has been the oldest from then on."""
        dropped = False
        while self._ahead and _is_past(self._ahead[0][2]):
            self._ahead.popleft()
            dropped = True
        if dropped and self._ahead:
            place, _, over = self._ahead.popleft()
            self._ahead.appendleft((place, time.monotonic(), over))


def _is_past(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError:  # the GPU failed, which the thread that uses it finds out
        return True
