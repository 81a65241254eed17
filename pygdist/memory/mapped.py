"""Files that are mapped to be written. Their room is taken first: a write to a mapped page kills on a full disk."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

_NOT_OFFERED = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_BLOCK = bytes(1 << 20)


def take_room(descriptor: int, size: int, path: str | Path) -> None:
    """Let a new file have ``size`` bytes on disk, all of them zeros behind those that are there.

    Raises:
        OSError: If there is not as much room, or no file may be so large; it names ``path``.
    """
    try:
        _allocate(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error


def _allocate(descriptor: int, size: int) -> None:
    there = os.fstat(descriptor).st_size
    if size <= there:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
        return
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    for start in range(there, size, len(_BLOCK)):
        block = memoryview(_BLOCK)[: size - start]
        while block:
            written = os.pwrite(descriptor, block, start)
            block, start = block[written:], start + written


def new_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> np.memmap[Any, np.dtype[Any]]:
    """Map a new ``.npy`` file of zeros to write; a file that is there is overwritten.

    Raises:
        OSError: As :func:`take_room`.
    """
    dtype = np.dtype(dtype)
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        take_room(file.fileno(), file.tell() + math.prod(shape) * dtype.itemsize, path)
    return np.lib.format.open_memmap(path, "r+")


def new_tensor(path: str | Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Map a file to write as a tensor of zeros, without a header; there must be at least one number.

    Raises:
        OSError: As :func:`take_room`.
    """
    size = math.prod(shape)
    with open(path, "ab") as file:
        take_room(file.fileno(), size * dtype.itemsize, path)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
