"""Kills and restarts of the reliability campaigns: one of each always, more with --exhaustive."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from experiments.reliability import campaign, restarts
from experiments.reliability.campaign import Case, attempt, draw

SHORT = [pytest.param(case, marks=pytest.mark.exhaustive, id=str(case.number)) for case in draw(20, 0)]
ALWAYS = Case(0, "SIGTERM", "1", "training", 0.01, "torchrun", "comm", 2)

RESTARTS = [pytest.param(one, marks=pytest.mark.exhaustive, id=str(one.number)) for one in restarts.draw(0)]
ONE_LOSS = restarts.Losses(0, "restarts", "comm", 2, ("0 2 1 checkpoint 4",))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
@pytest.mark.parametrize("case", [pytest.param(ALWAYS, id="always"), *SHORT])
def test_a_kill_is_survived(case: Case, tmp_path: Path) -> None:
    outcome = attempt(case, tmp_path)
    assert outcome.wrong == "", outcome
    assert outcome.loss == outcome.expected


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
@pytest.mark.parametrize("losses", [pytest.param(ONE_LOSS, id="always"), *RESTARTS])
def test_runs_that_torchrun_starts_again_end_as_unbroken_ones(losses: restarts.Losses, tmp_path: Path) -> None:
    row = restarts.attempt(losses, tmp_path)
    assert row["wrong"] == ""
    assert row["loss"] == row["expected"] or losses.kind == "machines"


def test_cases_cover_what_they_promise() -> None:
    cases = draw(100, 0)
    assert {case.phase for case in cases} == set(campaign.PHASES)
    assert {case.signal for case in cases} == set(campaign.SIGNALS)
    assert {case.system for case in cases} == set(campaign.SYSTEMS)
    assert {(case.phase, case.signal) for case in cases} == {(p, s) for p in campaign.PHASES for s in campaign.SIGNALS}
    assert all(signal.Signals[case.signal] for case in cases)
    assert draw(100, 0) == cases
    assert draw(100, 1) != cases
