"""The process that imports everything once: ranks, commands and scripts are forked from it.

Each has its own environment, folder, standard output and standard error, as if it had been started by itself.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["Outcome", "begin", "run", "script", "start_server"]

TIMEOUT_S = 120
_PRELOAD = [
    "pygdist.commands.train",
    "pygdist.commands.verify",
    "pygdist.commands.partition",
    "pygdist.commands.generate",
    "pygdist.testing",
    "tests.cli.commands",
]
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and all that it wrote."""

    code: int
    out: str
    err: str


def start_server() -> None:
    """Start it, if it is not there yet."""
    # it looks for modules where this process does
    paths = os.pathsep.join(path for path in sys.path if path)
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}):
        _context.set_forkserver_preload(_PRELOAD)
        forkserver.ensure_running()


def script(module: str, *args: str, folder: Path) -> Outcome:
    """What ``python -m module args`` does in a folder; the module has a ``main()`` that reads ``sys.argv``."""
    return run(_main_of, [module, *args], folder, [{}])[0]


def _main_of(args: list[str]) -> int:
    sys.argv = args
    found: int = importlib.import_module(args[0]).main()
    return found


def begin(
    function: Callable[[list[str]], int],
    args: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: tuple[str, str],
) -> Any:
    """Call a function with arguments in a process; it writes to two files, and ends with what the function gives."""
    start_server()
    process = _context.Process(target=_body, args=(function, list(args), str(folder), dict(environment), *output))
    process.start()
    return process


def run(
    function: Callable[[list[str]], int],
    args: Sequence[str],
    folder: Path,
    environments: Sequence[Mapping[str, str]],
) -> list[Outcome]:
    """Call it in one process for each environment, at the same time."""
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [(f"{scratch}/out{rank}", f"{scratch}/err{rank}") for rank in range(len(environments))]
        processes = [
            begin(function, args, folder, environment, output)
            for environment, output in zip(environments, outputs, strict=True)
        ]
        for process in processes:
            process.join(TIMEOUT_S)
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        found = [
            Outcome(process.exitcode, Path(out).read_text(), Path(err).read_text())
            for process, (out, err) in zip(processes, outputs, strict=True)
        ]
    assert not late, f"{len(late)} of {len(processes)} processes did not end: {found}"
    return found


def _body(
    function: Callable[[list[str]], int], args: list[str], folder: str, environment: dict[str, str], out: str, err: str
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not everybody leaves Ctrl-C as it is
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.exit(function(args))
