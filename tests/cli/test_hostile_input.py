"""Malformed options, files and arguments end in one line; all of them: ``python -m experiments.reliability.inputs``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.reliability import inputs
from experiments.reliability.malformed.case import write_template
from experiments.reliability.malformed.checkpoints import TRAIN
from pygdist.cli import main
from pygdist.errors import InputError
from pygdist.lightning import GraphDataModule
from tests.cli.commands import pygdist

_GROUPS = 6
# stores and files of YAML have tests of their own, without a process for each
_ELSEWHERE = ("meta.json", "forged array", "forged replicas")
# those that begin in the process itself, and those of libraries that are imported by then, need a new process
_ALONE = ("folder that is gone", "stream", "variable")
CASES = [case for case in inputs.cases() if case.kind not in (*_ELSEWHERE, *_ALONE)][::16]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template") / "run"
    write_template(folder)
    assert pygdist(*TRAIN, folder=folder).code == 0
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
        shutil.copytree(template, folder, symlinks=True)
        case.prepare(folder)
        ended = pygdist(*case.arguments, folder=folder, env=case.environment)
        if problem := inputs.Outcome(ended.code, ended.err).problem(case):
            problems.append(f"{case.kind}: {case.name}: {problem}")
        assert not (folder / "OWNED").exists(), case.name
        shutil.rmtree(folder)
    assert not problems, "\n".join(problems)


def test_a_rank_that_is_no_number_is_told(template: Path) -> None:
    for command in (("fit", "--config=run.yaml"), ("partition", "--dataset=nosuch")):
        ended = pygdist(*command, folder=template, env={"RANK": "abc"})
        assert ended.code == 2
        assert ended.err.count("pygdist: error: ") == 1


def test_a_current_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["partition", "--dataset=sbm"]) == 2
    assert capsys.readouterr().err.startswith("pygdist: error: the current folder: No such file or directory; change")


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">&-", 0, ""),
        ("<&- >&-", 0, ""),
        (
            ">/dev/full",
            2,
            "pygdist: error: No space left on device; make room there, or choose another folder\n",
        ),
        ("| true", 141, ""),
    ],
)
def test_standard_output_that_takes_nothing(redirection: str, code: int, said: str) -> None:
    # the reader of the pipe is gone before anything is written
    late = "sleep 0.5; " if redirection == "| true" else ""
    command = f"{{ {late}{sys.executable} -m pygdist.cli --help; echo $? >&3; }} 3>&2 {redirection}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stderr == f"{said}{code}\n"


def test_a_stray_local_rank_is_told(template: Path) -> None:
    ended = pygdist("fit", "--config=run.yaml", folder=template, env={"LOCAL_RANK": "9"})
    assert ended.code == 2
    assert "pygdist: error: the environment variable LOCAL_RANK is 9, so this process would be one of" in ended.err


def test_a_user_without_a_home_is_told_which_option_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    with pytest.raises(
        InputError, match=r"cache_dir: ~/.cache/pygdist is in the home folder, but there is none; set HOME"
    ):
        GraphDataModule("sbm")


def test_a_path_that_is_too_long_is_named(tmp_path: Path, template: Path) -> None:
    ended = pygdist("partition", "--dataset=sbm", f"--out={'x' * 5000}", folder=tmp_path)
    assert ended.code == 2
    assert len(ended.err.splitlines()[-1]) < 700
    ended = pygdist("fit", "--config=run.yaml", f"--data.store={'x' * 5000}", folder=template)
    assert ended.code == 2
    assert "File name too long; choose another path" in ended.err
