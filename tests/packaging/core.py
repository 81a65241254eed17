"""An environment that holds what ``pip install pygdist`` brings, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required() -> dict[str, metadata.Distribution]:
    """The distributions that pygdist requires without any extra, and all that these require, by their names."""
    waiting, done = [Requirement(text) for text in PROJECT["dependencies"]], set[tuple[str, str]]()
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for extra in ("", *requirement.extras):
            if (name, extra) in done:
                continue
            done.add((name, extra))
            found[name] = metadata.distribution(name)
            others = map(Requirement, found[name].requires or [])
            waiting += [one for one in others if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def make_site(folder: Path) -> Path:
    """Link these distributions into a folder."""
    folder.mkdir()
    for distribution in required().values():
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(str(distribution.locate_file(top)))
    return folder


def run_with(site: Path, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with the packages of ``site`` alone and this checkout."""
    environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-S", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
