"""Ranks meet: a store is there before the first rank is launched, so that each is heard from its start on.

The process that launches ranks hosts the job's store before it starts them, on a port that it gets from the system, and
watches their processes until they report. Lightning's own order, first a port that is free at the time, then ranks, and
the store when all have imported, leaves the port to others for seconds, and waits half an hour for a rank that died.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment

from pygdist.comm.places import first_line, is_of_connection, is_stopped, kill_stopped, machine
from pygdist.comm.watchdog import NO_STORE, Watchdog
from pygdist.errors import InputError, LostRankError, RefusedError, SignalError
from pygdist.memory.limits import refusal_of
from pygdist.signals import exit_now, name_of, parent, received, siblings, signal_of

log = logging.getLogger(__name__)

_PROBE_S, _POLL_S, _NAMED_S = 2.0, 0.2, 15.0
_LOOPBACK = "127.0.0.1"
_KNOCKS = "pygdist/knocks"
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
    if rank == 0 and not _is_of_agent():
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
    timeout = datetime.timedelta(seconds=timeout_s)
    store = _join(address, port, rank, warn_after_s, timeout)
    return _of_this_start(store, environment, rank, warn_after_s, timeout) if _is_of_agent() else store


def _join(address: str, port: int, rank: int, lost_after_s: float, timeout: datetime.timedelta) -> dist.TCPStore:
    """Connect to a store whose host takes connections, or leave."""
    store = _within(lost_after_s, dist.TCPStore, address, port, None, False)
    if store is None:  # a process that is stopped takes connections, and torch waits for its answer for ever
        where = f"rank {rank}: rank 0 has taken the connection to {address}:{port}"
        log.error("%s, but has not answered for %.0f s; leaving", where, lost_after_s)
        for pid in (parent(), siblings().get(0, 0)):
            kill_stopped((machine(), pid))
        exit_now(1)  # a thread still waits
    store.set_timeout(timeout)
    return store


def why_not_joined(
    error: Exception, rank: int, watchdog: Watchdog | None
) -> SignalError | LostRankError | RefusedError:
    """Return the error that says why a rank that has met the others could not join them.

    A store that goes with its rank ends their connections before anybody else can tell.
    """
    if (refusal := refusal_of(error)) is not None:
        return refusal
    said = first_line(str(error))
    if watchdog is not None and is_of_connection(error):
        diagnosis = watchdog.diagnose()
        if watchdog.signum and not received():
            return SignalError(watchdog.signalled_by, watchdog.signum)
        said = f"{diagnosis} ({said})" if diagnosis == NO_STORE else diagnosis
    return LostRankError(f"rank {rank}: the ranks cannot join: {said}")


def agent() -> str:
    """Name the process of ``torchrun`` that started this one, as no other is named, before or after; empty if none."""
    starter = parent()
    with contextlib.suppress(psutil.Error):
        return f"{machine()} {starter} {psutil.Process(starter).create_time()}" if starter else ""
    return ""


@functools.cache
def warn_of_joining() -> None:
    """Warn if machines may join the job of ``torchrun`` later, which torch and pygdist must be prepared for."""
    starter, nnodes, words = parent(), os.environ.get("PET_NNODES", ""), list[str]()
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(starter).cmdline() if starter else []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--nnodes"):
            nnodes = word.partition("=")[2] or following
    lacking = []
    if _is_of_agent():  # an agent that joins later waits in vain for the address of this store, and then all agents end
        lacking.append("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for it, or torch ends the job then")
    if os.environ.get("TORCHELASTIC_RUN_ID") == "none":
        lacking.append("give it an --rdzv-id=NAME, or they do not know which run goes on")
    if ":" in nnodes and lacking:
        log.warning("machines may join torchrun --nnodes=%s later: %s", nnodes, "; ".join(lacking))


def _is_of_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _of_this_start(
    agent: dist.TCPStore,
    environment: ClusterEnvironment,
    rank: int,
    lost_after_s: float,
    timeout: datetime.timedelta,
) -> dist.Store:
    """Return a store that rank 0 hosts for the ranks that torchrun has started together.

    torchrun's own outlives ranks. Ranks that it starts again would find the addresses of those before, and connect to
    processes that are gone. So each rank knocks there under a name of its own, and rank 0 answers with the new address.
    """
    global _hosted
    if rank == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((environment.main_address, environment.main_port))  # sends nothing
            address = route.getsockname()[0]
        store = _hosted = _serve(address, 0)
        place = f"{address}:{_hosted.port}"
        other: Any = agent  # torch's types lack some of its attributes
        threading.Thread(target=_answer, args=(other.clone(), place, environment.world_size()), daemon=True).start()
    else:
        name = uuid.uuid4().hex
        agent.set(f"{_KNOCKS}/{rank}", name)
        place = _answer_of_rank_zero(agent, name, rank, lost_after_s, timeout.total_seconds())
        agent.set(f"{_KNOCKS}/{place}/{rank}", "has the answer")
    address, port = place.rsplit(":", 1)
    # torch makes its groups in the store that these name
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return store if rank == 0 else _join(address, int(port), rank, lost_after_s, timeout)


def _answer_of_rank_zero(agent: dist.TCPStore, name: str, rank: int, lost_after_s: float, timeout_s: float) -> str:
    """Wait until rank 0 has told where the ranks meet, unless it was stopped."""
    launched, began = Launched([], 0, lost_after_s), time.monotonic()
    while not agent.check([f"{_KNOCKS}/{name}"]):
        fate = launched.fate(0)
        if fate is None and time.monotonic() - began > timeout_s:
            fate = f"has not told for {timeout_s:.0f} s where its store is"
        if fate is not None:
            raise LostRankError(f"rank {rank} waits for the store of rank 0: rank 0 {fate}")
        time.sleep(_POLL_S)
    return str(agent.get(f"{_KNOCKS}/{name}").decode())


def _answer(agent: dist.TCPStore, place: str, world_size: int) -> None:
    """Tell each rank that knocks where the ranks meet, until all have the answer; one that is gone may have knocked."""
    waiting = set(range(1, world_size))
    with contextlib.suppress(RuntimeError):  # the agent has ended, so this process does as well
        while waiting:
            for rank in sorted(waiting):
                if agent.check([f"{_KNOCKS}/{place}/{rank}"]):
                    waiting.remove(rank)
                elif agent.check([f"{_KNOCKS}/{rank}"]):
                    agent.set(f"{_KNOCKS}/{agent.get(f'{_KNOCKS}/{rank}').decode()}", place)
            time.sleep(_POLL_S)


def _within(seconds: float, make: Callable[..., dist.TCPStore], *args: Any) -> dist.TCPStore | None:
    """Return the result of a call that may never end, or ``None``."""
    made: list[dist.TCPStore] = []
    errors: list[RuntimeError] = []

    def call() -> None:
        try:
            made.append(make(*args))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise LostRankError(f"the store of the job does not answer: {first_line(str(errors[0]))}") from errors[0]
    return made[0] if made else None


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
        if isinstance(error, socket.gaierror):
            check_address(address)
        fd = None  # a name for this machine that it does not know itself: torch listens on all addresses
    # torch's own rendezvous shares the server
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)


def check_address(address: str) -> None:
    """Refuse a name of rank 0's machine that is none, which torch would wait for."""
    if not _is_known(address):
        raise InputError(
            f"MASTER_ADDR: there is no host {address[:100]!r}; give the name or the address of the machine of rank 0, "
            "or leave MASTER_ADDR out on one machine"
        )


def _is_known(address: str) -> bool:
    """Tell if a name has an address; names of containers that have just started get theirs after some seconds."""
    began = time.monotonic()
    while True:
        try:
            return bool(socket.getaddrinfo(address, None))
        except (OSError, ValueError):
            if time.monotonic() - began > _NAMED_S:
                return False
        time.sleep(_POLL_S)


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
        lost_after_s: Seconds after which a process that is stopped counts as lost, if it has not reported.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], first_rank: int, lost_after_s: float) -> None:
        self._processes = {first_rank + offset: process for offset, process in enumerate(processes)}
        self.pids = {rank: process.pid for rank, process in self._processes.items()} or siblings()
        self._lost_after_s = lost_after_s
        self._stopped: dict[int, float] = {}  # by rank: since when
        self._lost: dict[int, str] = {}

    def fate(self, rank: int) -> str | None:
        """Return the reason for which a rank that was never heard of will not come; ``None`` if it may."""
        pid, now = self.pids.get(rank), time.monotonic()
        if pid is None or rank in self._lost:
            return self._lost.get(rank)
        if (code := self._exit_code(rank)) is not None:
            return f"(process {pid}) {described(code)} before it came here"
        if not is_stopped((machine(), pid)):  # it may wait for a file
            self._stopped.pop(rank, None)
        elif (stopped_s := now - self._stopped.setdefault(rank, now)) > self._lost_after_s:
            kill_stopped((machine(), pid))
            self._lost[rank] = f"(process {pid}) was stopped before it came here, for {stopped_s:.0f} s; it was killed"
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

    def end_stopped(self, *, patiently: bool = True) -> None:
        """Kill those that are stopped and stay so: nobody will look after them once this process has ended."""
        deadline = time.monotonic() + (self._lost_after_s if patiently else 0.0)
        while stopped := {rank: pid for rank, pid in self.pids.items() if is_stopped((machine(), pid))}:
            if time.monotonic() > deadline:
                for rank, pid in stopped.items():
                    log.error("rank %d (process %d) was stopped as the run ended: killed", rank, pid)
                    kill_stopped((machine(), pid))
            time.sleep(_POLL_S)

    def _exit_code(self, rank: int) -> int | None:
        process = self._processes.get(rank)
        return None if process is None else process.poll()


def described(code: int) -> str:
    """Say how a process ended, from its exit code."""
    if signum := signal_of(code):
        return f"was ended by {name_of(signum)}"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
