"""Bars of progress on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text
from typing_extensions import override


def standard_error() -> Console:
    """Return the console on standard error."""
    return Console(stderr=True)


@contextlib.contextmanager
def bar(console: Console, stage: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show one pass over ``total`` items; yields a function that takes the number of items just processed."""
    columns = (TextColumn("{task.description}"), BarColumn(), _Rate(unit), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(stage, total=total)
        yield lambda done: bars.advance(task, done)


class _Rate(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    @override
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed / 1e6:.1f} million {self._unit}/s", style="progress.data.speed")
