"""The front door is light: help, mistakes and reports need neither torch nor PyG nor Lightning; names come on use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pygdist
from pygdist import cli

ROOT = Path(pygdist.__file__).parents[1]

# in one interpreter, in this order: what is light, then a name that is not
LIGHT = """
import contextlib, io, sys

HEAVY = {"torch", "torch_geometric", "lightning", "pytorch_lightning", "torchmetrics"}


def check(after):
    assert not HEAVY & sys.modules.keys(), f"{after} imports {sorted(HEAVY & sys.modules.keys())}"


def command(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    check(f"pygdist {' '.join(arguments)}")
    return code, out.getvalue(), err.getvalue()


import pygdist

check("import pygdist")
assert set(pygdist.__all__) <= set(dir(pygdist)) >= {"__version__", "graph", "lightning"}
assert pygdist.__version__ == "9.8.7", "the version is that of the metadata"
assert not hasattr(pygdist, "NodeClasifier") and not hasattr(pygdist, "__wrapped__")
assert issubclass(pygdist.InputError, ValueError)
check("the errors")

from pygdist.cli import main

code, text, _ = command("--help")
assert code == 0 and text.startswith("Train unmodified PyTorch Geometric models")
assert command() == command("-h") == command("help") == (0, text, "")
assert command("--version") == (0, "pygdist 9.8.7\\n", "")
code, _, err = command("fti")
assert code == 2 and err.startswith("pygdist: error: unknown command 'fti'; did you mean 'fit'? The commands are fit, ")
assert "did you mean" not in command("zzz")[2]
for name in ("generate", "partition", "report"):
    code, text, _ = command(name, "--help")
    assert code == 0 and text.startswith(f"usage: pygdist {name} "), text
assert command("generate", "reddit-like", "--scale=big")[0] == 2
assert command("partition", "--parts=two")[0] == 2
with open("table.csv", "w") as file:
    file.write("a,b\\n1,2\\n")
with open("table.yaml", "w") as file:
    file.write("title: T\\npaper: P\\nplots: [{title: t, kind: bar, x: a, y: b}]\\n")
assert command("report", ".", "-o", "report.html")[0] == 0
with open("report.html") as file:
    assert "plotly" in file.read().lower()

pygdist.NodeClassifier
from lightning.pytorch.strategies import StrategyRegistry

assert {"graph_ddp", "model_averaging"} <= set(StrategyRegistry), "a name that trains registers the strategies"
"""

AFTER_LIGHTNING = """
from lightning.pytorch.strategies import StrategyRegistry

import pygdist

assert {"graph_ddp", "graph_ddp_notebook", "model_averaging"} <= set(StrategyRegistry)
"""


def _run(script: str, folder: Path) -> None:
    metadata = folder / "site" / "pygdist-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: pygdist\nVersion: 9.8.7\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(metadata.parents[1]), str(ROOT)])}
    outcome = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_a_name_is_used(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the report needs plotly: pip install 'pygdist[report]'")
    _run(LIGHT, tmp_path)


@pytest.mark.slow
def test_strategies_are_registered_where_lightning_comes_first(tmp_path: Path) -> None:
    _run(AFTER_LIGHTNING, tmp_path)


def test_every_name_resolves_to_what_its_module_exports() -> None:
    listed = [name for names in pygdist._MODULES.values() for name in names]
    assert sorted(listed) == sorted(pygdist.__all__)
    for module, names in pygdist._MODULES.items():
        room = getattr(pygdist, module)
        for name in names:
            assert getattr(pygdist, name) is getattr(room, name)
            assert name in vars(room)
    assert set(pygdist.__all__) < set(dir(pygdist))
    assert pygdist.graph.load_graph is not None


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pygdist' has no attribute 'NodeClasifier'"):
        _ = pygdist.NodeClasifier  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Nope' from 'pygdist'"):
        exec("from pygdist import Nope")


def test_the_version_without_metadata_is_no_invented_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(vars(pygdist), "__version__", raising=False)
    assert pygdist.__version__ == "0+unknown"
    monkeypatch.delitem(vars(pygdist), "__version__")


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli._COMMANDS)
    assert all(len(line) <= 120 for line in text.splitlines())
