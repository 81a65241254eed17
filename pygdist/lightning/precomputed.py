"""Files with the facts about each part that mini-batches need, for ranks with several parts; computed once.

Clusters take 4 bytes per row, GraphSAINT's norms 4 per row and edge, as much as the topology itself, and they take long
to compute. A rank that goes through several parts in every epoch can neither hold them in memory nor compute them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pygdist.memory.scratch import ScratchFolder


class Precomputed:
    """Tensors of each part by name, in a temporary folder inside ``folder``, until :meth:`close`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = ScratchFolder(folder)
        self._names: dict[int, list[str]] = {}

    def of(self, part: int, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the tensors of a part, memory-mapped; ``compute`` makes them the first time, on the CPU."""
        place = self._folder.path
        if part not in self._names:
            tensors = compute()
            for name, value in tensors.items():
                np.save(place / f"{name}-{part}.npy", value.numpy())
            self._names[part] = list(tensors)
        # copy-on-write: changes that a user makes to a field stay in this process
        return {
            name: torch.from_numpy(np.load(place / f"{name}-{part}.npy", mmap_mode="c")) for name in self._names[part]
        }

    def close(self) -> None:
        """Remove the files."""
        self._folder.close()
