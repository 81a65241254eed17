"""Malformed options, files and arguments end in one line; all of them: ``python -m experiments.reliability.inputs``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.reliability import inputs
from tests.cli.commands import pygdist

_GROUPS = 6
# stores and files of YAML have tests of their own, without a process for each
CASES = [case for case in inputs.cases() if case.kind not in ("meta.json", "forged array", "forged replicas")][::12]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "run"
    inputs.write_template(folder)
    return folder


def test_there_are_enough() -> None:
    cases = inputs.cases()
    assert len(cases) > 500
    assert len({(case.kind, case.name, case.arguments) for case in cases}) > 500
    assert [case.name for case in inputs.cases(3)] == [case.name for case in inputs.cases(3)]


@pytest.mark.slow
@pytest.mark.parametrize("group", range(_GROUPS))
def test_one_line_says_what_is_wrong(group: int, template: Path, tmp_path: Path) -> None:
    problems = []
    for case in CASES[group::_GROUPS]:
        folder = tmp_path / "run"
        shutil.copytree(template, folder)
        case.prepare(folder)
        ended = pygdist(*case.arguments, folder=folder)
        if problem := inputs.Outcome(ended.code, ended.err, 0.0, 0).problem(case):
            problems.append(f"{case.kind}: {case.name}: {problem}")
        assert not (folder / "OWNED").exists(), case.name
        shutil.rmtree(folder)
    assert not problems, "\n".join(problems)


def test_a_path_that_is_too_long_is_named(tmp_path: Path, template: Path) -> None:
    ended = pygdist("partition", "--dataset=sbm", f"--out={'x' * 5000}", folder=tmp_path)
    assert ended.code == 2
    assert len(ended.err.splitlines()[-1]) < 700
    ended = pygdist("fit", "--config=run.yaml", f"--data.store={'x' * 5000}", folder=template)
    assert ended.code == 2
    assert "File name too long; choose another path" in ended.err
