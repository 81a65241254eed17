"""What the machine refuses, in one line: full disks, read-only folders, too large or too many files, no memory.

Python, torch and other libraries tell of these in errors of many types, often without the name of the file.
"""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import tempfile
from pathlib import Path
from types import TracebackType

import psutil

from pygdist.errors import InputError, LostRankError, RefusedError
from pygdist.memory.scratch import is_scratch

_ELSEWHERE = "choose another folder"
# the system says what is wrong, and this what to do
_ADVICE = {
    errno.ENOSPC: f"make room there, or {_ELSEWHERE}",
    errno.EDQUOT: f"make room there, or {_ELSEWHERE}",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or use another disk",
    errno.EROFS: _ELSEWHERE,
    errno.EIO: f"check the disk, or {_ELSEWHERE}",
    errno.EMFILE: "raise the limit (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.ENOMEM: "use more or smaller parts, a smaller model, or a machine with more memory",
    errno.EAGAIN: "raise the limit on threads and processes (ulimit -u), or close other programs",
    errno.EACCES: f"change the permissions, or {_ELSEWHERE}",
    errno.EPERM: f"change the permissions, or {_ELSEWHERE}",
    errno.ENOTDIR: "choose another path",
    errno.EISDIR: "choose another path",
    errno.ENAMETOOLONG: "choose another path",
    errno.ELOOP: "choose another path",
}
_FILES, _FILES_PER_RANK, _MOST_FILES = 64, 8, 1 << 14
_FOR_THREADS = 3 << 28  # bytes of addresses: stacks, and what the allocator sets aside for each thread
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
_LITTLE = 1 << 20  # bytes
_WRITTEN_TO = "PYGDIST_WRITES_TO"  # environment variable: folders that a command writes to, which its ranks inherit
_OF_PATHS = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_WITHOUT_PATH = {errno.ENOMEM, errno.EAGAIN, errno.ENFILE}
# libraries word it otherwise, or pass the system's words on
_WORDS = {
    "can't allocate memory": errno.ENOMEM,
    "out of memory": errno.ENOMEM,
    "bad_alloc": errno.ENOMEM,
    "can't start new thread": errno.EAGAIN,
    **{os.strerror(code): code for code in _ADVICE if code not in _OF_PATHS and code != errno.EAGAIN},
}
_FILE = re.compile(r"(?:\[Errno \d+\] [^:\n]*: |file ?)['<]([^'>\n]+)['>]")
_STREAM = re.compile(r"PytorchStreamWriter failed[^\n]*|unexpected pos \d+ vs \d+")
_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (is killed by signal: \w[\w ]*|exited unexpectedly)"
)
_NO_SCRATCH = "No usable temporary directory"


def refusal_of(error: BaseException) -> RefusedError | None:
    """Return the error that tells in one line what the machine has refused; ``None`` if ``error`` is of another kind.

    The line names the file, if any is known, the reason, and what to do.
    """
    if isinstance(error, (InputError, LostRankError)):  # the latter tells what another rank was refused
        return error if isinstance(error, RefusedError) else None
    text = str(error)
    if _NO_SCRATCH in text:
        return RefusedError(f"no folder for temporary files can be written to; set TMPDIR ({text.partition('] ')[2]})")
    if lost := _WORKER.search(f"{error.__cause__}; {text}"):  # the cause tells the signal
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
        where = f"process {os.getpid()}" if rank is None else f"rank {rank}"
        return RefusedError(
            f"{where}: worker {lost[1]} of its DataLoader {lost[2]}; most likely there was no memory for it: use fewer "
            "workers (num_workers) or smaller mini-batches"
        )
    code = _code_of(error, text)
    file = None if code in _WITHOUT_PATH else _file_of(error, text)
    if code is None and (stream := _STREAM.search(text)):  # torch keeps the reason to itself
        return RefusedError(f"{file or 'a file'}: could not be written ({stream[0]}); is its disk full?")
    if code is None or (code in _OF_PATHS and file is None):
        return None
    reason = _reason(code)
    asked = re.search(r"(?:tried to allocate|Unable to allocate) [\d.,]+ \w+", text, re.IGNORECASE)
    more = asked[0] if asked else text if isinstance(error, MemoryError) else ""
    if file is None and code in _OF_DISKS and _WRITTEN_TO in os.environ:  # otherwise it may be standard output
        return RefusedError(f"{os.strerror(code)}: one of {_where()}; {_ADVICE[code]}")
    return RefusedError(f"{file}: {reason}" if file else f"{reason} ({more})" if more else reason)


def writes_to(*folders: str | Path) -> None:
    """Note folders that this process and its ranks write to, which a refusal names if it does not say which file."""
    new = (str(Path(folder).absolute()) for folder in folders if "://" not in str(folder))
    os.environ[_WRITTEN_TO] = os.pathsep.join(dict.fromkeys([*_written_to(), *new]))


def _written_to() -> list[str]:
    return list(filter(None, os.environ.get(_WRITTEN_TO, "").split(os.pathsep)))


def _where() -> str:
    """Name the folders that are written to, with their free bytes: those that are full, or else all."""
    temporary = Path(tempfile.gettempdir())
    temporary = temporary.parent if is_scratch(str(temporary)) else temporary
    free = {folder: _free_in(folder) for folder in dict.fromkeys([*map(Path, _written_to()), temporary])}
    full = {folder: left for folder, left in free.items() if left < _LITTLE}
    return ", ".join(f"{folder} ({left} bytes free)" for folder, left in (full or free).items())


def _free_in(folder: Path) -> int:
    """Return the bytes that can be written below a folder, which need not be there yet; 0 if no name can be added."""
    state = os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))
    return 0 if state.f_files and not state.f_favail else state.f_bavail * state.f_frsize


def told(error: Exception) -> str | None:
    """Return what the ranks tell each other of an error that each may have alone; ``None`` if it is a fault of ours."""
    return str(error) if isinstance(error, InputError) else None if (one := refusal_of(error)) is None else str(one)


def require_for_ranks(num_ranks: int) -> None:
    """Raise the limit on open files, within what the system allows; refuse limits with which ranks cannot meet.

    If a process has no descriptor left for a connection, it hangs for minutes or dies silently. If gloo cannot start a
    thread, the process aborts.

    Raises:
        RefusedError: If this process may open too few files, or has too little of its address space left.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MOST_FILES and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    needed = _FILES + _FILES_PER_RANK * num_ranks
    if soft < needed:
        raise RefusedError(f"a process may open {soft} files, but ranks need about {needed}; {_ADVICE[errno.EMFILE]}")
    most, used = resource.getrlimit(resource.RLIMIT_AS)[0], psutil.Process().memory_info().vms
    if most != resource.RLIM_INFINITY and most - used < _FOR_THREADS:
        raise RefusedError(
            f"a process may have {most / 2**30:.2f} GiB of addresses and has {used / 2**30:.2f}, but the threads of a "
            f"rank need about {_FOR_THREADS / 2**30:.2f} more; raise the limit (ulimit -v)"
        )


def reason_of(error: Exception) -> str:
    """Return the reason for which something failed, and what to do, for a message that names the file itself."""
    code = _code_of(error, str(error))
    return str(error) if code is None else _reason(code)


def _reason(code: int) -> str:
    return f"{os.strerror(code)}; {_ADVICE[code]}"


def _code_of(error: BaseException, text: str) -> int | None:
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in _ADVICE and error.errno != errno.EAGAIN else None
    if not isinstance(error, (RuntimeError, OSError)):
        return None
    if text == os.strerror(errno.EAGAIN):  # no more words: a thread could not be started
        return errno.EAGAIN
    return next((code for words, code in _WORDS.items() if words in text), None)


def _file_of(error: BaseException, text: str) -> str | None:
    """Return the file that an error is about: a write to an open file does not say."""
    if isinstance(error, OSError) and error.filename is not None:
        return os.fsdecode(error.filename) if not isinstance(error.filename, int) else None
    if named := _FILE.findall(text):
        return str(named[-1])
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        for value in frame.tb_frame.f_locals.values():
            file = value.file if type(value).__name__ == "_TemporaryFileWrapper" else value
            writes = isinstance(file, io.IOBase) and set(str(getattr(file, "mode", ""))) & set("wax+")
            if writes and isinstance(name := getattr(value, "name", None), str):
                return name
    return None
