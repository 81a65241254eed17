"""When a rank packed, sent and waited: spans on a monotonic clock, for pictures of where time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Recorder", "Span", "recorded"]


@dataclass(frozen=True)
class Span:
    """Something that a rank did.

    Attributes:
        kind: ``pack``, ``send``, ``wait``, ``aggregate``, ``unpack``, ``reduce``, or what a caller adds; these follow
            one another. ``travel`` is an exchange from its beginning to its end.
        label: Of which exchange.
        start: Nanoseconds on this machine's monotonic clock.
        end: The same.
        aside: Whether the rank's main thread did something else meanwhile, or may have.
        busy: Nanoseconds of processor time of the thread that it was in; less than what passed where the thread waited,
            or others had the core.
    """

    kind: str
    label: str
    start: int
    end: int
    aside: bool = False
    busy: int = 0


@dataclass
class Recorder:
    """Collects spans; a :class:`~pygdist.comm.Communicator` that is given one fills it.

    Attributes:
        spans: In the order in which they ended.
    """

    spans: list[Span] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, kind: str, label: str = "", *, aside: bool = False) -> Iterator[None]:
        """Record what happens inside the block."""
        start, busy = time.monotonic_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            busy = time.thread_time_ns() - busy
            self.spans.append(Span(kind, label, start, time.monotonic_ns(), aside, busy))


def recorded(
    recorder: Recorder | None, kind: str, label: str = "", *, aside: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Record what happens inside the block, if somebody collects."""
    return contextlib.nullcontext() if recorder is None else recorder.span(kind, label, aside=aside)
