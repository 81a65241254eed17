"""Imports DGL from the folder that its wheel was unpacked into.

DGL 2.1.0 contains DistGNN's kernels for one socket. It was built for an older torch and is no dependency of this
project, so the scripts get its folder by ``--dgl``. This module imports nothing heavy, because the imports of a process
count for its peak memory.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

HELP = "compare with DGL: folder that the wheel of dgl 2.1.0 was unpacked into"


def problem(site: Path | None) -> str:
    """Return one line that says why DGL cannot come from this folder; an empty one if it can, or is not wanted."""
    if site is None or (site / "dgl" / "__init__.py").is_file():
        return ""
    return f"--dgl: there is no DGL in {site}; unpack the wheel of dgl 2.1.0 there, see experiments/kernels/README.md"


def facts(site: Path | None) -> dict[str, str]:
    """Return a column with the version of DGL, for each row of a table; no column without DGL."""
    if site is None:
        return {}
    versions = [found.version for found in metadata.distributions(name="dgl", path=[str(site)])]
    return {"dgl": versions[0] if versions else "unknown"}


@functools.cache
def load(site: Path) -> ModuleType:
    """Import DGL, with as many threads as torch has now.

    Raises:
        SystemExit: If the import fails; the message is one line.
    """
    os.environ["DGLBACKEND"] = "pytorch"  # otherwise DGL writes its choice to a file in the home folder
    # DGL's sampler wants a native library for this very release of torch. Layers and ``dgl.ops`` do without it.
    sys.modules["dgl.graphbolt"] = ModuleType("dgl.graphbolt")
    sys.path.insert(0, str(site))
    try:
        dgl = importlib.import_module("dgl")
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise SystemExit(f"error: --dgl: cannot import DGL: {' '.join(str(error).split())}") from error
    dgl.utils.set_num_threads(torch.get_num_threads())
    return dgl
