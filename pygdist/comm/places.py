"""Places of ranks in their work: a rank's exchange, the call in which it waits, and deadlocks between ranks.

Places are observed, never guessed: a rank's call of ``torch.distributed``, its line of the user's code and the
processor time of its thread. If a rank of this machine sends no reports, its process is observed.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from pygdist.errors import LostRankError, UnequalRanksError

FINISHED, LOST_A_NEIGHBOUR = "finished", "lost a neighbour"
"""Farewells of ranks that did not cause a failure."""

APART = "the ranks are at different places of the model"
_DIFFERENT = "the ranks make different calls"
_ALIKE = (  # the command line keeps the last 200 characters of a long message
    "All ranks must make the same calls, so none under 'if rank == 0': a loop or condition may decide by what "
    "MeanAggregation() or SumAggregation(), as a module of the model, makes of the rows of all nodes"
)
_BACKWARD = "a backward pass"
_CALLS = ("distributed_c10d.py", "c10d_logger.py", "rendezvous.py")  # of torch.distributed, that wait for other ranks
_looking = threading.Lock()
_BUSY = 0.02  # of a processor: a thread that takes more does not wait


@dataclass(frozen=True)
class Place:
    """The place of a rank in its work: the epoch, and the number and label of the exchange.

    Exchanges count from the start of the run. ``at`` is the rank's place in a model, in words. ``unit`` is the unit of
    ``epoch``: an epoch, or a backward pass in the user's own loop.
    """

    epoch: int = 0
    exchange: int = 0
    label: str = "before the first exchange"
    waiting: bool = False  # True while the exchange runs
    stage: str = ""  # ``fit``, ``test``, ...; in an own loop there is none
    at: str = ""
    unit: str = "epoch"

    def __str__(self) -> str:
        where = f"{self.unit} {self.epoch}, exchange {self.exchange} ({self.label})"
        return f"{self.stage}, {where}" if self.stage else where


@dataclass(frozen=True)
class Report:
    """The report of one rank in a heartbeat.

    Attributes:
        beats: Number of heartbeats so far.
        place: The rank's place.
        run: The number of the rank's current or last run (fit, test, ...).
        call: The call of torch in which the rank waits for other ranks, if there is one.
        line: The line of the user's code that the rank runs.
        idle_s: Seconds for which the rank has waited there without computing.
        still_s: Seconds in which no byte moved between this rank and others; ``None`` if bytes cannot be seen.
        made: The rank's last exchanges: their numbers, each with a checksum of all labels up to this exchange.
        left: The reason why the rank has left the run, or ended; ``None`` if it has not.
        verdict: The finding of the rank's watchdog, if it has given up.
        signum: The signal that ends the run, if there is one.
        process: The rank's machine and process id.
    """

    beats: int = 0
    place: Place = Place(label="an unknown place (it has not reported yet)")
    run: int = 0
    call: str = ""
    line: str = ""
    idle_s: float = 0.0
    still_s: float | None = None
    made: tuple[tuple[int, int], ...] = ()
    left: str | None = None
    verdict: str = ""
    signum: int = 0
    process: tuple[str, int] = ("", 0)

    def encoded(self) -> str:
        """Return the report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: bytes) -> Report:
        """Return the report in ``text``; if it is malformed, a report without any heartbeat."""
        try:
            values = json.loads(text)
            place = Place(**values.pop("place"))
            made = tuple((int(number), int(digest)) for number, digest in values.pop("made"))
            host, pid = values.pop("process")
            report = cls(place=place, made=made, process=(str(host), int(pid)), **values)
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls()
        numbers = (report.beats, report.run, report.idle_s, report.still_s or 0.0, report.signum)
        texts = (report.call, report.line, report.verdict)
        sound = all(isinstance(one, (int, float)) for one in numbers) and all(isinstance(one, str) for one in texts)
        return report if sound else cls()

    @property
    def waits(self) -> bool:
        """True if the rank is in a call that other ranks must make too."""
        return self.place.waiting or bool(self.call)

    @property
    def text(self) -> str:
        """The place, as in "last seen in ..."."""
        return str(self.place) if self.beats else self.place.label

    @property
    def whence(self) -> str:
        """The line of the user's code, or the reason why the rank has left."""
        if self.left is not None:
            return f", and has left {self.place.stage or 'its work'} ({first_line(self.left)})"
        return f" at {self.line}" if self.line else ""

    def lost(self, rank: int, silent: str = "") -> str:
        """Return a clause saying that a rank is lost, with its host if this is another machine."""
        host = self.process[0].partition(" ")[0]
        on = f"on {host}, " if host not in ("", machine().partition(" ")[0]) else ""
        return f"rank {rank} is lost ({on}{silent}last seen in {self.text})"

    def described(self, rank: int) -> str:
        """Return a clause with the place of a rank and the call in which it waits."""
        at = f" at {self.line}" if self.line else ""
        if not self.beats:
            return f"rank {rank} has not reported yet"
        if self.left is not None:
            return f"rank {rank} has left {self.place.stage or 'its work'} ({first_line(self.left)})"
        if self.place.waiting:
            return f"rank {rank} waits in {self.place}{at}"
        if self.call:
            stage = f"{self.place.stage}, in " if self.place.stage else ""
            return f"rank {rank} waits in {stage}{self.call}{at}, after exchange {self.place.exchange}"
        return f"rank {rank} is{at or ' busy'}, after {self.place}"


def first_line(text: str) -> str:
    """Return the first line of a reason."""
    return (text.splitlines() or ["no reason given"])[0]


# -- ranks that wait for each other ------------------------------------------------------------------------------------


def deadlock(rank: int, reports: Mapping[int, Report], *, soon_s: float, patience_s: float) -> str | None:
    """Return a clause for each rank if the exchanges in which the ranks wait can never end; otherwise ``None``.

    In a deadlock every rank waits or has left, and one of three conditions holds. (a) Ranks that made different
    exchanges have waited for ``soon_s``. (b) No byte has moved for ``patience_s``. (c) Bytes cannot be seen, every rank
    has waited for ``patience_s``, and another rank has left: with an error, or before the exchange in which a rank
    waits, or while a rank waits in a call of torch's, which has no number to compare. Waiting in different calls alone
    is no deadlock: an exchange ends earlier on one rank than on another.

    Args:
        rank: The rank that asks.
        reports: The reports of all ranks.
        soon_s: Seconds of waiting after which different exchanges count as a deadlock.
        patience_s: Seconds of waiting in the other cases.
    """
    mine = reports[rank]
    later = {one for one, report in reports.items() if report.left is None and report.run > mine.run}
    gone = later | {one for one, report in reports.items() if report.left is not None}
    here = [report for one, report in reports.items() if one not in gone]
    if rank in gone or not all(report.waits and report.idle_s >= soon_s for report in here):
        return None
    patient = min(report.idle_s for report in here) >= patience_s
    still = all(report.still_s is not None and report.still_s >= patience_s for report in here)
    differ = _differ(here)
    if not (differ or (patient and (still or _wait_for(here, [reports[one] for one in gone])))):
        return None
    if found := apart([report.place.at for report in reports.values()], [report.whence for report in reports.values()]):
        return found
    has_left = f", and has left run {mine.run}"
    clauses = "; ".join(report.described(one) + has_left * (one in later) for one, report in reports.items())
    return f"{_DIFFERENT}: {clauses}; all ranks must make the same calls, in the same order" if differ else clauses


def apart(places: Sequence[str], whence: Sequence[str]) -> str:
    """Return a text that names the different places of ranks in a model, and a remedy; empty if places are equal.

    Args:
        places: The place of each rank.
        whence: More information about each rank.
    """
    if len(set(places)) == 1:
        return ""
    told: dict[str, list[str]] = {}
    for rank, (place, more) in enumerate(zip(places, whence, strict=True)):
        told.setdefault(f"{place or 'outside of it'}{more}", []).append(str(rank))
    clauses = (f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}" for text, ranks in told.items())
    return f"{APART}: {'; '.join(clauses)}. {_ALIKE}"


def is_of_connection(error: BaseException) -> bool:
    """Tell if an error of torch, of another library or of the system means that a call among ranks failed."""
    words = ("connection closed", "connection reset", "timed out", "timeout", "broken pipe", "nccl", "socket")
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    kinds = (dist.DistError, ConnectionError, TimeoutError)
    return isinstance(error, kinds) or any(word in text for word in words)


def failure(found: str, said: str) -> RuntimeError:
    """Return the error for a failed call, given the watchdog's finding and the message."""
    return UnequalRanksError(found) if found.startswith((APART, _DIFFERENT)) else LostRankError(said)


def _differ(reports: list[Report]) -> bool:
    """True if two ranks of one run made different exchanges."""
    by_number: dict[tuple[int, int], set[int]] = {}
    for report in reports:
        for number, digest in report.made:
            by_number.setdefault((report.run, number), set()).add(digest)
    return any(len(digests) > 1 for digests in by_number.values())


def _wait_for(here: list[Report], gone: list[Report]) -> bool:
    """True if a rank waits for one that has left: for an error, or before the exchange, or that call of torch's."""
    return any(
        other.left not in (None, FINISHED) or not report.place.waiting or other.place.exchange < report.place.exchange
        for report in here
        for other in gone
    )


# -- this process ------------------------------------------------------------------------------------------------------


class Thread:
    """Observes the thread of this process that works for the rank: its call and its line of code.

    Args:
        ident: Identifier of the thread.
    """

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self._clock = time.pthread_getcpuclockid(ident) if hasattr(time, "pthread_getcpuclockid") else None
        self._spot: tuple[object, ...] = ()
        self._busy_s, self._looked = self._cpu_s(), time.monotonic()
        self._since = self._looked

    def anew(self) -> Thread:
        """Return a new observer of the thread, which begins now."""
        return Thread(self._ident)

    def look(self, place: Place) -> tuple[str, str, float]:
        """Return the call of torch that the thread waits in, its line of the user's code, and its idle seconds."""
        call, line = _whereabouts(_stack(self._ident))
        if call == _BACKWARD and (self._clock is None or torch.cuda.is_initialized()):  # which may compute elsewhere
            call = ""
        now, busy_s = time.monotonic(), self._cpu_s()
        moved = busy_s - self._busy_s > _BUSY * (now - self._looked)
        if moved or self._spot != (place.exchange, place.waiting, call, line):
            self._since = now
        self._spot = (place.exchange, place.waiting, call, line)
        self._busy_s, self._looked = busy_s, now
        return call, line, now - self._since

    def _cpu_s(self) -> float:
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return 0.0


def _stack(ident: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each call that a thread is in, innermost first; empty if it has ended.

    One call of C follows the frames, so that the thread does not run on meanwhile. A loop of Python crashed Python 3.11
    in ``PyFrame_GetBack``. ``faulthandler`` writes the calls of all threads, and crashes where torch just makes one.
    """
    frames: list[FrameType] = []
    with _without_garbage_collection(), contextlib.suppress(AttributeError):  # behind the outermost there is ``None``
        innermost = sys._current_frames().get(ident)
        frames.extend(itertools.accumulate(itertools.repeat("f_back"), getattr, initial=innermost))
    return [(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames if frame]


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: Python 3.11 looks at frames under a lock that a thread needs which ends.

    Garbage whose end ends a thread, as that of a courier, would wait for ever.
    """
    with _looking:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


def _whereabouts(stack: Sequence[tuple[str, int, str]]) -> tuple[str, str]:
    call, line, inside = "", "", True
    for file, number, name in stack:
        kind = _kind(file)
        if inside and kind == "distributed":
            call = call if name == "wrapper" else f"torch.distributed.{name}"
        elif inside and kind == "ddp":
            call = "DistributedDataParallel"
        elif inside and kind == "backward":
            call = _BACKWARD
        inside = inside and kind != "other" and kind != "user"
        if kind == "user":
            line = f"{Path(file).name}:{number}"
            break
    return call, line


@lru_cache(maxsize=4096)
def _kind(file: str) -> str:
    """Tell whose code a file is."""
    torch_folder = os.path.dirname(torch.__file__)
    if file in (os.path.join(torch_folder, "distributed", name) for name in _CALLS):
        return "distributed"
    if file == os.path.join(torch_folder, "nn", "parallel", "distributed.py"):
        return "ddp"
    if file == os.path.join(torch_folder, "autograd", "graph.py"):
        return "backward"
    ours, library = str(Path(__file__).parent.parent), sysconfig.get_path("stdlib")
    if file.startswith(("<", ours + os.sep, library + os.sep)) or "-packages" + os.sep in file:
        return "other"
    return "user"


@lru_cache(maxsize=1)
def machine() -> str:
    """Return a name of this machine, which also distinguishes containers with process ids of their own."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}"


def busy_ticks(pid: int) -> int | None:
    """Return the processor time of a process of this machine; ``None`` if it has ended, is stopped, or is hidden."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "TtZX" else int(numbers[10]) + int(numbers[11])


def is_stopped(process: tuple[str, int]) -> bool:
    """Tell if a process of this machine is stopped, as by SIGSTOP."""
    host, pid = process
    try:
        return host == machine() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False


def kill_stopped(process: tuple[str, int]) -> None:
    """Kill a process of this machine if it is stopped, as it would stay for ever once the other ranks have ended."""
    if is_stopped(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[1], signal.SIGKILL)
