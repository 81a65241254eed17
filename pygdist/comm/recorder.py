"""Records when a rank packs, sends and waits, as spans on a monotonic clock, for timelines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """One activity of a rank.

    Attributes:
        kind: ``pack``, ``send``, ``wait``, ``aggregate``, ``unpack``, ``reduce``, or a caller's own: one at a time.
            ``travel`` is an exchange from its beginning to its end.
        label: The exchange that it belongs to.
        start, end: Nanoseconds on this machine's monotonic clock.
        aside: True if the rank's main thread did something else meanwhile, or may have.
        busy: Nanoseconds of processor time of the thread; less than ``end - start`` if the thread waited or another
            one had the core.
    """

    kind: str
    label: str
    start: int
    end: int
    aside: bool = False
    busy: int = 0


@dataclass
class Recorder:
    """Spans in the order in which they ended; as ``communicator.recorder`` it gets those of exchanges."""

    spans: list[Span] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, kind: str, label: str = "", *, aside: bool = False) -> Iterator[None]:
        """Record the block as one span."""
        start, busy = time.monotonic_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            busy = time.thread_time_ns() - busy
            self.spans.append(Span(kind, label, start, time.monotonic_ns(), aside, busy))


def recorded(
    recorder: Recorder | None, kind: str, label: str = "", *, aside: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Record the block as one span, if there is a recorder."""
    return contextlib.nullcontext() if recorder is None else recorder.span(kind, label, aside=aside)
