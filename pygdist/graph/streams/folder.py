"""Folders of arrays that are whole or absent, whoever dies or writes at the same time.

A folder is filled under a temporary name beside its place, flushed, and renamed; readers see it finished or not at
all. One writer works at a time (a lock file that the kernel releases with its process), the others wait and find the
result. File systems without locks are served by the rename alone: the first writer wins, the others drop their copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import io
import logging
import mmap
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["ArrayWriter", "checksum", "exclusive", "flush", "forget_pages", "fresh_folder", "write_rows"]

log = logging.getLogger(__name__)

_LAST_FILES = ("meta.json", "graph.json")  # a folder that has one is finished
_BLOCK_BYTES = 1 << 24
_REPLACED = "-old"  # ends the name of a folder on its way out
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Be the only process that writes this folder, and clear away what killed writers left beside it.

    Args:
        folder: The place of the finished folder; its parent is made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.parent / f".{folder.name}.lock"
    descriptor = _lock(path, folder)
    try:
        if descriptor is not None:
            # their writers held the lock, and are gone
            for stale in folder.parent.glob(f".{glob.escape(folder.name)}.tmp-*"):
                if stale.name.endswith(_REPLACED) and not folder.exists() and _is_finished(stale):
                    log.info("putting %s back, whose replacement did not come", folder)
                    stale.rename(folder)
                else:
                    log.info("removing %s, left by a writer that did not finish", stale)
                    _discard(stale)
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


@contextlib.contextmanager
def fresh_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes ``folder`` when the block ends, and vanishes when it raises.

    Args:
        folder: Where the finished folder goes. If somebody else put one there meanwhile, theirs stays.
        replace: Move a folder that is there out of the way, and remove it once the new one is in place.

    Yields:
        The temporary folder, empty.
    """
    temporary = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex}"
    old = temporary.with_name(temporary.name + _REPLACED)
    temporary.mkdir()
    try:
        yield temporary
        for inner in [*(path for path in temporary.rglob("*") if path.is_dir()), temporary]:
            flush(inner)
        if replace and folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            log.info("%s was written by another process meanwhile", folder)
        flush(folder.parent)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        _discard(temporary)
        _discard(old)


def _is_finished(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _LAST_FILES)


def _discard(folder: Path) -> None:
    """Remove a folder; what is left if that is interrupted does not look finished."""
    for name in _LAST_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_rows(
    path: Path, source: NDArray[Any], rows: NDArray[Any] | None = None, *, dtype: np.dtype[Any] | None = None
) -> dict[str, Any]:
    """Write ``source[rows]`` as ``.npy``, a block of rows at a time, and flush it to disk.

    Args:
        path: The file.
        source: The array to take rows from, in memory or memory-mapped.
        rows: Which rows; all if ``None``.
        dtype: Type to write; that of ``source`` by default.

    Returns:
        What a reader can hold the file to: ``bytes``, ``crc32``, ``dtype``, ``shape``.
    """
    count = len(source) if rows is None else len(rows)
    shape = (count, *source.shape[1:])
    step = max(1, _BLOCK_BYTES // max(1, source[:1].nbytes))
    dtype = source.dtype if dtype is None else dtype
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, step):
            stop = start + step
            block = source[start:stop] if rows is None else source[rows[start:stop]]
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
            forget_pages(source)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "crc32": checksum(path), "dtype": str(dtype), "shape": list(shape)}


class ArrayWriter:
    """Writes an array whose length is not known before: one number after the other, pairs, or rows.

    Args:
        path: The file.
        dtype: Type of the numbers.
        pairs: Each block is ``(2, k)``, and the array ``(2, n)`` with the two of a pair side by side.
        width: Each block is ``(k, width)``, and the array ``(n, width)``.

    Attributes:
        count: Numbers, pairs or rows so far.
    """

    def __init__(self, path: Path, dtype: DTypeLike, *, pairs: bool = False, width: int | None = None) -> None:
        self.count = 0
        self._path, self._dtype, self._pairs, self._width = path, np.dtype(dtype), pairs, width
        self._file = path.open("wb")
        self._file.write(bytes(len(self._header())))  # no header yet: a file that is left half written has none

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._file.write(self._header())

    def append(self, block: NDArray[Any]) -> None:
        """Add a block at the end."""
        rows = block.T if self._pairs else block
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self.count += len(rows)

    def described(self) -> dict[str, Any]:
        """After the ``with`` block: flushes, and says what a reader can hold the file to, as :func:`write_rows`."""
        flush(self._path)
        return {
            "bytes": self._path.stat().st_size,
            "crc32": checksum(self._path),
            "dtype": str(self._dtype),
            "shape": self._shape(),
        }

    def _shape(self) -> list[int]:
        if self._pairs:
            return [2, self.count]
        return [self.count] if self._width is None else [self.count, self._width]

    def _header(self) -> bytes:
        # numpy pads it such that its length does not depend on the count
        text = io.BytesIO()
        header = {"descr": self._dtype.str, "fortran_order": self._pairs, "shape": tuple(self._shape())}
        np.lib.format.write_array_header_1_0(text, header)
        return text.getvalue()


def forget_pages(array: NDArray[Any]) -> None:
    """Give back the memory of a memory-mapped file that was looked at; it is read again where it is needed again.

    Not of a copy-on-write map: what was written to it is nowhere else.
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


def _lock(path: Path, folder: Path) -> int | None:
    """Take the lock of a folder, waiting for it; ``None`` where the file system has no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("waiting for another process that is writing %s", folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        # The holder removes the file before it lets go: a lock on a removed file guards nothing, so ask again.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
