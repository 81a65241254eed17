"""Rows on a GPU travel through the host's memory if the process group, as gloo, cannot send from the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.memory.ring import download, settle


class HostCopy:
    """A copy of a GPU's rows in the host's memory, made while the GPU goes on.

    Args:
        rows: The rows; the copy begins when the current stream has computed them.
    """

    def __init__(self, rows: Tensor) -> None:
        self._device, self._host = rows.device, landing(rows)
        download(rows, self._host)

    def get(self) -> Tensor:
        """Wait for the end of the copy, on any thread, and return the rows."""
        settle(self._device, self._host)
        return self._host


def landing(rows: Tensor) -> Tensor:
    """Return uninitialised memory on the host with the shape and dtype of ``rows``."""
    with torch.inference_mode(False):  # another thread fills it, which is in no such mode
        return torch.empty(rows.shape, dtype=rows.dtype)
