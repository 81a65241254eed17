"""The README's promises, and those of pages that ``tests/docs`` runs without looking at what they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pygdist.errors import InputError
from pygdist.testing import readme
from tests.docs.pages import ROOT, files

pytestmark = pytest.mark.usefixtures("warm_python")

_README = files((ROOT / "README.md").read_text(encoding="utf-8"))


def _run(folder: Path, shown: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    for name, text in shown.items():
        (folder / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "HOME": str(folder)}
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{command} has not ended after {error.timeout:.0f} s; it said: {error.stderr or b''!r}")


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
    path = tmp_path / "layers.md"
    path.write_text("before\n<!-- generated: norms -->\nstale\n<!-- end -->\nafter\n")
    assert readme.main([str(path)]) == 0
    assert path.read_text() == f"before\n<!-- generated: norms -->\n{readme.norms_list()}\n<!-- end -->\nafter\n"


def test_the_readme_says_how_many_layers_are_supported() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    count = readme.layers_table().count("\n") - 1
    assert f"Tests compare [{count} layers]" in text


@pytest.mark.slow
def test_a_loop_of_ones_own_is_made_faster_by_one_line(tmp_path: Path) -> None:
    ours = "import torch; torch.manual_seed(0)\n" + _README["faster.py"]
    plain, lines = re.subn(r"pygdist\.accelerate\((.*), data\)", r"\1", ours)
    assert lines == 1
    losses = [_run(tmp_path, {}, "-c", code) for code in (ours, plain)]
    assert [one.returncode for one in losses] == [0, 0], losses
    assert float(losses[0].stdout) == pytest.approx(float(losses[1].stdout), rel=1e-5)


@pytest.mark.slow
def test_a_loop_of_ones_own_runs_on_any_number_of_processes(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    for start, count in (([], 1), (torchrun, 3)):
        run = _run(tmp_path, _README, *start, "own_loop.py")
        assert run.returncode == 0, run.stderr
        assert re.fullmatch(rf"loss \d\.\d{{4}}, test accuracy \d\.\d\d on {count} processes\n", run.stdout), run.stdout
        assert (tmp_path / "model.pt").is_file()


@pytest.mark.slow
def test_what_fails_with_pyg_fails_as_shown_and_trains_here(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "from-pyg-lightning.md").read_text(encoding="utf-8")
    shown = re.search(r"^ValueError: .*$", page, re.MULTILINE)
    assert shown is not None
    run = _run(tmp_path, files(page), "today.py")
    assert run.returncode != 0
    assert shown.group() in run.stderr
    run = _run(tmp_path, files(page), "train.py")
    assert run.returncode == 0, run.stderr
    assert "Starting with 2 processes" in run.stderr
