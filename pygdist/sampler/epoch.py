"""The number of the epoch, where a loader's workers see it too."""

from __future__ import annotations

import torch

__all__ = ["SharedEpoch"]


class SharedEpoch:
    """An epoch in memory that processes share: workers which outlive an epoch know of the next.

    Attributes:
        number: From 0.
    """

    def __init__(self) -> None:
        self._number = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def number(self) -> int:
        """See the class."""
        return int(self._number)

    @number.setter
    def number(self, number: int) -> None:
        self._number.fill_(number)
