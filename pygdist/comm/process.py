"""The watchdog of this process: one for the default process group, made by the first call that needs other ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref

import torch.distributed as dist

from pygdist.comm.places import FINISHED
from pygdist.comm.watchdog import Watchdog
from pygdist.signals import exit_now

log = logging.getLogger(__name__)

_current: Watchdog | None = None
# the default group that it is for, or ``None`` before there is one; held weakly, as its threads live as long as it
_group: weakref.ref[dist.ProcessGroup] | None = None


def watch(store: dist.Store | None = None, rank: int = 0, world_size: int = 0) -> Watchdog:
    """Return the watchdog of this process; make one if the default process group has none.

    Args:
        store: The job's store, for a process that has no default process group yet; by default the group's own.
        rank: This rank, if ``store`` is given.
        world_size: The number of ranks, if ``store`` is given.
    """
    global _current, _group
    group = weakref.ref(dist.distributed_c10d._get_default_group()) if dist.is_initialized() else None
    if _current is not None and _current.process[1] != os.getpid():  # of the process that forked this one
        _current = _group = None
    if _current is not None and _group is None:
        _group = group  # which was made from the same store
    if _current is not None and _group == group and not _current.is_closed:
        return _current
    if _current is not None:
        _current.close("its process group was destroyed")
    if store is None:
        store, rank, world_size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    _current, _group = Watchdog(store, rank, world_size, on_lost=leave, lives=_lives, active=False), group
    atexit.unregister(close)
    atexit.register(close)
    return _current


def close(farewell: str | None = None) -> None:
    """Tell the other ranks that this process ends, and why."""
    if _current is not None and _current.process[1] == os.getpid():
        error = getattr(sys, "last_value", None)
        _current.close(farewell or (FINISHED if error is None else f"{type(error).__name__}: {error}"))


def _lives() -> bool:
    """Tell if the default process group is still the watchdog's own."""
    return _group is None or (dist.is_initialized() and dist.distributed_c10d._get_default_group() is _group())


def leave(found: str) -> None:
    """End this process, whose main thread waits for ranks that will not answer, where no exception reaches it."""
    log.error("%s; leaving", found)
    exit_now(128 + _current.signum if _current is not None and _current.signum else 1)
