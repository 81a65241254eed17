"""A ``python`` that has imported everything: each program runs in a process forked from the server of the tests.

Programs that start others by ``sys.executable``, as launchers start their ranks, start them the same way. What such a
program lacks is an interpreter of its own, which imports afresh and is finalised at the end, and the caller's session.
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
import threading
from multiprocessing import connection, forkserver, get_context, parent_process, reduction, resource_tracker
from pathlib import Path
from typing import Any

__all__ = ["main", "write_python"]

_PATH = list(sys.path)  # of the server
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def write_python(folder: Path) -> Path:
    """Write the executable, which asks the server of this process."""
    path, root, address = folder / "python", Path(__file__).parents[1], forkserver._forkserver._forkserver_address
    path.write_text(
        f"#!{sys.executable} -S\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        f"from tests.warm import main\nmain({str(path)!r}, {address!r})\n"
    )
    path.chmod(0o755)
    return path


def main(executable: str, address: str) -> None:
    """Run the program that ``sys.argv`` names in a process of the server, and end as it ends."""
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    server._forkserver_address, server.ensure_running = address, lambda: None
    # neither is asked for anything here
    server._forkserver_alive_fd = tracker._fd = os.open(os.devnull, os.O_RDWR)
    tracker.ensure_running = lambda: None
    del sys.modules["__main__"].__file__  # the program's process does not import this script
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    arguments = (executable, sys.argv[1:], dict(os.environ), os.getcwd(), limits, _Streams())
    process = get_context("forkserver").Process(target=_program, args=arguments)
    process.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda which, _frame: os.kill(process.pid, which))
    process.join()
    if process.exitcode < 0:
        if process.exitcode != -signal.SIGKILL:
            signal.signal(-process.exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -process.exitcode)
    os._exit(process.exitcode)


class _Streams:
    """Standard input, output and error, which travel to the process."""

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(number) for number in range(3)]

    def __setstate__(self, state: list[Any]) -> None:
        self.descriptors = [one.detach() for one in state]


def _program(
    executable: str,
    words: list[str],
    environment: dict[str, str],
    folder: str,
    limits: list[tuple[int, int]],
    streams: _Streams,
) -> None:
    for which, limit in zip(_LIMITS, limits, strict=True):
        resource.setrlimit(which, limit)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams.descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable, sys.orig_argv = executable, [executable, *words]
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_PATH]
    while words[0] in ("-u", "-B"):
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        sys.modules.pop(words[1], None)  # it is imported already, of which runpy would warn
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.absolute()))
        runpy.run_path(words[0], run_name="__main__")


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
