"""The number of the epoch, in memory that a loader's workers share, and the order of an epoch's batches."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


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


class ShuffledOrder:
    """The numbers below ``count``, shuffled anew in each epoch if ``shuffle``.

    The order depends on the seed and the epoch alone.
    """

    def __init__(self, count: int, seed: int, *, shuffle: bool) -> None:
        self._seed, self._shuffle = seed, shuffle
        self._order, self._made_for = torch.arange(count), -1

    def __len__(self) -> int:
        return self._order.numel()

    def of(self, epoch: int) -> Tensor:
        """Return the order of an epoch, ``(count,)`` int64."""
        if self._shuffle and self._made_for != epoch:
            self._made_for = epoch
            self._order = torch.from_numpy(np.random.default_rng([self._seed, epoch]).permutation(len(self)))
        return self._order
