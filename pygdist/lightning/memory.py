"""The memory of freed tensors: kept for the next epoch's, which are the same."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of malloc.h
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep what its tensors free, instead of giving it back to the system.

    Every epoch of full-graph training makes and frees the same tensors. By default glibc maps each of more than 32 MiB
    anew, and its pages are cleared one by one as they are written, which takes longer than most operations on them.
    For that a process holds more at its peak, by the gaps between tensors (up to a quarter was seen), until it ends.

    Returns:
        Whether the C library has such a setting: glibc does.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    # older versions know no such threshold above 32 MiB, but to map nothing at all
    mapped = set_option(_MMAP_THRESHOLD, _LARGEST) or set_option(_MMAP_MAX, 0)
    return bool(set_option(_TRIM_THRESHOLD, _NEVER) and mapped)
