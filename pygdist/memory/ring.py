"""Copies between a GPU and the host through a few page-locked buffers, however much memory of the host is copied.

A GPU copies by itself, while the host goes on, from and to page-locked memory alone, which the system cannot use for
anything else. So tensors that do not fit on a GPU, and rows that travel without nccl, are in plain memory, and pass
through rings of buffers, one for each direction. Copies to a GPU run on a stream of their own: those of the next chunk
while this one is computed (NeutronTP, Sec. 4.2.2).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_BUFFERS, _BUFFER_BYTES = 4, 1 << 23  # in each direction


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, its own or another, without gradient.

    The host waits for a free buffer alone, of which there are four of 8 MiB: for the fifth tensor at a time, or part of
    one, until the first is copied.
    """
    return _ring(device).upload(x) if x.device.type == "cpu" and device.type == "cuda" else x.to(device)


def upload(x: Tensor, out: Tensor) -> None:
    """Copy a tensor of the host into contiguous memory of its shape and type on a GPU, behind what uses it there."""
    _ring(out.device).upload(x, out)


def download(x: Tensor, out: Tensor) -> None:
    """Copy a tensor into contiguous memory of its shape and type on the host, or on its device.

    From a GPU, values are there after :func:`settle`, or once ``out``, or a part of its memory, was :func:`uploaded`.
    """
    if x.is_cuda and out.device.type == "cpu":
        _ring(x.device).download(x, out)
    else:
        out.copy_(x)


def settle(device: torch.device, out: Tensor | None = None) -> None:
    """Wait until what left a GPU by :func:`download` is in its place: all of it, or what goes to the memory of ``out``.

    Any thread may wait.
    """
    if device.type == "cuda":
        _ring(device).settle(out)


class _Buffer:
    """A page-locked buffer: the last copy from or to it, and where its bytes go on the host."""

    def __init__(self) -> None:
        with torch.inference_mode(False):  # training uses what an evaluation may have made first
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
        self._up, self._down = ([_Buffer() for _ in range(_BUFFERS)] for _ in range(2))
        self._turns_up: Iterator[_Buffer] = itertools.cycle(self._up)
        self._turns_down: Iterator[_Buffer] = itertools.cycle(self._down)
        self._going_up, self._going_down = threading.Lock(), threading.Lock()

    def upload(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy a tensor of the host for the current stream, into new memory by default."""
        self.settle(x)
        with self._going_up, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            if out is not None:
                assert out.is_contiguous(), "else a copy of it would be filled"
                self._stream.wait_stream(current)  # which may still use its memory
            with torch.cuda.stream(self._stream):
                there = torch.empty(x.shape, dtype=x.dtype, device=self._device) if out is None else out
                for piece, place in zip(_pieces(x), _pieces(there), strict=True):
                    buffer = next(self._turns_up)
                    buffer.settle()
                    place.copy_(buffer.memory[: piece.numel()].copy_(piece), non_blocking=True)
                    buffer.copied.record(self._stream)
            current.wait_stream(self._stream)
            there.record_stream(self._stream if out is not None else current)
        return there

    def download(self, x: Tensor, out: Tensor) -> None:
        """Copy a tensor that the current stream makes into memory of the host."""
        with self._going_down, torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            assert out.is_contiguous(), "else a copy of it would be filled"
            for piece, place in zip(_pieces(x), _pieces(out), strict=True):
                buffer = next(self._turns_down)
                buffer.settle()
                buffer.memory[: piece.numel()].copy_(piece, non_blocking=True)
                buffer.copied.record(current)
                buffer.goes_to = place

    def settle(self, out: Tensor | None) -> None:
        """See :func:`settle`."""
        for buffer in self._down:
            goes_to = buffer.goes_to
            if goes_to is not None and (out is None or _memory(goes_to) == _memory(out)):
                with torch.cuda.device(self._device):
                    buffer.copied.synchronize()  # without the lock: other threads begin copies meanwhile
                with self._going_down:
                    if buffer.goes_to is goes_to:
                        buffer.settle()


def _ring(device: torch.device) -> Ring:
    return _numbered(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _numbered(number: int) -> Ring:
    return Ring(torch.device("cuda", number))


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Return the bytes of a tensor, as many at a time as a buffer takes."""
    raw: Tensor = x.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(raw.split(_BUFFER_BYTES))
