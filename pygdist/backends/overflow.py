"""Memory for what there is no room for on the device: the host's if that is a GPU, files if it is the host itself."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pygdist.errors import InputError

__all__ = ["Overflow", "beyond_memory"]


@dataclass(frozen=True)
class Overflow:
    """Where tensors wait of which a part at a time is computed with.

    Args:
        device: Where that is. If it is a GPU, tensors wait in page-locked memory of the host; otherwise in files, of
            which the system keeps as much in memory as there is room for. A file has no name and is gone with its
            tensor.
        budget: Bytes that may be on the device at a time.
        folder: Of the files; the system's folder for temporary files by default.
    """

    device: torch.device
    budget: int
    folder: Path | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host, whatever the device.

        Raises:
            InputError: If there is no space for the file.
        """
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        size = math.prod(shape)
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.NamedTemporaryFile(prefix=".pygdist-", dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)  # or a write kills the process later
                return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
        except OSError as error:
            where, size_gib = self.folder or tempfile.gettempdir(), size * dtype.itemsize / 2**30
            raise InputError(
                f"{where}: {size_gib:.2g} GiB that memory_gib leaves no memory for cannot be kept there: "
                f"{error.strerror or error}"
            ) from error


def beyond_memory(label: str) -> InputError:
    """What to raise for a hop that cannot be run a part at a time."""
    return InputError(
        f"{label}: is no sum or mean by weights without gradient, so it needs the edges and slices of all nodes at "
        "once, which is not done with memory_gib or another device, or if a GPU has too little free memory; "
        "'comm' with halo_gib runs it"
    )
