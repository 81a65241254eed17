"""Records the spans of time in which a rank packs, sends and waits, on a monotonic clock, for timelines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """One activity of a rank.

    Attributes:
        kind: Name of the activity: ``pack``, ``send``, ``wait``, ``aggregate``, ``unpack``, ``reduce``, or a caller's
            own name; on one thread these do not overlap. ``travel`` is the time that an exchange takes; in ring order
            each message has a ``travel`` span of its own.
        label: The exchange to which the span belongs.
        start, end: Nanoseconds on this machine's monotonic clock.
        aside: True if the rank's main thread did, or could do, other work during the span.
        busy: Nanoseconds of processor time of the thread; less than ``end - start`` if the thread waited or another
            thread had the core.
    """

    kind: str
    label: str
    start: int
    end: int
    aside: bool = False
    busy: int = 0


@dataclass
class Recorder:
    """A list of spans, in the order in which they ended. Set it as ``communicator.recorder`` to record exchanges."""

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
