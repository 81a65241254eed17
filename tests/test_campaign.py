"""Kills and restarts of the reliability campaigns: one of each always, more with --exhaustive."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

from experiments.reliability import campaign, links, restarts
from experiments.reliability.campaign import Case, Outcome, Run, attempt, draw, left_behind, what_is_wrong

SHORT = [pytest.param(case, marks=pytest.mark.exhaustive, id=str(case.number)) for case in draw(20, 0)]
ALWAYS = Case(0, "SIGKILL", "0", "training", 0.01, "torchrun", "comm", 2)

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
    assert {case.who for case in cases if case.launcher == "torchrun"} >= {"starter", "all", "0", "1"}
    assert draw(100, 0) == cases
    assert draw(100, 1) != cases


STORE = "pygdist: error: rank 0 waits: the rendezvous store does not answer: look at rank 0 (or the launcher)"
LINE = "pygdist: error: SIGTERM reached rank 1 (process 7)"
BEFORE = "pygdist: error: rank 1 (process 7) had ended before torchrun's SIGTERM reached rank 0 (process 6)"
SUMMARY = "  rank      : 1 (local_rank: 1)\n  exitcode  : {} (pid: 7)"


def _case(signal_name: str, launcher: str = "ordinary", who: str = "1", phase: str = "training") -> Case:
    return Case(0, signal_name, who, phase, 0.0, launcher, "comm", 2)


@pytest.mark.parametrize(
    ("case", "errors", "wrong"),
    [
        (_case("SIGTERM"), LINE, ""),
        (_case("SIGTERM"), f"rank 1, epoch 3: rank 0 (process 7) was lost\n{LINE}", ""),
        (_case("SIGTERM"), f"{LINE}\n{LINE}", "2 lines of error"),
        (_case("SIGTERM", who="starter"), LINE, "the line does not name what happened"),
        (_case("SIGINT"), LINE, "the line does not name what happened"),
        (_case("SIGTERM"), "rank 1 (process 7) was ended by SIGTERM", "0 lines of error"),
        (_case("SIGTERM"), "pygdist: error: rank 1 was lost", "the line does not name what happened"),
        (_case("SIGTERM"), f"Traceback\n{LINE}", "a traceback"),
        (_case("SIGKILL"), "pygdist: error: rank 1 was lost\npygdist: error: rank 1 was lost", ""),
        (_case("SIGKILL"), "pygdist: error: rank 0 was lost", "nothing said"),
        (_case("SIGKILL"), LINE, "nothing said"),
        (_case("SIGKILL"), "", "nothing said"),
        (_case("SIGKILL", "torchrun"), f"{BEFORE}\n{SUMMARY.format(-9)}", ""),
        (_case("SIGKILL", "torchrun"), BEFORE, "torchrun's summary does not name rank 1"),
        (_case("SIGKILL", "torchrun"), f"{BEFORE}\n{BEFORE}\n{SUMMARY.format(-9)}", "2 lines of error"),
        (_case("SIGKILL", "torchrun"), f"{LINE}\n{SUMMARY.format(-9)}", "the line does not name what happened"),
        (_case("SIGTERM", "torchrun"), f"{LINE}\n{STORE}\n{SUMMARY.format(143)}", ""),
        (_case("SIGTERM"), f"{LINE}\n{STORE}", "2 lines of error"),
        (_case("SIGKILL", "torchrun", phase="import"), SUMMARY.format(-9), ""),
        (_case("SIGKILL", "torchrun"), SUMMARY.format(-9), "0 lines of error; nothing said"),
        (_case("SIGTERM", "torchrun"), f"Traceback\n{LINE}\n{SUMMARY.format(143)}", ""),
        (_case("SIGTERM", "torchrun"), f'File "a/pygdist/b.py"\n{LINE}\n{SUMMARY.format(143)}', "a traceback"),
        (_case("SIGTERM", "torchrun"), f"{LINE}\n{SUMMARY.format(1)}", "torchrun's summary does not name rank 1"),
    ],
)
def test_what_a_run_says_is_judged(case: Case, errors: str, wrong: str) -> None:
    code = {"SIGTERM": 143, "SIGINT": 130}.get(case.signal, 1) if case.launcher == "ordinary" else 1
    outcome = Outcome(1.0, code, campaign.told(errors, case), 0)
    found = what_is_wrong(case, outcome, errors, 30.0, "")
    assert found.startswith(wrong) if wrong else found == "", found


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell script that runs in place of pygdist; it is empty."""
    script = tmp_path / "program"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return script


@pytest.mark.parametrize("who", ["starter", "all", "1"])
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
def test_a_run_that_ends_before_the_signal_is_not_survived(who: str, program: Path, tmp_path: Path) -> None:
    marks = f'echo test > "${campaign.MARKS}/0"; echo test > "${campaign.MARKS}/1"'
    program.write_text(f"#!/bin/sh\n{marks}; sleep 0.3; echo '`Trainer.fit` stopped' >&2\n")
    outcome = attempt(Case(0, "SIGTERM", who, "test", 0.8, "ordinary", "comm", 2), tmp_path)
    assert outcome.code == 0
    assert outcome.wrong == "the run had ended before the signal: `Trainer.fit` stopped\n"


@pytest.mark.parametrize("who", ["starter", "all", "1"])
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
def test_a_signal_tells_if_it_was_delivered(who: str, program: Path, tmp_path: Path) -> None:
    program.write_text("#!/bin/sh\nRANK=1 sleep 60 &\nwait\n")
    run = Run(_case("SIGKILL", who=who), tmp_path, "fit")
    assert run.send()
    assert run.wait(0.5)[1] == (0 if who == "1" else -signal.SIGKILL)
    assert not run.send()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes")
def test_a_process_that_ends_before_it_is_killed_is_not_left(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Run(_case("SIGTERM"), tmp_path, "fit")
    gone.process.wait()
    monkeypatch.setattr(gone, "pids", lambda: {"1": gone.process.pid})
    assert gone.wait(0.0)[1:] == (0, 0)


def test_temporary_files_are_told_from_others(tmp_path: Path) -> None:
    left = ["cache/.ab.lock", "cache/.ab.tmp-0", "runs/.last.ckpt.0.partial", "tmp/pygdist-0"]
    for name in (*left, "cache/ab", "runs/last.ckpt", "tmp/torchinductor_0"):
        (tmp_path / name).mkdir(parents=True)
    assert left_behind(tmp_path) == left


@pytest.mark.parametrize("said", ["rank 0: the exchange failed; rank 2 is lost (silent for 20 s)", STORE])
def test_hosts_name_any_rank_or_the_store(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [mock.Mock(host=host, code=1, err=f"rank 0 waits\n{said}", waited=False) for host in range(links.HOSTS)]
    cluster = mock.MagicMock()
    cluster.__enter__.return_value.run.return_value = ends
    monkeypatch.setattr(links, "Cluster", lambda *_, **__: cluster)
    assert links.attempt("slow link", 0, tmp_path)["said"] == said


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
