"""The package of the page on plug-ins, installed as pip leaves it, works on the command line as the page says."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

import pygdist as package
from tests.cli.commands import assert_mistake, pygdist
from tests.packages import write_metadata

_PAGE = (Path(package.__file__).parents[1] / "docs" / "how-to" / "plug-ins.md").read_text(encoding="utf-8")
_FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```\n", _PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the page's package and its metadata, and a package that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    project = tomllib.loads(_FILES["pyproject.toml"])["project"]
    write_metadata(folder, project["name"], project["entry-points"], project["version"])
    (folder / "broken_extras.py").write_text("raise RuntimeError('no luck')\n")
    write_metadata(folder, "broken-extras", {"pygdist.backends": {"broken": "broken_extras:Nothing"}})
    return folder


def _commands() -> list[list[str]]:
    """The commands of the page, without ``pip`` and without the word ``pygdist``."""
    text = "".join(re.findall(r"```console\n(.*?)```", _PAGE, re.DOTALL)).replace("\\\n", " ")
    return [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("$ pygdist ")]


@pytest.mark.slow
def test_the_commands_of_the_page(site: Path, tmp_path: Path) -> None:
    outcomes = [pygdist(*args, folder=tmp_path, env={"PYTHONPATH": str(site)}) for args in _commands()]
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], [outcome.err for outcome in outcomes]
    listed, parts, _ = outcomes
    for name in ("rounded", "deal", "ring", "broken"):
        assert re.search(rf"\b{name}\b", listed.out)
    assert "deal: replication factor" in parts.out
    helped = pygdist("partition", "--help", folder=tmp_path, env={"PYTHONPATH": str(site)}).out
    assert "Installed packages offer deal." in " ".join(helped.split())
    assert "Installed packages offer ring." in " ".join(helped.split())
    assert np.load(tmp_path / "parts" / "part_0" / "n_id.npy")[:3].tolist() == [0, 2, 4]
    saved = (tmp_path / "runs" / "version_0" / "config.yaml").read_text()
    for line in ("class_path: graph_extras.partitioner.DealPartitioner", "at_a_time: 5", "overlap: false"):
        assert line in saved
    assert "class_path: graph_extras.backend.RoundedBackend" in saved


@pytest.mark.slow
def test_a_package_that_fails_is_named_if_it_is_asked_for(site: Path, folder: Path) -> None:
    env = {"PYTHONPATH": str(site)}
    for more in ([], ["--model.backend.overlap=false"]):
        outcome = pygdist("fit", "--config=run.yaml", "--model.backend=broken", *more, folder=folder, env=env)
        assert_mistake(outcome, "backend 'broken': broken_extras:Nothing of the package broken-extras", "no luck")
