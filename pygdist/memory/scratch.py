"""Temporary folders and half-written files of one process; what a killed process has left is removed by the next one.

Each is locked while its process lives, and the kernel releases the lock with the process, however that ends. Where a
file system has no locks, nothing of other processes is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

from pygdist.signals import before_exit

_PREFIX, _DIGITS = "pygdist-", 12
_LAST = -200  # multiprocessing removes its own temporary folder, which may be in this one, at -100
_folders: weakref.WeakSet[ScratchFolder] = weakref.WeakSet()
_OURS = re.compile(rf"^{_PREFIX}[0-9a-f]{{{_DIGITS}}}$")


class ScratchFolder:
    """A temporary folder, until :meth:`close`, or until the object or its process goes.

    Args:
        place: The folder in which it is made, the system's folder for temporary files by default. What killed processes
            have left there is removed.

    Attributes:
        path: The folder.

    Raises:
        OSError: If no folder can be made there.
    """

    def __init__(self, place: Path | None = None) -> None:
        place = Path(tempfile.gettempdir()) if place is None else place
        for stale in place.glob(f"{_PREFIX}*"):
            if is_scratch(stale.name):
                remove_if_left(stale)
        descriptor = None
        while descriptor is None:
            self.path = place / f"{_PREFIX}{_unique()}"
            self.path.mkdir(mode=0o700)
            descriptor = _locked(self.path, os.O_RDONLY)
        # the last thing that a process does, and only the one that made it, not a fork of it
        self._end = Finalize(self, _end, args=(self.path, descriptor), exitpriority=_LAST)
        _folders.add(self)

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._end()


def is_scratch(place: str) -> bool:
    """Tell if a folder is, by its name, a :class:`ScratchFolder` of any process."""
    return _OURS.match(Path(place).name) is not None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write, which takes the place of ``path`` when the block ends: nobody ever reads half of it.

    The file is beside ``path``, and is empty. It is on disk before it gets its name, and is removed if the block
    raises. Files for the same ``path`` that killed processes have left are removed first.
    """
    for stale in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * _DIGITS}.partial"):
        remove_if_left(stale)
    descriptor = None
    temporary = path.with_name(f".{path.name}.{_unique()}.partial")
    try:
        while descriptor is None:
            descriptor = _locked(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        yield temporary
        os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


def remove_if_left(path: Path) -> bool:
    """Remove a file or folder unless its process lives; true if it was removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # of another user, or gone
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:  # its process lives, there are no locks, or the place is read-only
        return False
    finally:
        os.close(descriptor)
    return True


def _locked(path: Path, flags: int) -> int | None:
    """Open and lock what this process has just made; ``None`` if another one has just removed it as a remnant."""
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileNotFoundError:
        if flags & os.O_CREAT:  # there is no folder for it
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except FileNotFoundError:
        os.close(descriptor)
        return None
    except OSError:  # there are no locks
        return descriptor
    os.close(descriptor)
    return None


def _end(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _close_all() -> None:
    for folder in list(_folders):
        folder.close()


before_exit(_close_all)


def _unique() -> str:
    return uuid.uuid4().hex[:_DIGITS]
