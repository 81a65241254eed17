"""The watchdog knows where every rank is, and names a rank that is late or lost.

A thread of each rank writes a heartbeat with the rank's place (epoch and exchange) into the job's rendezvous store, and
a farewell when the rank leaves on its own account. A rank that waits long reads the others' places and logs who is
behind. A rank whose exchange failed looks for heartbeats that stopped without a farewell: those ranks are lost, and the
other failures follow from that. If none is lost, it names the ranks that left, with the reason, or those that are late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

log = logging.getLogger(__name__)

_NO_STORE = "the rendezvous store does not answer: look at rank 0 (or the launcher), where it ran"
_NOBODY = "no other rank is lost or late: look at the network, and at the first error in the logs of the ranks"
_ANSWER_S = 10.0  # a store that takes longer will not answer
# farewells of ranks that did not cause the failure
FINISHED, LOST_A_NEIGHBOUR = "finished", "lost a neighbour"


@dataclass(frozen=True)
class Place:
    """The place of a rank in its work: the epoch, the number of the exchange since the start, and its label."""

    epoch: int = 0
    exchange: int = 0
    label: str = "before the first exchange"
    waiting: bool = False  # True while the exchange runs

    def __str__(self) -> str:
        return f"epoch {self.epoch}, exchange {self.exchange} ({self.label})"


class Watchdog:
    """Writes the heartbeats of one rank and reads those of the others.

    Args:
        store: The job's key-value store; cloned, so that the heartbeat never blocks other users of it.
        rank: This rank.
        world_size: Number of ranks.
        warn_after_s: Seconds in one exchange after which the log names the late ranks, once per exchange.
        beat_s: Seconds between heartbeats.
        lost_after_s: Seconds of silence after which a rank that has begun its first exchange counts as lost, or the
            store as gone.
        on_lost: Called from a thread of the watchdog, with a text that names lost ranks or says that the store does not
            answer; it should end the process, or it may be called again. It is for losses that close no connection
            (nccl, a machine that froze): the main thread then waits in a call that no exception reaches.
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
    ) -> None:
        self._store = dist.PrefixStore("pygdist-watchdog", store.clone())  # type: ignore[attr-defined]
        self.rank, self.world_size = rank, world_size
        self.warn_after_s, self.beat_s, self.lost_after_s = warn_after_s, beat_s, lost_after_s
        self._on_lost = on_lost
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: its number of heartbeats, and since when
        self.place = Place()
        self._since = time.monotonic()
        self._warned = -1
        self._beats = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()  # the store's connection is shared by the thread and diagnose()
        self._thread = threading.Thread(target=self._run, name="pygdist-watchdog", daemon=True)
        self._answered = time.monotonic()
        self._beat()
        self._thread.start()
        if on_lost is not None:
            threading.Thread(target=self._guard, name="pygdist-store-guard", daemon=True).start()

    def enter(self, epoch: int, label: str) -> None:
        """Note that this rank begins an exchange."""
        self._since = time.monotonic()
        self.place = Place(epoch, self.place.exchange + 1, label, waiting=True)
        if self.place.exchange == 1:
            self._beat()  # from now on the others take silence for a loss

    def leave(self) -> None:
        """Note that the exchange is over."""
        self.place = replace(self.place, waiting=False)

    def close(self, farewell: str = FINISHED) -> None:
        """Stop the heartbeat and tell the others that this rank left on its own account.

        Args:
            farewell: The reason. ``"finished"`` is the usual end; ``"lost a neighbour"`` says that another rank is
                lost, so the others look for that one.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=_ANSWER_S)
        if not self._thread.is_alive():  # otherwise it waits for a store that froze
            self._ask(self._store.set, f"left/{self.rank}", farewell)

    def diagnose(self) -> str:
        """Name the ranks that made an exchange fail; waits for three heartbeats.

        Returns:
            One clause for each rank that is lost (heartbeat stopped, no farewell), such as ``"rank 2 is lost (last
            seen in epoch 3, exchange 7 (...))"``. If none is lost: one for each rank that left for a reason of its own.
            If none left: one for each rank that has finished or is late. Otherwise a clause that says where to look.
        """
        before = self._read_all()
        # a wait, not a poll: a live rank beats at least twice in this time
        threading.Event().wait(3 * self.beat_s)
        after = self._read_all()
        if before is None or after is None:
            return _NO_STORE
        lost, left, late = [], [], []
        for rank, (beats, text, exchange) in enumerate(after):
            if rank == self.rank:
                continue
            farewell = self._farewell(rank)
            if farewell == FINISHED:
                late.append(f"rank {rank} has finished")
            elif farewell is not None and farewell != LOST_A_NEIGHBOUR:
                left.append(f"rank {rank} left: {farewell}")
            elif farewell is None and beats == before[rank][0]:
                lost.append(f"rank {rank} is lost (last seen in {text})")
            elif farewell is None and exchange < self.place.exchange:
                late.append(f"rank {rank} is late, at {text}")
        return "; ".join(lost or left or late) or _NOBODY

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self.beat_s):
            if not self._beat():
                return  # the store is gone for good, and each further try would print a warning of torch
            place = self.place
            late = time.monotonic() - self._since
            if place.waiting and late > self.warn_after_s and self._warned != place.exchange:
                self._warned = place.exchange
                self._warn(place, late)
            if self._on_lost is not None and time.monotonic() - looked > self.lost_after_s / 5:
                looked = time.monotonic()
                if lost := self._silent():
                    self._on_lost("; ".join(lost))
                    return

    def _guard(self) -> None:
        """Report a store that never answers, as on a machine that froze; the other thread waits for it meanwhile."""
        while not self._stop.wait(self.beat_s):
            if time.monotonic() - self._answered > self.lost_after_s and self._on_lost is not None:
                self._on_lost(_NO_STORE)
                return

    def _silent(self) -> list[str]:
        """Return a clause for each rank that has begun its first exchange and fell silent without a farewell."""
        now, lost = time.monotonic(), []
        for rank, (beats, text, exchange) in enumerate(self._read_all() or ()):
            last_beats, since = self._heard.get(rank, (-1, now))
            if beats != last_beats:
                self._heard[rank] = (beats, now)
            elif rank != self.rank and exchange and now - since > self.lost_after_s and self._farewell(rank) is None:
                lost.append(f"rank {rank} is lost (silent for {now - since:.0f} s, last seen in {text})")
        return lost

    def _warn(self, place: Place, late_s: float) -> None:
        places = self._read_all()
        if places is None:
            return
        behind = [
            f"rank {rank} is behind, at {text}"
            for rank, (_, text, exchange) in enumerate(places)
            if rank != self.rank and exchange < place.exchange
        ]
        cause = "; ".join(behind) or "no rank is behind, so the network or a slow transfer is the cause"
        log.warning("rank %d has waited %.0f s in %s; %s", self.rank, late_s, place, cause)
        self._ask(self._store.set, f"warned/{self.rank}", str(place))  # for launchers and other tools

    def _beat(self) -> bool:
        self._beats += 1
        place, key = self.place, f"beat/{self.rank}"
        self._ask(self._store.set, key, f"{self._beats}|{place.exchange}|{place}")
        answered, _ = self._ask(self._store.check, [key])  # set() does not wait for an answer
        if answered:
            self._answered = time.monotonic()
        return answered

    def _read_all(self) -> list[tuple[int, str, int]] | None:
        """Return (beats, place, exchange) of every rank; ``None`` if the store no longer answers."""
        places = []
        for rank in range(self.world_size):
            answered, exists = self._ask(self._store.check, [f"beat/{rank}"])
            raw = b"0|0|an unknown place (it has not reported yet)"
            if exists:  # get() of a missing key would block
                answered, raw = self._ask(self._store.get, f"beat/{rank}")
            if not answered:
                return None
            beats, exchange, text = raw.decode().split("|", 2)
            places.append((int(beats), text, int(exchange)))
        return places

    def _farewell(self, rank: int) -> str | None:
        """Return the first line of a rank's farewell; ``None`` if there is none."""
        if not self._ask(self._store.check, [f"left/{rank}"])[1]:
            return None
        raw = self._ask(self._store.get, f"left/{rank}")[1] or b""
        return (raw.decode().splitlines() or ["no reason given"])[0]

    def _ask(self, call: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
        """Return (True, result), or (False, None) if the store does not answer: then its host may be gone."""
        with self._lock:
            try:
                return True, call(*args)
            except RuntimeError as error:
                log.debug("the rendezvous store does not answer: %s", error)
                return False, None
