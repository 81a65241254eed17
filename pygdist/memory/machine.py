"""The memory of the machine, and a setting that keeps the memory of freed tensors for the next epoch."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of malloc.h
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_freed_memory() -> bool:
    """Give free memory back to the system once, and from now on keep the memory of freed tensors in this process.

    Every epoch of full-graph training makes and frees the same tensors. By default glibc maps each one above 32 MiB
    anew, and the system clears its pages one by one as they are written, which takes longer than most operations on
    them. The price: until it ends, the process holds up to a quarter more memory, for the gaps between tensors. Call
    this when plans are made, as making them may take more memory than an epoch.

    Returns:
        True if the C library has such a setting, as glibc has.
    """
    libc = ctypes.CDLL(None)
    set_option = getattr(libc, "mallopt", None)
    if set_option is None:
        return False
    libc.malloc_trim(0)
    # older versions accept no such threshold above 32 MiB, but can be told to map nothing
    mapped = set_option(_MMAP_THRESHOLD, _LARGEST) or set_option(_MMAP_MAX, 0)
    return bool(set_option(_TRIM_THRESHOLD, _NEVER) and mapped)


def memory_bytes(cgroups: Path = _CGROUPS) -> int:
    """Return the memory of the machine, or the limit of this process's container or batch job, if that is less.

    Args:
        cgroups: Folder in which Linux shows the limits of control groups; other systems have none.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for root in (cgroups, cgroups / "memory"):  # of version 2, and of version 1
        for place in (root / inside for inside in _control_groups()):
            limits += [limit for folder in (place, *place.parents) if (limit := _limit_of(folder)) is not None]
    return min(limits)


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux's getrusage includes the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _control_groups() -> list[str]:
    """Return this process's control groups as paths below the root, and the root, which is the group in a container."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.is_file() else []
    return ["", *(line.split(":", 2)[2].lstrip("/") for line in lines if line.count(":") >= 2)]


def _limit_of(folder: Path) -> int | None:
    for file in (folder / "memory.max", folder / "memory.limit_in_bytes"):
        if file.is_file() and (text := file.read_text().strip()).isdecimal():
            return int(text)
    return None  # none there, or "max"
