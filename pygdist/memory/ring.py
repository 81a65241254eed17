"""Copies between a GPU and the host through a few page-locked buffers, however much memory of the host is copied.

A GPU copies by itself, while the host goes on, from and to page-locked memory alone, which the system cannot use for
anything else. So tensors that do not fit on a GPU wait in plain memory, and pass through a ring of buffers. Copies to a
GPU run on a stream of their own: those of the next chunk while this one is computed (NeutronTP, Sec. 4.2.2).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_BUFFERS, _BUFFER_BYTES = 8, 1 << 23


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, its own or another; the host does not wait for a GPU to which it is copied."""
    return _ring(device).upload(x) if x.device.type == "cpu" and device.type == "cuda" else x.to(device)


def download(x: Tensor, out: Tensor) -> None:
    """Copy a tensor into memory of its shape and type on the host, or on its device.

    From a GPU, values are there after :func:`settle`, or once :func:`uploaded` returns. ``out`` is contiguous.
    """
    if x.is_cuda and out.device.type == "cpu":
        _ring(x.device).download(x, out)
    else:
        out.copy_(x)


def settle(device: torch.device) -> None:
    """Wait until all that left a GPU by :func:`download` is in its place."""
    if device.type == "cuda":
        _ring(device).settle()


class _Buffer:
    """A page-locked buffer: the last copy from or to it, and where its bytes go on the host."""

    def __init__(self) -> None:
        self.memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.goes_to: Tensor | None = None

    def settle(self) -> None:
        self.copied.synchronize()
        if self.goes_to is not None:
            self.goes_to.copy_(self.memory[: self.goes_to.numel()])
            self.goes_to = None


class Ring:
    """The buffers of a GPU, which copies use in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._buffers = [_Buffer() for _ in range(_BUFFERS)]
        self._turns: Iterator[_Buffer] = itertools.cycle(self._buffers)
        self._lock = threading.Lock()

    def upload(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor of the host, for the current stream."""
        with self._lock:
            self._settle()  # it may be what is on its way
            current = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(self._stream):
                out = torch.empty(x.shape, dtype=x.dtype, device=self._device)
                for piece, place in zip(_pieces(x), _pieces(out), strict=True):
                    buffer = next(self._turns)
                    buffer.settle()
                    place.copy_(buffer.memory[: piece.numel()].copy_(piece), non_blocking=True)
                    buffer.copied.record(self._stream)
            current.wait_stream(self._stream)
        out.record_stream(current)
        return out

    def download(self, x: Tensor, out: Tensor) -> None:
        """Copy a tensor that the current stream makes into memory of the host."""
        with self._lock:
            current = torch.cuda.current_stream(self._device)
            for piece, place in zip(_pieces(x), _pieces(out), strict=True):
                buffer = next(self._turns)
                buffer.settle()
                buffer.memory[: piece.numel()].copy_(piece, non_blocking=True)
                buffer.copied.record(current)
                buffer.goes_to = place

    def settle(self) -> None:
        """See :func:`settle`."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        for buffer in self._buffers:
            if buffer.goes_to is not None:
                buffer.settle()


@functools.cache
def _ring(device: torch.device) -> Ring:
    return Ring(device)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes of a tensor, as many at a time as a buffer takes."""
    raw: Tensor = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(raw.split(_BUFFER_BYTES))
