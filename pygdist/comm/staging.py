"""Rows on a GPU travel through memory of the host where a process group cannot send from the GPU, as gloo cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.memory.ring import download, settle


class HostCopy:
    """Rows of a GPU on their way into memory of the host, while the GPU goes on.

    Args:
        rows: The rows, as the current stream makes them.
    """

    def __init__(self, rows: Tensor) -> None:
        self._device, self._host = rows.device, landing(rows)
        download(rows, self._host)

    def get(self) -> Tensor:
        """Wait for the copy, on any thread, and return it."""
        settle(self._device, self._host)
        return self._host


def landing(rows: Tensor) -> Tensor:
    """Return uninitialised memory of the host of the shape and type of ``rows``."""
    with torch.inference_mode(False):  # another thread fills it, which is in no such mode
        return torch.empty(rows.shape, dtype=rows.dtype)
