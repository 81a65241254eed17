"""The site builds without a warning, and every public name has an entry in it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pygdist
from tests.docs.pages import ROOT

_MISSING = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # a machine that is busy takes ten times as long as one that is not
    pytest.mark.skipif(bool(_MISSING), reason=f"not installed (pip install 'pygdist[docs]'): {', '.join(_MISSING)}"),
]

#: Packages with an ``__all__`` that no user imports from.
_INTERNAL = {"pygdist.hops.cuts", "pygdist.native", "pygdist.report"}


def _command_of_make() -> list[str]:
    """Return what ``make docs`` runs, word by word."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    rule = next(number for number, line in enumerate(makefile) if line.startswith("docs:"))
    return makefile[rule + 1].strip().replace("$(BIN)/python", sys.executable).split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, built = tmp_path_factory.mktemp("site"), ROOT / "build" / "docs"
    if (built / ".doctrees").exists():  # then pages that have not changed since are not built again
        shutil.copytree(built, folder, dirs_exist_ok=True)
    words = [str(folder) if word == "build/docs" else word for word in _command_of_make()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    words += ["-d", str(folder / ".doctrees")]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


def _packages() -> dict[str, list[str]]:
    """Return the public names of each package that users import from."""
    walked = pkgutil.walk_packages(pygdist.__path__, "pygdist.")
    names = ["pygdist", *(one.name for one in walked if one.ispkg)]
    return {
        name: list(module.__all__)
        for name in names
        if name not in _INTERNAL and hasattr(module := importlib.import_module(name), "__all__")
    }


def test_make_docs_is_strict() -> None:
    words = _command_of_make()
    assert {"-n", "-W", "--keep-going"} <= set(words)


def test_every_public_name_has_an_entry(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    entries = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    known = {name for role, names in entries.items() if role.startswith("py:") for name in names}
    wanted = {f"{package}.{name}" for package, names in _packages().items() for name in names}
    assert len(wanted) > 100
    assert sorted(wanted - known) == []


def test_pages_have_types_and_links_to_other_projects(site: Path) -> None:
    page = (site / "reference" / "api" / "loop.html").read_text(encoding="utf-8")
    assert "open_graph" in page
    assert "https://docs.pytorch.org/docs/stable/" in page


def test_names_of_other_projects_are_those_that_pages_use(site: Path) -> None:
    html = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html"))
    for inventory in sorted((ROOT / "docs" / "inventories").glob("*.inv")):
        lines = inventory.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "# Sphinx inventory version 1"
        unused = [name for name in (line.split()[0] for line in lines[3:]) if f'#{name}"' not in html]
        assert unused == [], inventory.name
