"""Memory for what there is no room for on the device: the host's if that is a GPU, files if it is the host itself."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pygdist.comm.slices import Elsewhere
from pygdist.errors import InputError

__all__ = ["Overflow", "beyond_memory", "writable"]

log = logging.getLogger(__name__)

_TRAVEL_SHARE = 8  # of the budget, for what a rank sends at a time; as much arrives, and two such pieces may travel


@dataclass(frozen=True)
class Overflow:
    """Where tensors wait of which a part at a time is computed with.

    Args:
        device: Where that is. If it is a GPU, tensors wait in page-locked memory of the host; otherwise in files, of
            which the system keeps as much in memory as there is room for. A file has no name and is gone with its
            tensor.
        budget: Bytes that may be on the device at a time.
        folder: Of the files; the system's folder for temporary files by default.
        small: Tensors of fewer bytes are not worth a file.
    """

    device: torch.device
    budget: int
    folder: Path | None = None
    small: int = 1 << 16

    def of_the_backward_pass(self, held: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """What runs inside keeps what its backward pass needs here, not on the device.

        Args:
            held: Tensors that stay on the device anyway. Parameters do, and what the graph has of its edges: ids, and
                a weight for each.
        """
        stay = {tensor.untyped_storage().data_ptr() for tensor in held}

        def pack(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
            base = tensor if tensor._base is None else tensor._base
            parameter = base.is_leaf and base.requires_grad
            edges = tensor.dtype in (torch.int32, torch.int64) or tensor.dim() == 1
            small = tensor.numel() * tensor.element_size() < self.small
            if parameter or edges or small or tensor.untyped_storage().data_ptr() in stay:
                return tensor.detach(), None  # what leads back to its own node would never be freed
            rows = self.empty(tuple(tensor.shape), tensor.dtype)
            rows.copy_(tensor, non_blocking=True)
            return tensor.new_empty(0), rows

        def unpack(kept: tuple[Tensor, Tensor | None]) -> Tensor:
            tensor, rows = kept
            return tensor if rows is None else rows.to(tensor.device, non_blocking=True)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def rows_at_a_time(self, row_bytes: int, num_tensors: int = 1) -> int:
        """How many rows of each rank travel at once, of each of so many tensors that travel side by side.

        Args:
            row_bytes: Of all that a rank sends of a row, or gets of one row of each rank.
            num_tensors: How many.
        """
        return max(1, self.budget // (_TRAVEL_SHARE * num_tensors * max(row_bytes, 1)))

    @property
    def elsewhere(self) -> Elsewhere:
        """Here, for rows that travel."""
        return Elsewhere(self.empty, self.budget // _TRAVEL_SHARE)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the host, whatever the device; of files if that is the host, but for small tensors.

        Raises:
            InputError: If there is no space for the file.
        """
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        size = math.prod(shape)
        if size * dtype.itemsize < max(self.small, 1):
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.NamedTemporaryFile(prefix=".pygdist-", dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)  # or a write kills the process later
                return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)
        except (OSError, RuntimeError) as error:  # torch says with the latter that a file cannot be mapped
            where, size_gib = self.folder or tempfile.gettempdir(), size * dtype.itemsize / 2**30
            raise InputError(
                f"{where}: {size_gib:.2g} GiB that there is no memory for cannot be kept there: "
                f"{getattr(error, 'strerror', None) or error}",
                of_one_rank=True,
            ) from error


@torch.compiler.disable  # type: ignore[untyped-decorator]
def writable(folder: Path | None) -> Path | None:
    """The folder of a partitioned graph if files may be made there; ``None`` for the system's temporary files."""
    if folder is not None and not os.access(folder, os.W_OK):
        log.warning("%s cannot be written to: what there is no memory for goes to %s", folder, tempfile.gettempdir())
        return None
    return folder


def beyond_memory(label: str) -> InputError:
    """What to raise for a hop that cannot be run a part at a time."""
    return InputError(
        f"{label}: gets a list of edges that is not the graph's adjacency, nor one with self-loops or of one relation, "
        "so the edges of all ranks would be held at once, which is not done with memory_gib or another device, or if a "
        "GPU has too little free memory; 'comm' with halo_gib runs it"
    )
