"""Facts about the machine and the code that figures were measured with.

Imports nothing heavy, because a process's imports are part of its peak memory.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["SOME_FAILED", "cache_bytes", "cores", "facts", "provenance", "source_key"]

#: Exit code of a script whose table is complete, with a note in the rows that failed.
SOME_FAILED = 3


def facts(threads: int) -> dict[str, str]:
    """Return the columns that every row has: processor, caches, threads, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": str(cores()),
        "l2": _size(cache_bytes(2)),
        "l3": _size(cache_bytes(3)),
        "threads": str(threads),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "lightning": _version("lightning"),
        "pyg": _version("torch_geometric"),
        "torch_sparse": _version("torch_sparse"),
    }


def provenance(threads: int) -> dict[str, str]:
    """Return the commit (with a ``+`` if there are uncommitted changes), the date and :func:`facts`."""
    return {"commit": _commit(), "date": datetime.date.today().isoformat(), **facts(threads)}


@functools.cache
def _commit() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit}{'+' if _git('status', '--porcelain', '--untracked-files=no') else ''}" if commit else "unknown"


def _git(*words: str) -> str:
    """Return git's output for this checkout; empty without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, errors="replace"
        )
    except OSError:
        return ""
    return done.stdout.strip()


@functools.cache
def source_key() -> str:
    """Return a key of the code as it is now: of the commit and of uncommitted changes."""
    changes = _git("diff", "HEAD")
    return hashlib.sha256(f"{_git('rev-parse', 'HEAD')}{changes}".encode()).hexdigest()[:12]


def cache_bytes(level: int) -> int:
    """Return the bytes of one cache of this level as Linux reports them; 0 if it does not."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if int((index / "level").read_text()) == level and (index / "type").read_text().strip() != "Instruction":
                return int((index / "size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return 0


def _cpu_model() -> str:
    """Return the processor's name, family and vector instructions; virtual machines may hide the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2") if name in flags), "no avx2")
    model = f"{fields.get('model name', platform.machine())} family {fields.get('cpu family', '?')} {widest}"
    return " ".join(model.split())


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size(count: int) -> str:
    return f"{count // 1024} KiB" if count else "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
