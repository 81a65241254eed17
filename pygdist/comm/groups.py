"""Breaks process groups of this process, so that calls that wait in a group fail."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_TAG = 2**30 + 1  # of a message that nobody sends
_breaking = threading.Lock()
_AT_ONCE = datetime.timedelta(milliseconds=1)


def break_groups(unless: Callable[[], bool] = lambda: False) -> bool:
    """Let every call that waits for other ranks in a process group of this process fail; the groups become useless.

    With gloo, a receive that times out closes all connections of its group, on other ranks too. nccl is aborted.

    Args:
        unless: Called right before the groups break; if it returns True, they stay as they are.

    Returns:
        True if there was a group.
    """
    with _breaking:
        return not unless() and _break()


def await_break(timeout_s: float) -> None:
    """Wait until no other thread is in :func:`break_groups`.

    Python must not end before: a thread that drops the last reference to a group while Python ends aborts the process
    ("terminate called without an active exception").
    """
    if _breaking.acquire(timeout=timeout_s):
        _breaking.release()


def abort_nccl() -> None:
    """Abort every nccl call in this process, so that no group waits for the end of another."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    with_nccl = [group for group in _groups() if _backends_of(group) - {"gloo"}]
    with contextlib.suppress(RuntimeError, ValueError), contextlib.ExitStack() as stack:
        if with_nccl and dist.is_nccl_available():
            # aborted one after the other, they may wait for each other (pytorch #119797)
            nccl: Any = with_nccl[0]._get_backend(torch.device("cuda"))
            nccl._group_start()
            stack.callback(nccl._group_end)
        for group in with_nccl:
            group.abort()


def _break() -> bool:
    """Break the groups, and hold none any more."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    for group in (groups := _groups()):
        # errors are those of a call that fails as it should, or of a group that is gone
        with contextlib.suppress(RuntimeError, ValueError):
            if "gloo" in _backends_of(group):
                gloo: Any = group._get_backend(torch.device("cpu"))
                gloo.recv([torch.zeros(1)], (group.rank() + 1) % group.size(), _TAG).wait(_AT_ONCE)
    abort_nccl()
    return bool(groups)


def _groups() -> list[dist.ProcessGroup]:
    return [group for group in list(dist.distributed_c10d._world.pg_map) if isinstance(group, dist.ProcessGroup)]


def _backends_of(group: dist.ProcessGroup) -> set[str]:
    """Return the backends of a group, such as gloo and nccl; none if it is gone."""
    try:
        return {one.rpartition(":")[2] for one in dist.get_backend_config(group).split(",")}
    except (RuntimeError, ValueError, TypeError):  # TypeError: another thread has just destroyed it
        return set()
