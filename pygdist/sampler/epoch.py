"""The number of the epoch, in memory that a loader's workers share."""

from __future__ import annotations

import torch


class SharedEpoch:
    """An epoch number in shared memory: workers that outlive an epoch see the next one."""

    def __init__(self) -> None:
        self._number = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def number(self) -> int:
        """The epoch, from 0."""
        return int(self._number)

    @number.setter
    def number(self, number: int) -> None:
        self._number.fill_(number)
