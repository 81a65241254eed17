"""The watchdog knows the place of every rank, and names a rank that is late, lost, or in another call than the others.

A thread of each rank writes heartbeats into the job's rendezvous store. A heartbeat holds the rank's place: the run
(fit, test, ...), epoch and exchange, the call in which the rank waits and, if the rank has left, the reason. A rank
that waits long reads the heartbeats of the others. The rank gives up if another rank's heartbeat has stopped, or if all
ranks wait for each other in calls that can never end (:func:`~pygdist.comm.places.deadlock`). Its thread then breaks
the process groups, so that the waiting call fails, with the watchdog's finding as the reason.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from pygdist.comm.board import ANSWER_S, Board
from pygdist.comm.connections import Connections
from pygdist.comm.groups import await_break, break_groups
from pygdist.comm.places import (
    FINISHED,
    LOST_A_NEIGHBOUR,
    Place,
    Report,
    Thread,
    busy_ticks,
    deadlock,
    first_line,
    kill_stopped,
    machine,
)
from pygdist.comm.progress import DeviceProgress, Event
from pygdist.errors import InputError, LostRankError
from pygdist.signals import ended_before, name_of, note_cause, parent

log = logging.getLogger(__name__)

NO_STORE = "the rendezvous store does not answer: look at rank 0 (or the launcher), where it ran"
"""The finding about the other ranks once their store is gone."""

_LEAVE_S = 5.0  # within which an exception ends a rank whose groups are broken
_HISTORY = 16  # exchanges by which two ranks are compared
_POLL_S = 0.05


class Watchdog:
    """Writes the heartbeats of one rank and reads those of the others.

    Args:
        store: The job's key-value store; cloned, so that the heartbeat never blocks other users of the store.
        rank: This rank.
        world_size: Number of ranks.
        warn_after_s: Seconds in one exchange after which the log names the late ranks, once per exchange.
        beat_s: Seconds between heartbeats.
        lost_after_s: Seconds of silence after which a rank counts as lost, or the store as gone. Ranks that wait for
            each other for ever are found within this time.
        on_lost: Called from a thread of the watchdog if no exception ends the rank. The argument is a text that names
            lost ranks, tells where all ranks wait, or says that the store does not answer. The function should end the
            process, whose main thread waits in a call that no exception reaches; otherwise the watchdog may call the
            function again. Without ``on_lost`` the watchdog gives up only after a signal.
        active: True if lost ranks count from now on. Otherwise they count only in runs (:meth:`begin`), and while this
            rank waits for others.
        lives: Returns False once this watchdog's process group is gone, as the rank has then left.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        warn_after_s: float = 60.0,
        beat_s: float = 1.0,
        lost_after_s: float = 20.0,
        on_lost: Callable[[str], None] | None = None,
        lives: Callable[[], bool] = lambda: True,
        active: bool = True,
    ) -> None:
        self._board = Board(store, rank, world_size)
        self.rank, self.world_size = rank, world_size
        self.warn_after_s, self.beat_s, self.lost_after_s = warn_after_s, beat_s, lost_after_s
        self.limit_s = float("inf")  # for an exchange on a GPU; on the host, those who wait have limits
        self.on_lost, self._lives = on_lost, lives
        self.verdict: str | None = None  # the finding for which the process groups were broken
        self.signum, self.signalled_by = 0, ""  # the signal that ends the run, and which rank it has reached
        self._heard: dict[int, tuple[int, float, int | None]] = {}  # by rank: heartbeats, since when, processor time
        self._processes: dict[int, tuple[str, int]] = {}  # of the other ranks
        self.place = Place()
        self._since, self._progress = time.monotonic(), DeviceProgress()
        self._warned = -1
        self._run_number, self._in_run = 0, active
        self._left: str | None = None
        self._digest, self._made = 0, deque[tuple[int, int]](maxlen=_HISTORY)
        self._call = ""  # that this rank waits in by a loop of its own
        self._worker, self.process = Thread(threading.get_ident()), (machine(), os.getpid())
        self._connections = Connections(store)
        self._report = Report()
        self._beats = self._looked = 0
        self._stop, self._told = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pygdist-watchdog", daemon=True)
        self._beat()
        self._thread.start()
        threading.Thread(target=self._guard, name="pygdist-store-guard", daemon=True).start()

    # -- this rank -----------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True after :meth:`close`."""
        return self._stop.is_set()

    def enter(self, epoch: int, label: str, *, counted: bool = True, unit: str = "epoch") -> None:
        """Record that an exchange begins; an exchange between only two ranks is not ``counted``."""
        self._since = time.monotonic()
        exchange = self.place.exchange + counted
        self.place = replace(self.place, epoch=epoch, exchange=exchange, label=label, waiting=True, unit=unit)
        if counted:
            self._digest = zlib.crc32(f"{self.place.at}, {label}".encode(), self._digest)
            self._made.append((self.place.exchange, self._digest))

    def move(self, at: str) -> None:
        """Note the place of this rank in a model."""
        self.place = replace(self.place, at=at)

    def leave(self, over: Event | None = None) -> None:
        """Record that the exchange is over for the host; with ``over``, the GPU is in the exchange until this event."""
        if over is not None:
            self._progress.add(self.place, over)
        self.place = replace(self.place, waiting=False)

    def begin(self, stage: str) -> None:
        """Record that this rank begins a run, such as ``fit``: exchanges count from 1 again."""
        self._run_number += 1
        self._made.clear()
        self._digest, self._left, self._in_run = 0, None, True
        self.place, self.verdict, self.signum = Place(stage=stage), None, 0
        self._progress.clear()
        self._told.clear()
        self._beat()

    def depart(self, reason: str = FINISHED) -> None:
        """Tell the other ranks that this rank has left the run, and the reason; heartbeats go on."""
        self._told.set()
        self._in_run, self._left = False, reason
        self._progress.clear()
        self.leave()
        if self.verdict != NO_STORE:
            self._beat()

    def see_others_leave(self, limit_s: float) -> None:
        """Wait until all others have left the run too, as they read the reason in a store that this process hosts."""
        deadline = time.monotonic() + limit_s
        while (reports := self._board.read()) is not None and time.monotonic() < deadline:
            if all(report.left is not None for rank, report in reports.items() if rank != self.rank):
                return
            time.sleep(self.beat_s)

    def close(self, farewell: str = FINISHED) -> None:
        """Stop the heartbeat, and tell the other ranks that this rank has left, and the reason.

        Args:
            farewell: The reason. ``"finished"`` is the usual end; ``"lost a neighbour"`` says that another rank is
                lost, so the others look for that rank.
        """
        if self._stop.is_set():
            return
        self._told.set()
        self._stop.set()
        await_break(ANSWER_S)
        if self.verdict is not None:
            self._kill_stopped()
        if self.verdict == NO_STORE:
            return
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=ANSWER_S)
            if self._thread.is_alive():  # it waits for a store that froze
                return
        self._left = farewell if self._left in (None, FINISHED) else self._left
        self._beats += 1
        self._publish()

    def know(self, pids: Mapping[int, int]) -> None:
        """Note the processes of ranks on this machine, by rank, which may stop before their first report."""
        self._processes |= {rank: (machine(), pid) for rank, pid in pids.items() if rank != self.rank}

    def meet(self, timeout_s: float, fate: Callable[[int], str | None] = lambda rank: None) -> None:
        """Wait until every rank has begun this run.

        Args:
            timeout_s: Seconds to wait.
            fate: Called with the number of a rank that has not begun; returns the reason why it cannot, or ``None``.

        Raises:
            LostRankError: If a rank does not begin in time; the message tells where that rank is.
            InputError: On all ranks, if they have begun different runs.
        """
        key, stage = f"run-{self._run_number}", self.place.stage
        self._call, began, warned = f"the start of {stage}", time.monotonic(), False
        self._board.write(f"{key}/{self.rank}", stage)
        try:
            while missing := [rank for rank in range(self.world_size) if not self._board.note(f"{key}/{rank}")]:
                late_s = time.monotonic() - began
                lost = [f"rank {rank} {reason}" for rank in missing if (reason := fate(rank))] or self._departed()
                if lost or self.verdict is not None or late_s > timeout_s or self._board.is_gone:
                    raise LostRankError(f"rank {self.rank} waits in {self._call}: {self._found(missing, lost)}")
                if late_s > self.lost_after_s and not warned:
                    warned = True
                    log.warning(
                        "rank %d has waited %.0f s in %s: %s", self.rank, late_s, self._call, self._found(missing, [])
                    )
                self._stop.wait(_POLL_S)
        finally:
            self._call = ""
        notes = [self._board.note(f"{key}/{rank}") or b"?" for rank in range(self.world_size)]
        stages = [note.decode(errors="replace") for note in notes]
        if len(set(stages)) > 1:
            calls = ", ".join(f"rank {rank} calls {one}" for rank, one in enumerate(stages))
            raise InputError(f"{calls}; all ranks must make the same calls of the trainer, in the same order")

    def _departed(self) -> list[str]:
        """Return a clause for each rank that has left the run in which this one waits; looks once in a heartbeat."""
        if self._looked == self._beats:
            return []
        self._looked = self._beats
        reports = (self._board.read() or {}).items()
        here = self._run_number
        return [report.described(rank) for rank, report in reports if report.left is not None and report.run >= here]

    def _found(self, missing: list[int], lost: list[str]) -> str:
        if lost or self.verdict is not None:
            return "; ".join(lost) or str(self.verdict)
        reports = self._board.read()
        return NO_STORE if reports is None else "; ".join(reports[rank].described(rank) for rank in missing)

    # -- the other ranks -----------------------------------------------------------------------------------------------

    def diagnose(self) -> str:
        """Name the ranks that made an exchange fail; without an earlier finding, wait for three heartbeats.

        Returns:
            The finding of this watchdog, or of another rank's, if there is one, or that the store does not answer.
            Otherwise one clause for each rank that is lost (heartbeat stopped, no farewell), such as ``"rank 2 is lost
            (last seen in epoch 3, exchange 7 (...))"``. If no rank is lost, one clause for each rank that left for a
            reason of its own. If no rank left, one clause for each rank that has finished or is late. Otherwise one
            clause for each rank, with the call in which it waits.
        """
        self._told.set()
        if self.verdict is not None:
            return self.verdict
        before = self._board.read()
        if before is not None and (found := self._told_by(before)):
            self.verdict = found  # that rank has broken the groups
            return found
        # a wait, not a poll: a live rank beats at least twice in this time
        threading.Event().wait(3 * self.beat_s)
        after = self._board.read()
        if before is None or after is None:
            return self.verdict or NO_STORE
        if found := self.verdict or self._told_by(after):
            self.verdict = found
            return found
        lost, left, late, others = [], [], [], []
        for rank, report in after.items():
            if rank == self.rank:
                continue
            if report.left == FINISHED:
                late.append(f"rank {rank} has finished" + (f" {report.place.stage}" if report.place.stage else ""))
            elif report.left is not None and report.left != LOST_A_NEIGHBOUR:
                left.append(f"rank {rank} left: {first_line(report.left)}")
            elif report.left is None and report.beats == before[rank].beats and self._does_nothing(rank, report):
                lost.append(report.lost(rank))
            elif report.left is None and report.place.exchange < self.place.exchange:
                late.append(f"rank {rank} is late, at {report.text}")
            others.append(report.described(rank))
        return "; ".join(lost or left or late or others)

    def signalled(self, signum: int) -> None:
        """Tell the other ranks that a signal ends this rank, and let the call in which the main thread waits fail."""
        reports = self._board.read() or {}
        before = {rank: report for rank, report in reports.items() if rank != self.rank and report.signum}
        cause = self._told_by(before) or ""
        if not cause:
            said = ended_before() or f"{name_of(signum)} reached rank {self.rank} (process {self.process[1]})"
            self.signum, self.signalled_by = signum, said
        self.verdict = self.signalled_by
        self._publish()
        note_cause(cause)  # the main thread, which may end the process, waits for this
        self._give_up(self.signalled_by)

    def _run(self) -> None:
        looked = woke = time.monotonic()
        while not self._stop.wait(self.beat_s):
            slept_s, woke = time.monotonic() - woke, time.monotonic()
            if slept_s > self.beat_s + self.lost_after_s / 4:  # this process was stopped, maybe with all others
                self._heard.clear()
                self._worker, self._connections = self._worker.anew(), self._connections.anew()
            if not self._lives():
                self.close("its process group was destroyed")
                return
            if not self._beat():
                return
            place, late = self._progress.oldest() or (self.place, time.monotonic() - self._since)
            if place.waiting and late > self.warn_after_s and self._warned != place.exchange:
                self._warned = place.exchange
                self._warn(place, late)
            if self.on_lost is None or self.verdict is not None or not self._cares:
                looked = time.monotonic() if not self._cares else looked
            elif time.monotonic() - looked > min(self.lost_after_s / 5, 2 * self.beat_s):
                looked = time.monotonic()
                if found := self._stuck():
                    self._give_up(found)

    @property
    def _cares(self) -> bool:
        """True if this rank needs the others."""
        return self._in_run or self._report.waits or self.place.waiting

    def _guard(self) -> None:
        """Report a store that never answers, as on a machine that froze; the other thread waits for it meanwhile."""
        woke = time.monotonic()
        while not self._stop.wait(self.beat_s):
            slept_s, woke = time.monotonic() - woke, time.monotonic()
            if slept_s > self.beat_s + self.lost_after_s / 4:
                self._board.answered = time.monotonic()
            if not self._cares:
                self._board.answered = max(self._board.answered, time.monotonic() - self.lost_after_s / 2)
            elif time.monotonic() - self._board.answered > self.lost_after_s and self.on_lost is not None:
                self._give_up(NO_STORE)
                return

    def _give_up(self, found: str) -> None:
        """Let the call fail that the main thread waits in; end the process if no exception does."""
        self.verdict = found
        if found != NO_STORE:  # for which the other thread waits
            self._publish()
        if not self.place.waiting and not self.signum:  # an error of torch says that a connection is closed, no more
            log.error("rank %d: %s", self.rank, found)
        self._told.wait(3 * self.beat_s)  # until the others have read it: they lose their connections too
        if self._stop.is_set() or not self._lives():
            return
        if break_groups(unless=self._stop.is_set) and self._told.wait(_LEAVE_S):
            return
        call, _, idle_s = self._worker.look(self.place)
        stuck = self._in_run or ((self.place.waiting or call) and idle_s >= 3 * self.beat_s)
        if stuck and self.on_lost is not None and not self._stop.is_set() and self._lives():
            self._kill_stopped()
            self.on_lost(found)

    def _kill_stopped(self) -> None:
        """Kill the ranks of this machine that are stopped, once they were given up; a launcher then ends the rest."""
        for process in (*self._processes.values(), (machine(), parent())):
            kill_stopped(process)

    def _stuck(self) -> str | None:
        """Return the reason for which this rank waits in vain, if it does."""
        reports = self._board.read()
        if reports is None:
            return None
        if lost := self._silent(reports):
            return "; ".join(lost)
        if found := self._told_by(reports):
            return found
        if (on_gpu := self._progress.oldest()) is not None and on_gpu[1] > self.limit_s:
            others = "; ".join(report.described(rank) for rank, report in reports.items() if rank != self.rank)
            here = f"{on_gpu[0]} has not ended on the GPU of rank {self.rank} for {on_gpu[1]:.0f} s"
            return f"{here} (what it computes before included); {others}"
        reports[self.rank] = self._report
        return deadlock(self.rank, reports, soon_s=3 * self.beat_s, patience_s=0.75 * self.lost_after_s)

    def _told_by(self, reports: dict[int, Report]) -> str | None:
        """Return what another rank of this run has found, or the signal that has ended a rank."""
        for one in reports.values():
            if one.verdict and (one.run == self._run_number or one.signum):
                if one.signum and not self.signum:
                    self.signum, self.signalled_by = one.signum, one.verdict
                return one.verdict
        return None

    def _silent(self, reports: dict[int, Report]) -> list[str]:
        """Return a clause for each rank that fell silent without a farewell."""
        now, lost = time.monotonic(), []
        for rank, report in reports.items():
            beats, since, ticks = self._heard.get(rank, (-1, now, None))
            busy = busy_ticks(report.process[1]) if report.process[0] == machine() else None
            if rank != self.rank and report.beats:
                self._processes[rank] = report.process
            if report.beats != beats or (busy is not None and ticks is not None and busy > ticks):
                # long work may keep the thread of heartbeats from running
                self._heard[rank] = (report.beats, now, busy)
            elif rank == self.rank or not report.beats or report.left is not None:
                continue
            elif now - since > self.lost_after_s * self._patience(report):
                lost.append(report.lost(rank, f"silent for {now - since:.0f} s, "))
        return lost

    def _patience(self, report: Report) -> int:
        """Return the factor on ``lost_after_s``: on another machine a rank's imports and planning may silence it."""
        return 1 if report.place.exchange > 0 or report.process[0] == machine() else 3

    def _does_nothing(self, rank: int, report: Report) -> bool:
        """True if a rank whose heartbeat stopped does not compute, as far as is seen from here."""
        _, _, ticks = self._heard.get(rank, (0, 0.0, None))
        busy = busy_ticks(report.process[1]) if report.process[0] == machine() else None
        return busy is None or ticks is None or busy == ticks

    def _warn(self, place: Place, late_s: float) -> None:
        reports = self._board.read()
        if reports is None:
            return
        others = {rank: report for rank, report in reports.items() if rank != self.rank}
        behind = [
            f"rank {rank} is behind, at {report.text}"
            for rank, report in others.items()
            if report.place.exchange < place.exchange
        ]
        cause = "; ".join(behind or [report.described(rank) for rank, report in others.items()])
        log.warning("rank %d has waited %.0f s in %s; %s", self.rank, late_s, place, cause)
        self._board.write(f"warned/{self.rank}", str(place))  # for launchers and other tools

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def _beat(self) -> bool:
        self._beats += 1
        return self._publish()

    def _publish(self) -> bool:
        place = self.place
        call, line, idle_s = self._worker.look(place)
        if (on_gpu := self._progress.oldest()) is not None:
            place, idle_s = on_gpu  # the host may compute meanwhile, or wait for the GPU at full speed
        self._report = Report(
            beats=self._beats, place=place, run=self._run_number, call=self._call or call, line=line, idle_s=idle_s,
            still_s=self._connections.still_s(), made=tuple(self._made), left=self._left, verdict=self.verdict or "",
            signum=self.signum, process=self.process,
        )  # fmt: skip
        return self._board.post(self._report)
