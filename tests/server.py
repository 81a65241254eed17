"""The process that imports everything once: ranks, commands and scripts are forked from it.

Each has its own environment, folder, standard output and standard error, as if it had been started by itself.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

from tests.warm import write_python

__all__ = ["Outcome", "begin", "file", "python", "run", "script", "start_server"]

TIMEOUT_S = 120
_ADDRESS = "PYGDIST_TEST_SERVER"
_scratch = tempfile.TemporaryDirectory(prefix="pygdist-python-")
_context = multiprocessing.get_context("forkserver")
#: No thread may exist where processes are forked: neither OpenMP's nor that of the allocator in pyarrow.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and all that it wrote."""

    code: int
    out: str
    err: str


def start_server() -> None:
    """Start the server unless it runs. Workers of pytest use that of the process that started them."""
    itself: Any = forkserver._forkserver
    if itself._forkserver_address is not None:
        return
    if (address := os.environ.get(_ADDRESS)) is not None:
        _use(address)
        itself._forkserver_alive_fd = os.open(os.devnull, os.O_RDWR)  # the server ends with who started it
        return
    # it looks for modules where this process does
    paths = os.pathsep.join(path for path in sys.path if path)
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, **_ONE_THREAD}):
        _context.set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()
    os.environ[_ADDRESS] = itself._forkserver_address


def _use(address: str) -> None:
    """Fork from a server that another process started."""
    itself: Any = forkserver._forkserver
    itself._forkserver_address, itself.ensure_running = address, resource_tracker.ensure_running


@cache
def python() -> str:
    """Return an executable that stands in for ``python``, with everything imported: see ``tests/warm.py``."""
    start_server()
    return str(write_python(Path(_scratch.name)))


def script(module: str, *args: str, folder: Path) -> Outcome:
    """What ``python -m module args`` does in a folder; the module has a ``main()`` that reads ``sys.argv``."""
    return run(_main_of, [module, *args], folder, [{}])[0]


def _main_of(args: list[str]) -> int:
    sys.argv = args
    code: int = importlib.import_module(args[0]).main()
    return code


def file(path: Path, *args: str, folder: Path, environment: Mapping[str, str] | None = None) -> Outcome:
    """What ``python path args`` does in a folder."""
    return run(_run_file, [str(path), *args], folder, [environment or {}])[0]


def _run_file(args: list[str]) -> int:
    sys.argv = args
    runpy.run_path(args[0], run_name="__main__")
    return 0


def begin(
    function: Callable[[list[str]], int],
    args: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    output: tuple[str, str],
) -> Any:
    """Call a function with arguments in a process; it writes to two files, and ends with what the function gives."""
    warm = python()
    server = forkserver._forkserver._forkserver_address
    process = _context.Process(
        target=_body, args=(function, list(args), str(folder), dict(environment), output, server, warm)
    )
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
        outcomes = [
            Outcome(process.exitcode, Path(out).read_text(), Path(err).read_text())
            for process, (out, err) in zip(processes, outputs, strict=True)
        ]
    assert not late, f"{len(late)} of {len(processes)} processes did not end: {outcomes}"
    return outcomes


def _body(
    function: Callable[[list[str]], int],
    args: list[str],
    folder: str,
    environment: dict[str, str],
    output: tuple[str, str],
    server: str,
    executable: str,
) -> None:
    sys.executable = executable
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not everybody leaves Ctrl-C as it is
    for descriptor, path in zip((1, 2), output, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    # ranks that the process starts come from the server that it came from itself, which is not its child
    _use(server)
    sys.exit(function(args))
