"""Process groups of this process: how a call that waits in one is made to fail."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist

_TAG = 2**30 + 1  # of a message that nobody sends
_AT_ONCE = datetime.timedelta(milliseconds=1)


def break_groups() -> bool:
    """Let every call fail that waits for other ranks in a process group of this process; the groups are of no more use.

    With gloo a receive that runs out of time closes all connections of its group, on other ranks too; nccl is aborted.

    Returns:
        True if there was a group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    groups = [group for group in list(dist.distributed_c10d._world.pg_map) if isinstance(group, dist.ProcessGroup)]
    for group in groups:
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # of a call that fails as it should, or a group that is gone
            if "gloo" in dist.get_backend(group):
                gloo: Any = group._get_backend(torch.device("cpu"))
                gloo.recv([torch.zeros(1)], (group.rank() + 1) % group.size(), _TAG).wait(_AT_ONCE)
            else:
                group.abort()
    return bool(groups)
