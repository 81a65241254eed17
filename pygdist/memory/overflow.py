"""Spill storage for tensors that do not fit on the device: memory of the host for a GPU, files for the host itself."""

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

from pygdist.errors import InputError, RefusedError
from pygdist.memory.limits import reason_of
from pygdist.memory.mapped import new_tensor
from pygdist.memory.ring import download, uploaded

log = logging.getLogger(__name__)

_TRAVEL_SHARE = 8  # a rank sends 1 / 8 of the budget at a time; as much arrives, and two such pieces may travel


@dataclass(frozen=True)
class Overflow:
    """Spill storage: holds tensors of which the device gets a few rows at a time.

    Args:
        device: The device that computes. Tensors of a GPU are stored in memory of the host, tensors of the host in
            files, of which the system keeps as much in memory as there is room for. A file has no name and goes when
            its tensor does.
        budget: Bytes that may be on the device at a time.
        folder: Folder of the files; the system's folder for temporary files by default.
        small: Tensors of fewer bytes are kept in memory instead of a file.
    """

    device: torch.device
    budget: int
    folder: Path | None = None
    small: int = 1 << 16

    def of_the_backward_pass(self, held: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Store the tensors that autograd saves inside the block here instead of on the device.

        Args:
            held: Tensors that stay on the device anyway. So do parameters, integers (the ids of edges) and vectors (a
                weight for each edge).
        """
        stay = {tensor.untyped_storage().data_ptr() for tensor in held}

        def pack(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
            base = tensor if tensor._base is None else tensor._base
            parameter = base.is_leaf and base.requires_grad
            edges = tensor.dtype in (torch.int32, torch.int64) or tensor.dim() == 1
            small = tensor.numel() * tensor.element_size() < self.small
            if parameter or edges or small or tensor.untyped_storage().data_ptr() in stay:
                return tensor.detach(), None  # a tensor that leads back to its own node would never be freed
            rows = self.empty(tuple(tensor.shape), tensor.dtype)
            download(tensor, rows)
            return tensor.new_empty(0), rows

        def unpack(packed: tuple[Tensor, Tensor | None]) -> Tensor:
            tensor, rows = packed
            return tensor if rows is None else uploaded(rows, tensor.device)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def rows_at_a_time(self, row_bytes: int, num_tensors: int = 1) -> int:
        """Return the number of rows of each rank that may travel at once.

        Args:
            row_bytes: Bytes that a rank sends per row to all others together, or receives per row of each rank.
            num_tensors: Tensors that travel side by side.
        """
        return max(1, self.budget // (_TRAVEL_SHARE * num_tensors * max(row_bytes, 1)))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialised storage for a tensor; a small one is in plain memory of the host.

        Raises:
            InputError: If the file system has no room for the file.
        """
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape)
        if size * dtype.itemsize < max(self.small, 1):
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.NamedTemporaryFile(prefix=".pygdist-", dir=self.folder) as file:
                return new_tensor(file.name, dtype, shape)
        except (OSError, RuntimeError) as error:  # torch raises the latter if it cannot map a file
            where, size_gib = self.folder or tempfile.gettempdir(), size * dtype.itemsize / 2**30
            raise RefusedError(
                f"{where}: cannot store {size_gib:.2g} GiB of tensors that do not fit in memory: {reason_of(error)}"
            ) from error


def in_file(tensor: Tensor, path: Path) -> Tensor:
    """Return a copy of a tensor that is mapped from a new file: what nobody reads takes no memory."""
    tensor = tensor.cpu().contiguous()
    if not tensor.numel():
        return tensor
    path.unlink(missing_ok=True)  # somebody may still read what was there
    return new_tensor(path, tensor.dtype, tuple(tensor.shape)).copy_(tensor)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def writable(folder: Path | None) -> Path | None:
    """Return ``folder`` if files may be made there; ``None`` for the system's folder of temporary files."""
    if folder is not None and not os.access(folder, os.W_OK):
        log.warning(
            "%s cannot be written to: tensors that do not fit in memory go to %s", folder, tempfile.gettempdir()
        )
        return None
    return folder


def beyond_memory(label: str) -> InputError:
    """Make the error for a hop that needs the edges of all ranks in memory at once."""
    return InputError(
        f"{label}: its edges are neither the graph's adjacency, nor that with self-loops, nor one relation of it, so "
        "the edges of all ranks would have to be in memory at once; that is refused with memory_gib, with another "
        "device, and on a GPU with too little free memory. Pass the adjacency, or use a backend with halo_gib"
    )
