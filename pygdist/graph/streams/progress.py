"""Progress of long passes over edges or bytes, shown to the user."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console

log = logging.getLogger(__name__)

_WORTH_A_LINE_S = 5.0
_BETWEEN_LINES_S = 30.0

Advance = Callable[[int], None]
"""Called with the number of items that were just processed."""


class Progress:
    """Shows each pass as a bar on a terminal; elsewhere, a pass that takes seconds is shown in log lines.

    Args:
        console: Output for bars; standard error by default.

    Attributes:
        stage: Name shown in front of the passes that follow.
    """

    def __init__(self, console: rich.console.Console | None = None) -> None:
        from pygdist.graph.streams.bars import standard_error  # rich draws random numbers when it is imported

        self.stage = ""
        self._console = console or standard_error()

    def watch(self, total: int, unit: str) -> AbstractContextManager[Advance]:
        """Show one pass over ``total`` items."""
        from pygdist.graph.streams.bars import bar

        return bar(self._console, self.stage, total, unit) if self._console.is_terminal else self._lines(total, unit)

    @contextlib.contextmanager
    def _lines(self, total: int, unit: str) -> Iterator[Advance]:
        start = last_line = time.monotonic()
        done = 0

        def advance(more: int) -> None:
            nonlocal done, last_line
            done += more
            now = time.monotonic()
            if now - last_line > _BETWEEN_LINES_S and done < total:
                last_line = now
                left = (now - start) / done * (total - done)
                log.info(
                    "%s: %.0f%% of %s %s, about %.0f s left", self.stage, 100 * done / total, f"{total:,}", unit, left
                )

        yield advance
        seconds = time.monotonic() - start
        if seconds > _WORTH_A_LINE_S:
            log.info(
                "%s: %s %s in %.1f s, %.1f million/s", self.stage, f"{done:,}", unit, seconds, done / seconds / 1e6
            )


def watched(progress: Progress | None, total: int, unit: str = "edges") -> AbstractContextManager[Advance]:
    """Show a pass, if there is a ``progress``."""
    return contextlib.nullcontext(lambda done: None) if progress is None else progress.watch(total, unit)


def enter_stage(progress: Progress | None, stage: str) -> None:
    """Name the following passes, if there is a ``progress``."""
    if progress is not None:
        progress.stage = stage
