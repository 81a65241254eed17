"""The memory of a machine, and that of freed tensors: kept for the next epoch's, which are the same."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["keep_freed_memory", "memory_bytes"]

_CGROUPS = Path("/sys/fs/cgroup")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of malloc.h
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_freed_memory() -> bool:
    """Give back what is free, and from now on let this process keep what its tensors free.

    Every epoch of full-graph training makes and frees the same tensors. By default glibc maps each of more than 32 MiB
    anew, and its pages are cleared one by one as they are written, which takes longer than most operations on them.
    For that a process holds more at its peak, by the gaps between tensors (up to a quarter was seen), until it ends.
    So it is for when plans are made: what they take besides may be more than an epoch does.

    Returns:
        Whether the C library has such a setting: glibc does.
    """
    libc = ctypes.CDLL(None)
    set_option = getattr(libc, "mallopt", None)
    if set_option is None:
        return False
    libc.malloc_trim(0)
    # older versions know no such threshold above 32 MiB, but to map nothing at all
    mapped = set_option(_MMAP_THRESHOLD, _LARGEST) or set_option(_MMAP_MAX, 0)
    return bool(set_option(_TRIM_THRESHOLD, _NEVER) and mapped)


def memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """The machine's memory, or what the container or batch job that this process is in may take of it, if that is less.

    Args:
        cgroups: Where Linux tells the limits of a process's control group; others have none.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for root in (cgroups, cgroups / "memory"):  # of version 2, and of version 1
        for place in (root / inside for inside in _control_groups()):
            limits += [limit for folder in (place, *place.parents) if (limit := _limit_of(folder)) is not None]
    return min(limits)


def _control_groups() -> list[str]:
    """Of this process, below the root of their tree; the root itself as well, which is the group in a container."""
    told = Path("/proc/self/cgroup")
    lines = told.read_text().splitlines() if told.is_file() else []
    return ["", *(line.split(":", 2)[2].lstrip("/") for line in lines if line.count(":") >= 2)]


def _limit_of(folder: Path) -> int | None:
    for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            return int(text)
    return None  # none there, or "max"
