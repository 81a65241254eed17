"""Packages that offer plug-ins, installed for a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_metadata(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]], version: str = "1.0") -> None:
    """Write the metadata of a package as pip leaves it.

    Args:
        folder: A folder of ``sys.path``.
        package: The name of the package.
        groups: Entry points by name, by group.
        version: The version of the package.
    """
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
