"""What mini-batches need to know of a part beforehand, where a rank has several: found once, kept in files.

Clusters take 4 bytes for each row, GraphSAINT's norms 4 for each row and edge, as much as the topology itself, and take
long to find. A rank that goes from part to part in every epoch may hold neither in memory, nor find them anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["Precomputed"]


class Precomputed:
    """Tensors of each part by name, until :meth:`close`.

    Args:
        folder: Where a folder for the files is made, which goes with this object; by default that for temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pygdist-batches-", dir=folder)
        self._names: dict[int, list[str]] = {}

    def of(self, part: int, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What is known of a part, memory-mapped: nothing is held here.

        Args:
            part: Which part.
            compute: Finds it, the first time; tensors on the CPU.
        """
        place = Path(self._folder.name)
        if part not in self._names:
            found = compute()
            for name, value in found.items():
                np.save(place / f"{name}-{part}.npy", value.numpy())
            self._names[part] = list(found)
        # copy-on-write: what a user does to a field stays in this process
        return {
            name: torch.from_numpy(np.load(place / f"{name}-{part}.npy", mmap_mode="c")) for name in self._names[part]
        }

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
