"""What people see while edges stream: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from rich.console import Console

from pygdist.graph import EdgeStream, Progress
from pygdist.graph.streams import progress as progress_module

EDGES = np.zeros((2, 100), dtype=np.int64)


def test_a_bar_on_a_terminal() -> None:
    text = io.StringIO()
    progress = Progress(Console(file=text, force_terminal=True, width=120))
    progress.stage = "spring"
    stream = EdgeStream(EDGES, num_nodes=1, chunk_edges=10, progress=progress)
    assert sum(chunk.shape[1] for chunk in stream.chunks()) == 100
    assert "spring" in text.getvalue()
    assert "million edges/s" in text.getvalue()


def test_lines_elsewhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = iter(range(0, 4000, 20))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: float(next(clock)))
    progress = Progress(Console(file=io.StringIO(), force_terminal=False))
    progress.stage = "spring"
    with caplog.at_level(logging.INFO):
        list(EdgeStream(EDGES, num_nodes=1, chunk_edges=25, progress=progress).chunks())
    said = [record.message for record in caplog.records]
    assert said == ["spring: 50% of 100 edges, about 40 s left", "spring: 100 edges in 100.0 s, 0.0 million/s"]


def test_short_passes_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(Console(file=io.StringIO(), force_terminal=False))
    with caplog.at_level(logging.INFO):
        list(EdgeStream(EDGES, num_nodes=1, progress=progress).chunks())
    assert not caplog.records
