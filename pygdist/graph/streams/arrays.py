"""``.npy`` files that are written in blocks, and flushed and described when they are complete."""

from __future__ import annotations

import io
import mmap
import os
import zlib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

_BLOCK_BYTES = 1 << 24


def write_rows(
    path: Path, source: NDArray[Any], rows: NDArray[Any] | None = None, *, dtype: np.dtype[Any] | None = None
) -> dict[str, Any]:
    """Write ``source[rows]`` (by default all rows) as ``.npy``, a block of rows at a time, and flush it to disk.

    Returns:
        ``bytes``, ``crc32``, ``dtype`` and ``shape``, which a reader can check the file against.
    """
    step = max(1, _BLOCK_BYTES // max(1, source[:1].nbytes))
    with ArrayWriter(path, source.dtype if dtype is None else dtype, row=source.shape[1:]) as out:
        for start in range(0, len(source) if rows is None else len(rows), step):
            block = slice(start, start + step)
            out.append(source[block if rows is None else rows[block]])
            forget_pages(source)
    return out.described()


class ArrayWriter:
    """Writes an array whose length is not known in advance: blocks ``(k, *row)``, or pairs.

    With ``pairs`` each block is ``(2, k)``, and the array ``(2, n)`` with the two of a pair side by side.

    Attributes:
        count: Rows or pairs written so far.
        dtype: Type in which they are written.
    """

    def __init__(self, path: Path, dtype: DTypeLike, *, pairs: bool = False, row: tuple[int, ...] = ()) -> None:
        self.count = 0
        self._path, self.dtype, self._pairs, self._row = path, np.dtype(dtype), pairs, row
        self._file = path.open("wb")
        self._file.write(bytes(len(self._header())))  # no header yet, so that a half-written file is not readable

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file.closed:  # widened() has completed the file
            return
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._file.write(self._header())

    def append(self, block: NDArray[Any]) -> None:
        """Add a block at the end."""
        rows = block.T if self._pairs else block
        self._file.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self.count += len(rows)

    def described(self) -> dict[str, Any]:
        """Flush the file and describe it, as :func:`write_rows` does; call it after the ``with`` block."""
        flush(self._path)
        size, kind = self._path.stat().st_size, str(self.dtype)
        return {"bytes": size, "crc32": checksum(self._path), "dtype": kind, "shape": list(self._shape())}

    def _shape(self) -> tuple[int, ...]:
        return (2, self.count) if self._pairs else (self.count, *self._row)

    def _header(self) -> bytes:
        # numpy pads it such that its length does not depend on the count
        text = io.BytesIO()
        header = {"descr": self.dtype.str, "fortran_order": self._pairs, "shape": self._shape()}
        np.lib.format.write_array_header_1_0(text, header)
        return text.getvalue()


def forget_pages(array: NDArray[Any]) -> None:
    """Release the memory of a memory-mapped file's pages; they are read again when they are needed.

    Copy-on-write maps are left alone, since what was written to them exists nowhere else.
    """
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mapped, "madvise") and getattr(array, "mode", None) != "c":
        mapped.madvise(mmap.MADV_DONTNEED)


def checksum(path: Path) -> str:
    """CRC-32 of a file in hexadecimal: finds flipped bits at memory speed, and is no defence against intent."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
