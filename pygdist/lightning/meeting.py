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
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment

from pygdist.comm.places import busy_ticks, is_stopped, kill_stopped, machine
from pygdist.errors import InputError, LostRankError
from pygdist.signals import name_of, parent, signal_of

log = logging.getLogger(__name__)

_PROBE_S, _POLL_S = 2.0, 0.2
_LOOPBACK = "127.0.0.1"
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
    if environment.main_address == _LOOPBACK and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine listen to nobody else
    _hosted = _serve(environment.main_address, port)
    if not chosen:
        os.environ["MASTER_PORT"] = os.environ[_OWN_PORT] = str(_hosted.port)
        if hasattr(environment, "_main_port"):
            environment._main_port = _hosted.port


def hosts_store() -> bool:
    """Tell if the job's store goes with this process."""
    return _hosted is not None


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
    began, warned = time.monotonic(), False
    while not _answers(address, port):
        late_s = time.monotonic() - began
        if late_s > timeout_s:
            raise LostRankError(f"rank {rank}: rank 0 does not answer at {address}:{port} (for {late_s:.0f} s)")
        if late_s > warn_after_s and not warned:
            warned = True
            log.warning("rank %d has waited %.0f s for rank 0, at %s:%d", rank, late_s, address, port)
        time.sleep(_POLL_S)
    try:
        # a process that is stopped takes connections, but does not answer
        store = dist.TCPStore(address, port, None, False, timeout=datetime.timedelta(seconds=warn_after_s))
    except RuntimeError as error:
        kill_stopped((machine(), parent()))
        raise LostRankError(
            f"rank {rank}: rank 0 has taken the connection to {address}:{port}, but has not answered for "
            f"{warn_after_s:.0f} s"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _serve(address: str, port: int) -> dist.TCPStore:
    """Host a store that listens at the address alone: loopback for the ranks of one machine."""
    listening = socket.socket(socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        fd: int | None = listening.detach()
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise InputError(
                f"MASTER_PORT={port} is taken by another process of this machine; choose another, or leave MASTER_PORT "
                "out on one machine, and a free port is found"
            ) from error
        fd = None  # a name for this machine that it does not know itself: torch listens on all addresses
    # torch's own rendezvous shares the server
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


class Launched:
    """The processes of this machine that were started as ranks, by this process or beside it by ``torchrun``.

    Args:
        processes: Those that this process started.
        first_rank: The rank of the first.
        lost_after_s: Seconds without work after which a process counts as lost, if it has not reported.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], first_rank: int, lost_after_s: float) -> None:
        self._processes = {first_rank + offset: process for offset, process in enumerate(processes)}
        self._pids = {rank: process.pid for rank, process in self._processes.items()} or _siblings()
        self._lost_after_s = lost_after_s
        self._seen: dict[int, tuple[int | None, float]] = {}  # by rank: processor time, and since when
        self._lost: dict[int, str] = {}

    def fate(self, rank: int) -> str | None:
        """Return the reason for which a rank that was never heard of will not come; ``None`` if it may."""
        pid, now = self._pids.get(rank), time.monotonic()
        if pid is None or rank in self._lost:
            return self._lost.get(rank)
        if (code := self._exit_code(rank)) is not None:
            return f"(process {pid}) {described(code)} before it came here"
        ticks = busy_ticks(pid)
        last, since = self._seen.get(rank, (-1, now))
        if ticks != last:
            self._seen[rank] = ticks, now
        elif now - since > self._lost_after_s:
            kill_stopped((machine(), pid))
            self._lost[rank] = f"(process {pid}) has done nothing for {now - since:.0f} s, and has not come here"
        return self._lost.get(rank)

    def signal(self) -> int:
        """Return the signal that ended one of these processes, or 0."""
        codes = [self._exit_code(rank) for rank in self._processes]
        return next((number for code in codes if code is not None and (number := signal_of(code))), 0)

    def end(self, within_s: float) -> None:
        """Kill those that do not end by themselves."""
        deadline = time.monotonic() + within_s
        for process in self._processes.values():
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def end_stopped(self) -> None:
        """Kill those that are stopped and stay so: nobody will look after them once this process has ended."""
        deadline = time.monotonic() + self._lost_after_s
        while stopped := {rank: pid for rank, pid in self._pids.items() if is_stopped((machine(), pid))}:
            if time.monotonic() > deadline:
                for rank, pid in stopped.items():
                    log.error("rank %d (process %d) was stopped as the run ended: killed", rank, pid)
                    kill_stopped((machine(), pid))
            time.sleep(_POLL_S)

    def _exit_code(self, rank: int) -> int | None:
        process = self._processes.get(rank)
        return None if process is None else process.poll()


def _siblings() -> dict[int, int]:
    """Return the processes that ``torchrun`` started beside this one, by rank; none where that cannot be seen."""
    pids, agent = dict[int, int](), parent()
    for folder in Path("/proc").glob("[0-9]*") if agent else ():
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                names = dict(one.partition("=")[::2] for one in (folder / "environ").read_text().split("\0"))
                pids[int(names["RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError, IndexError):  # it has ended, or is no rank
            continue
    return pids


def described(code: int) -> str:
    """Say how a process ended, from its exit code."""
    if signum := signal_of(code):
        return f"was ended by {name_of(signum)}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
