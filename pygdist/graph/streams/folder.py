"""Folders that are complete or absent, even if a writer dies or several write at the same time.

A folder is filled under a temporary name beside its final place, flushed, and renamed, so readers see it finished or
not at all. One writer works at a time, under a lock file that the kernel releases with its process; the others wait and
find the result. On file systems without locks the rename alone decides: the first writer wins, the others drop their
copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pygdist.errors import InputError, RefusedError
from pygdist.graph.streams.arrays import flush
from pygdist.memory.limits import reason_of

log = logging.getLogger(__name__)

_LAST_FILES = ("meta.json", "graph.json")  # a folder that has one is finished
_REPLACED = "-old"  # suffix of a folder that is being replaced
# temporary folders of any writer, and the locks of stores in a cache, whose names are keys
_REMNANT = re.compile(r"^\.(?:(.+)\.tmp-[0-9a-f]{32}(?:-old)?|([0-9a-f]{32})\.lock)$")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def write_once(
    folder: Path,
    name: str,
    existing: Callable[[bool], dict[str, Any] | None],
    write: Callable[[Path], dict[str, Any]],
    *,
    kind: str,
    overwrite: bool,
    level: int = logging.DEBUG,
) -> dict[str, Any]:
    """Write a folder with a JSON file ``name`` unless it exists; return the content of that file.

    ``existing`` is called with ``overwrite`` if the file exists: it returns its content, ``None`` if the folder may be
    replaced, or raises if it is not the wanted one. ``write`` fills an empty folder with all else and returns the
    content. Messages call such a folder ``kind``; that it exists is logged at ``level``.
    """

    def there(overwrite: bool) -> dict[str, Any] | None:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):  # rename fills an empty folder, too
            return None
        if not (folder / name).is_file():
            raise InputError(f"{folder}: exists and is not {kind}; remove it or choose another folder")
        return existing(overwrite)

    try:
        if (content := there(overwrite)) is None:  # without the lock, which a read-only place does not allow
            with exclusive(folder):
                if (content := there(overwrite)) is None:
                    with fresh_folder(folder, replace=overwrite) as temporary:
                        content = write(temporary)
                        (temporary / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                        flush(temporary / name)
                    return there(False) or content  # without locks another writer may have been first
        log.log(level, "%s exists already", folder)
        return content
    except OSError as error:
        raise RefusedError(f"{folder}: could not be written ({reason_of(error)}); nothing was left behind") from error


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Make this process the only writer of a folder, and remove what killed writers left there, of this and others."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _held(folder, wait=True) as is_held:
        if is_held:
            _remove_remnants(folder)
            remnants = [match for path in folder.parent.iterdir() if (match := _REMNANT.match(path.name))]
            for name in {match[1] or match[2] for match in remnants} - {folder.name}:
                with _held(other := folder.with_name(name), wait=False) as is_left:
                    if is_left:
                        _remove_remnants(other)
        yield


@contextlib.contextmanager
def _held(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a folder; false where there are no locks, or another process holds it and this one is not to."""
    path = folder.parent / f".{folder.name}.lock"
    descriptor = _lock(path, folder, wait=wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _remove_remnants(folder: Path) -> None:
    """Remove what killed writers of a folder left; whoever wrote these held the lock that this process holds."""
    for stale in folder.parent.glob(f".{glob.escape(folder.name)}.tmp-*"):
        if stale.name.endswith(_REPLACED) and not folder.exists() and _is_finished(stale):
            log.info("restoring %s, whose replacement was not finished", folder)
            stale.rename(folder)
        else:
            log.info("removing %s, left by a writer that did not finish", stale)
            _discard(stale)


@contextlib.contextmanager
def fresh_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``folder`` when the block ends, and is removed if it raises.

    A folder that another process put there meanwhile stays. With ``replace`` the new folder takes the place of one that
    is already there, which is then removed.
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
    """Remove a folder; if that is interrupted, the rest does not look finished."""
    for name in _LAST_FILES:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _lock(path: Path, folder: Path, *, wait: bool = True) -> int | None:
    """Take the lock of a folder; ``None`` without locks, or if another process has it and this one does not wait."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    os.close(descriptor)
                    return None
                log.info("waiting for another process that is writing %s", folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        # The holder removes the file before it releases the lock; a lock on a removed file is void, so try again.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)
