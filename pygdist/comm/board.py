"""The ranks' reports in the job's rendezvous store: each rank posts its own, and reads those of the others."""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pygdist.comm.places import Report

log = logging.getLogger(__name__)

ANSWER_S = 10.0  # a store that takes longer will not answer


class Board:
    """The reports of all ranks.

    Once the store has failed to answer, it counts as gone: torch would print a warning for each further try.

    Args:
        store: The job's key-value store; cloned, so that no other user of it is blocked.
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("pygdist-watchdog", store.clone())  # type: ignore[attr-defined]
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self._file = Path(store.path) if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]
        if self._file is not None:  # a store of another kind may be slow, and answers in the end
            self._store.set_timeout(datetime.timedelta(seconds=ANSWER_S))
        self._was_there = False
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()  # threads share the connection
        self.is_gone, self.answered = False, time.monotonic()

    def post(self, report: Report) -> bool:
        """Write this rank's report; ``False`` if the store does not answer."""
        self._ask(self._store.set, self._key(self._rank), report.encoded())
        answered, _ = self._ask(self._store.check, [self._key(self._rank)])  # set() does not wait for an answer
        if answered:
            self.answered = time.monotonic()
        return answered

    def read(self) -> dict[int, Report] | None:
        """Return the report of every rank; ``None`` if the store no longer answers."""
        reports = {}
        for rank in range(self._world_size):
            raw = self.note(self._key(rank))
            if raw is None:
                return None
            reports[rank] = Report.decoded(raw) if raw else Report()
        return reports

    def write(self, key: str, text: str) -> None:
        """Write a note under the key ``key``."""
        self._ask(self._store.set, key, text)

    def note(self, key: str) -> bytes | None:
        """Return the note under ``key``, empty if there is none; ``None`` if the store does not answer."""
        answered, exists = self._ask(self._store.check, [key])
        raw = b""
        if exists:  # get() of a missing key would block
            answered, raw = self._ask(self._store.get, key)
        return raw if answered else None

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _ask(self, call: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
        """Return (True, result), or (False, None) if the store does not answer: then its host may be gone."""
        if self.is_gone or not self._lock.acquire(timeout=ANSWER_S):  # another thread waits for an answer
            return False, None
        try:
            if self._was_there and self._file is not None and not self._file.exists():
                raise RuntimeError(f"{self._file} was removed")  # torch would wait for it to come back
            result = call(*args)
            self._was_there = True
            return True, result
        except RuntimeError as error:
            log.debug("the rendezvous store does not answer: %s", error)
            self.is_gone = True
            return False, None
        finally:
            self._lock.release()
