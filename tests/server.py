"""The process that imports everything once; ranks and commands are forked from it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from unittest import mock

__all__ = ["context", "start_server"]

_PRELOAD = [
    "pygdist.commands.train",
    "pygdist.commands.verify",
    "pygdist.commands.partition",
    "pygdist.commands.generate",
    "pygdist.testing",
    "tests.cli.commands",
]
context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start it, if it is not there yet."""
    # it looks for modules where this process does
    paths = os.pathsep.join(path for path in sys.path if path)
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}):
        context.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()
