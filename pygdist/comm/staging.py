"""Rows on a GPU travel through memory of the host where a process group cannot send from the GPU, as gloo cannot.

The memory is pinned: torch keeps it for later copies, and frees none that a copy still reads.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Rows of a GPU on their way into memory of the host, while the GPU goes on.

    Args:
        rows: The rows, as the current stream makes them.
    """

    def __init__(self, rows: Tensor) -> None:
        self._host = landing(rows).copy_(rows, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(rows.device))

    def get(self) -> Tensor:
        """Wait for the copy, on any thread, and return it."""
        self._copied.synchronize()
        return self._host


def landing(rows: Tensor) -> Tensor:
    """Return memory of the host, with arbitrary values, for a copy of ``rows``."""
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
