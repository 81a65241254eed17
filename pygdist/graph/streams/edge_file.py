"""Edges in a ``.npy`` file, read some at a time.

The file is read, not mapped, since pages of a mapped file count as memory of the process until others need it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.arrays import ArrayWriter
from pygdist.memory.limits import refusal_of


class EdgeFile:
    """An integer array of shape ``(2, E)`` or ``(E, 2)`` on disk, of any integer type, in C or Fortran order.

    An array of shape ``(2, 2)`` is taken as ``(2, E)``, PyG's layout.

    Attributes:
        path: The file.
        num_edges: Number of edges.

    Raises:
        InputError: If the file is not an integer array of these shapes, or is shorter than its header says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        shape, fortran, self._dtype, self._offset = _header(self.path)
        if len(shape) != 2 or 2 not in shape:
            raise InputError(f"{path}: an array of shape {shape}, expected edges of shape (2, E) or (E, 2)")
        if self._dtype.kind not in "iu":
            raise InputError(f"{path}: an array of {self._dtype}, expected edges as integers")
        self.num_edges = shape[1] if shape[0] == 2 else shape[0]
        self._in_pairs = (shape[0] == 2) == fortran  # the two ends of an edge lie side by side
        expected = self._offset + 2 * self.num_edges * self._dtype.itemsize
        if (size := self.path.stat().st_size) < expected:
            raise InputError(f"{path}: is truncated, it has {size} bytes instead of {expected}")

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return edges ``start`` to ``stop - 1``; int64 of shape ``(2, stop - start)``, C-contiguous."""
        count = stop - start
        if self._in_pairs:
            ends = self._numbers(2 * start, 2 * count).reshape(count, 2).T
            return np.array(ends, dtype=np.int64, order="C")
        chunk = np.empty((2, count), dtype=np.int64)
        for row in range(2):
            chunk[row] = self._numbers(row * self.num_edges + start, count)
        return chunk

    def _numbers(self, first: int, count: int) -> NDArray[Any]:
        try:
            offset = self._offset + first * self._dtype.itemsize
            numbers = np.fromfile(self.path, dtype=self._dtype, count=count, offset=offset)
        except OSError as error:
            raise InputError(f"{self.path}: could not be read ({error})") from error
        if len(numbers) != count:
            raise InputError(f"{self.path}: was truncated while it was read")
        if self._dtype.kind == "u" and self._dtype.itemsize == 8 and count and int(numbers.max()) >= 1 << 63:
            raise InputError(f"{self.path}: holds id {numbers.max()}, expected ids below 2^63")
        return numbers


class EdgeWriter(ArrayWriter):
    """Writes chunks of edges to a file of shape ``(2, E)``; E need not be known in advance.

    Example:
        >>> with EdgeWriter("edges.npy", np.int32) as writer:
        ...     for chunk in stream.chunks():
        ...         writer.append(chunk)
    """

    def __init__(self, path: str | Path, dtype: DTypeLike) -> None:
        super().__init__(Path(path), dtype, pairs=True)


def _header(path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order and type of an array on disk, and the offset of its values."""
    readers: dict[tuple[int, int], Callable[..., Any]] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in readers:
                raise ValueError(f"format version {version}")
            shape, fortran, dtype = readers[version](file)
            return shape, fortran, dtype, file.tell()
    except (ValueError, OSError) as error:
        unreadable = InputError(f"{path}: not a readable .npy array ({error}); write it with numpy.save")
        raise refusal_of(error) or unreadable from error
