"""Ranks meet: a store is there before the first rank is launched, so that each is heard from its start on.

The process that launches ranks hosts the job's store before it starts them, on a port that it gets from the system, and
watches their processes until they report. Lightning's own order, first a port that is free at the time, then ranks, and
the store when all have imported, leaves the port to others for seconds, and waits half an hour for a rank that died.
"""

from __future__ import annotations

import datetime
import errno
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment

from pygdist.comm.places import busy_ticks
from pygdist.errors import InputError, LostRankError

log = logging.getLogger(__name__)

_PROBE_S, _POLL_S = 2.0, 0.2
_OWN_PORT = "PYGDIST_OWN_PORT"  # the MASTER_PORT that pygdist chose
_hosted: dist.TCPStore | None = None  # of this process; it lives as long


def host(environment: ClusterEnvironment) -> None:
    """Host the job's store, before ranks are launched; the port is free, unless the user chose one.

    Raises:
        InputError: If another process has the port that the user chose.
    """
    global _hosted
    if environment.node_rank() != 0 or _hosted is not None:
        return
    forget_own_port(environment)
    chosen = "MASTER_PORT" in os.environ or "STANDALONE_PORT" in os.environ
    port = environment.main_port if chosen else 0
    _hosted = _serve(environment.main_address, port)
    if not chosen:
        os.environ["MASTER_PORT"] = os.environ[_OWN_PORT] = str(_hosted.port)
        if hasattr(environment, "_main_port"):
            environment._main_port = _hosted.port


def forget_own_port(environment: ClusterEnvironment | None) -> None:
    """Forget a port that pygdist, not the user, chose for an earlier run, in this process or the one that started it.

    Its store is still there, and ranks of the new run would meet in it.
    """
    if _OWN_PORT in os.environ and os.environ.get("MASTER_PORT") == os.environ.pop(_OWN_PORT):
        del os.environ["MASTER_PORT"]
        if environment is not None and hasattr(environment, "_main_port"):
            environment._main_port = -1  # none yet, in Lightning's words


def connect(environment: ClusterEnvironment, rank: int, *, timeout_s: float, warn_after_s: float) -> dist.Store:
    """Return the job's store; rank 0 hosts it, unless ``torchrun`` does.

    Raises:
        InputError: If another process has the port that the user chose.
        LostRankError: If the store does not answer.
    """
    global _hosted
    address, port = environment.main_address, environment.main_port
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if _hosted is None:
            _hosted = _serve(address, port)
        return _hosted
    began, warned, parent = time.monotonic(), False, os.getppid()
    while not _answers(address, port):
        late_s = time.monotonic() - began
        if os.getppid() != parent or late_s > timeout_s:
            why = "the process that started this rank has ended" if os.getppid() != parent else f"for {late_s:.0f} s"
            raise LostRankError(f"rank {rank}: rank 0 does not answer at {address}:{port} ({why})")
        if late_s > warn_after_s and not warned:
            warned = True
            log.warning("rank %d has waited %.0f s for rank 0, at %s:%d", rank, late_s, address, port)
        time.sleep(_POLL_S)
    return dist.TCPStore(address, port, None, False, timeout=datetime.timedelta(seconds=timeout_s))


def _serve(address: str, port: int) -> dist.TCPStore:
    try:
        # torch's own rendezvous shares the server
        return dist.TCPStore(address, port, None, True, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, OSError) as error:
        if not _is_taken(port):
            raise
        raise InputError(
            f"MASTER_PORT={port} is taken by another process of this machine; choose another, or leave MASTER_PORT out "
            "on one machine, and a free port is found"
        ) from error


def _is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as one:
        try:
            one.bind(("", port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


class Launched:
    """The processes that this one has launched as ranks.

    Args:
        processes: The processes.
        first_rank: The rank of the first.
        lost_after_s: Seconds without work after which a process counts as lost, if it has not reported.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], first_rank: int, lost_after_s: float) -> None:
        self._processes = {first_rank + offset: process for offset, process in enumerate(processes)}
        self._lost_after_s = lost_after_s
        self._seen: dict[int, tuple[int | None, float]] = {}  # by rank: processor time, and since when

    def fate(self, rank: int) -> str | None:
        """Return the reason for which a rank that was never heard of will not come; ``None`` if it may."""
        process, now = self._processes.get(rank), time.monotonic()
        if process is None:
            return None
        if process.poll() is not None:
            return f"(process {process.pid}) {described(process.returncode)} before it came here"
        ticks = busy_ticks(process.pid)
        last, since = self._seen.get(rank, (-1, now))
        if ticks != last:
            self._seen[rank] = ticks, now
        elif now - since > self._lost_after_s:
            return f"(process {process.pid}) has done nothing for {now - since:.0f} s, and has not come here"
        return None


def described(code: int) -> str:
    """Say how a process ended, from its exit code."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
