"""The end of a process that is a rank: process groups are destroyed, and no process that it started stays behind."""

from __future__ import annotations

import atexit
import contextlib
import gc
import threading
from collections.abc import Iterator

import torch.distributed as dist

from pygdist.comm.groups import break_groups
from pygdist.comm.process import close as close_watchdog
from pygdist.lightning.meeting import Launched

_DESTROY_S = 3.0


class _State:
    """The processes and groups that end with this process."""

    launched: Launched | None = None
    lost_ranks = False
    owned = False


@contextlib.contextmanager
def joining() -> Iterator[None]:
    """Destroy the default process group at the end if the block makes it, and not the user's script."""
    _State.owned = _State.owned or not dist.is_initialized()
    yield
    if _State.owned:
        atexit.unregister(_end)
        atexit.register(_end)  # the last one, so the first to be called


def look_after(launched: Launched) -> None:
    """End these processes of this machine, too, if they are stopped in the end."""
    _State.launched = launched


def lost_ranks() -> None:
    """Note that ranks were lost: process groups are broken before they are destroyed, which would wait otherwise."""
    _State.lost_ranks = True


def _end() -> None:
    """Destroy the process groups while Python still runs; Lightning leaves gloo's to the end of the process.

    A thread of gloo releases the tensors of a collective call after the call has returned. If Python ends in between,
    they can no longer be freed and the process aborts: "terminate called without an active exception".
    """
    close_watchdog()
    gc.collect()  # any reference to the group would keep its threads
    if dist.is_initialized() and not _State.lost_ranks:
        dist.destroy_process_group()
    elif dist.is_initialized():
        break_groups()
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(timeout=_DESTROY_S)  # a group that waits nevertheless is left to the system
    if _State.launched is not None:
        _State.launched.end_stopped(patiently=not _State.lost_ranks)
