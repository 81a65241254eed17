"""Kills and restarts of the reliability campaigns: one of each always, more with --exhaustive."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from experiments.reliability import campaign, links, restarts
from experiments.reliability.campaign import Case, Outcome, attempt, draw, left_behind, what_is_wrong

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


LINE = "pygdist: error: SIGTERM reached rank 1 (process 7)"


@pytest.mark.parametrize(
    ("signal_name", "errors", "wrong"),
    [
        ("SIGTERM", LINE, ""),
        ("SIGTERM", f"rank 1, epoch 3: rank 0 (process 7) was lost\n{LINE}", ""),
        ("SIGTERM", f"{LINE}\n{LINE}", "2 lines of error"),
        ("SIGINT", LINE, "no line names SIGINT"),
        ("SIGTERM", "rank 1 (process 7) was ended by SIGTERM", "0 lines of error"),
        ("SIGTERM", "pygdist: error: rank 1 was lost", "no line names SIGTERM"),
        ("SIGTERM", f"Traceback\n{LINE}", "a traceback"),
        ("SIGKILL", "pygdist: error: rank 1 was lost\npygdist: error: rank 1 was lost", ""),
        ("SIGKILL", "", "nothing said"),
    ],
)
def test_what_a_run_says_is_judged(signal_name: str, errors: str, wrong: str) -> None:
    case = Case(0, signal_name, "1", "training", 0.0, "ordinary", "comm", 2)
    code = {"SIGTERM": 143, "SIGINT": 130}.get(signal_name, 1)
    outcome = Outcome(1.0, code, campaign.told(errors, signal_name), 0)
    assert what_is_wrong(case, outcome, errors, 30.0, "") == wrong


def test_temporary_files_are_told_from_others(tmp_path: Path) -> None:
    left = ["cache/.ab.lock", "cache/.ab.tmp-0", "runs/.last.ckpt.0.partial", "tmp/pygdist-0"]
    for name in (*left, "cache/ab", "runs/last.ckpt", "tmp/torchinductor_0"):
        (tmp_path / name).mkdir(parents=True)
    assert left_behind(tmp_path) == left


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, ""),
        ({"cut": False}, "the run had ended before the cut"),
        ({"ended_s": 2.0}, "the outage held nobody up"),
        ({"loss": "0.2"}, "codes [0, 0], loss 0.2"),
        ({"codes": "0 1"}, "codes [0, 1], loss 0.1"),
        ({"kind": "slow link", "cut": False, "ended_s": 2.0}, ""),
        ({"kind": "slow link", "cut": False, "loss": "0.2"}, "codes [0, 0], loss 0.2"),
        ({"kind": "lost link", "codes": "1 1"}, ""),
        ({"kind": "lost link", "codes": "1 1", "said": ""}, "nothing said"),
        ({"kind": "lost host", "codes": "1 0"}, "exit code 0"),
    ],
)
def test_what_a_link_does_is_judged(changed: dict[str, object], wrong: str) -> None:
    row = {"kind": "outage", "cut": True, "codes": "0 0", "loss": "0.1", "ended_s": 9.0, "said": "rank 1", "waited": 0}
    assert links.wrong({**row, **changed}, "0.1") == wrong
