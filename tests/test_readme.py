"""The README tells the truth: its lists are those of the suite, and the files that it shows run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pygdist.errors import InputError
from pygdist.testing import readme

pytestmark = pytest.mark.usefixtures("warm_python")

_ROOT = Path(__file__).parents[1]
_TEXT = (_ROOT / "README.md").read_text(encoding="utf-8")
_READMES = [_ROOT / "README.md", *sorted((_ROOT / "experiments").rglob("README.md"))]
_FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", _TEXT, re.DOTALL))


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    for name, text in _FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(_ROOT)]), "HOME": str(folder)}
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{command} has not ended after {error.timeout:.0f} s; it said: {error.stderr or b''!r}")


def test_lists_of_layers_are_those_of_the_suite() -> None:
    assert readme.update(_TEXT) == _TEXT, "the lists are stale; run: python -m pygdist.testing.readme"
    for name in readme.BLOCKS:
        assert f"<!-- generated: {name} -->" in _TEXT


def test_at_least_twenty_layers_and_every_norm() -> None:
    assert readme.layers_table().count("\n") - 1 >= 20
    assert (
        "`SAGEConv` | detached, jk, lstm, many, max, mean, median, min, patches, softmax, uneven |"
        in readme.layers_table()
    )
    assert "`PairNorm` (rows)" in readme.norms_list()
    assert "| `SuperGATConv` | samples negative edges" in readme.refused_table()


def test_an_unknown_block_is_named() -> None:
    with pytest.raises(InputError, match="no generated block 'colours'; use one of layers"):
        readme.update("<!-- generated: colours -->\n<!-- end -->")


def test_main_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- generated: norms -->\nstale\n<!-- end -->\nafter\n")
    assert readme.main([str(path)]) == 0
    assert path.read_text() == f"before\n<!-- generated: norms -->\n{readme.norms_list()}\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("path", _READMES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [path.parent / target for target in re.findall(r"\]\((?!https?://)([^)#]+)", text)]
    folders = "experiments|notebooks|pygdist|recipes|tests"
    targets += [_ROOT / name for name in re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/.-]+\.(?:py|yaml|csv)\b", text)]
    targets += [path.parent / name for name in re.findall(r"(?<![\w/.-])results/[\w.-]+\.(?:csv|png)\b", text)]
    assert [target for target in targets if not target.exists() and target.stem != "NAME"] == []
    titles = re.findall("(?m)^##+ (.*)", text)
    headings = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


@pytest.mark.slow
def test_a_loop_of_ones_own_is_made_faster_by_one_line(tmp_path: Path) -> None:
    ours = "import torch; torch.manual_seed(0)\n" + _FILES["faster.py"]
    plain, lines = re.subn(r"pygdist\.accelerate\((.*), data\)", r"\1", ours)
    assert lines == 1
    losses = [_run(tmp_path, "-c", code) for code in (ours, plain)]
    assert [one.returncode for one in losses] == [0, 0], losses
    assert float(losses[0].stdout) == pytest.approx(float(losses[1].stdout), rel=1e-5)


@pytest.mark.slow
def test_a_loop_of_ones_own_runs_on_any_number_of_processes(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    for start, count in (([], 1), (torchrun, 3)):
        run = _run(tmp_path, *start, "own_loop.py")
        assert run.returncode == 0, run.stderr
        assert re.fullmatch(rf"loss \d\.\d{{4}}, test accuracy \d\.\d\d on {count} processes\n", run.stdout), run.stdout
        assert (tmp_path / "model.pt").is_file()


@pytest.mark.slow
def test_the_python_script_trains(tmp_path: Path) -> None:
    run = _run(tmp_path, "train.py")
    assert run.returncode == 0, run.stderr
    assert "Starting with 2 processes" in run.stderr


@pytest.mark.slow
def test_what_fails_today_fails_as_shown(tmp_path: Path) -> None:
    shown = re.search(r"^ValueError: .*$", _TEXT, re.MULTILINE)
    assert shown is not None
    run = _run(tmp_path, "today.py")
    assert run.returncode != 0
    assert shown.group() in run.stderr


@pytest.mark.slow
def test_the_configuration_is_complete(tmp_path: Path) -> None:
    run = _run(tmp_path, "-m", "pygdist.cli", "fit", "--config", "cora.yaml", "--print_config")
    assert run.returncode == 0, run.stderr
    assert "hidden_channels: 16" in run.stdout


@pytest.mark.slow
def test_the_backends_are_exact_where_they_say_so(tmp_path: Path) -> None:
    run = _run(tmp_path, "-m", "pytest", "-q", "test_mine.py")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_the_partitioner_partitions(tmp_path: Path) -> None:
    command = re.search(r"^pygdist (partition --dataset sbm --method=deal.*)", _TEXT, re.MULTILINE)
    assert command is not None
    run = _run(tmp_path, "-m", "pygdist.cli", *command.group(1).split())
    assert run.returncode == 0, run.stderr
    assert "deal: replication factor" in run.stdout
