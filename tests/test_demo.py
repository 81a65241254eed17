"""The demo on a graph that takes no time: what it measures is right, and it says so when losses differ."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from pygdist import demo


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_three_runs_agree_and_the_table_says_it() -> None:
    text = io.StringIO()
    pyg, one, many = demo.compare(Console(file=text, width=100), nodes=400, epochs=4, ranks=2, seed=0)
    assert len(pyg.losses) == len(one.losses) == len(many.losses) == 4
    assert pyg.losses[0] != pyg.losses[-1], "it trained"
    for run in (one, many):
        assert demo.largest_difference(run, pyg) < 1e-5
        assert run.accuracy == pytest.approx(pyg.accuracy, abs=1e-6)
    assert (pyg.sent_bytes, one.sent_bytes) == (0, 0)
    assert many.sent_bytes > 0
    table = text.getvalue()
    assert f"{many.sent_bytes:,}" in table
    assert f"{many.losses[-1]:.7f}" in table


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_the_pages_that_show_the_demo_show_what_it_sends() -> None:
    *_, many = demo.compare(Console(file=io.StringIO()), nodes=20_000, epochs=2, ranks=2, seed=0)
    for page in ("README.md", "docs/reference/demo.md"):
        assert f"{many.sent_bytes:,} " in (Path(__file__).parents[1] / page).read_text(), page


@pytest.mark.parametrize(("shift", "code"), [pytest.param(0.0, 0, id="equal"), pytest.param(0.1, 1, id="different")])
def test_exit_code_says_whether_losses_agree(monkeypatch: pytest.MonkeyPatch, shift: float, code: int) -> None:
    run = demo.Run(losses=[2.0, 1.0], accuracy=0.5, epoch_s=[0.1, 0.1], peak_gib=1.0, threads=1)
    other = dataclasses.replace(run, losses=[2.0, 1.0 + shift])
    monkeypatch.setattr(demo, "compare", lambda *_, **__: (run, run, other))
    assert demo.main(["--epochs", "2"]) == code
