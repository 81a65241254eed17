"""Runs ``pygdist`` as a user does, in processes of its own, without paying seconds of imports each time.

Each run is forked from a server that has imported everything (``tests/server.py``), with its own environment, folder,
standard output and standard error. Several ranks get the environment that torchrun, or SLURM, would give them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server import context, start_server

__all__ = ["Outcome", "assert_mistake", "pygdist", "slurm", "start", "torchrun"]

TIMEOUT_S = 120


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and all that it wrote."""

    code: int
    out: str
    err: str


def pygdist(*args: str, folder: Path, env: Mapping[str, str] | None = None) -> Outcome:
    """Run the command in a folder, on one process."""
    return _run(args, folder, [env or {}])[0]


def start(*args: str, folder: Path) -> Any:
    """The command in a folder, on one process that is running; it writes to the files ``out`` and ``err``."""
    start_server()
    process = context.Process(target=_body, args=(list(args), str(folder), {}, f"{folder}/out", f"{folder}/err"))
    process.start()
    return process


def torchrun(*args: str, folder: Path, env: Mapping[str, str] | None = None) -> list[Outcome]:
    """Run the command on two ranks that torchrun started."""
    shared = {**_rendezvous(), **(env or {}), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in range(2)]
    return _run([*args, "--trainer.devices=2"], folder, ranks)


def slurm(*args: str, folder: Path) -> list[Outcome]:
    """Run the command on two tasks of one machine that SLURM's srun started."""
    shared = {**_rendezvous(), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "graph", "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    shared |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1"}
    tasks = [shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return _run([*args, "--trainer.devices=2"], folder, tasks)


def assert_mistake(outcomes: Outcome | Sequence[Outcome], *words: str) -> str:
    """Every rank left with exit code 2 and without a traceback, and one line, the last one, says why.

    Returns:
        That line.
    """
    ranks = [outcomes] if isinstance(outcomes, Outcome) else list(outcomes)
    said = "\n".join(rank.err for rank in ranks)
    assert [rank.code for rank in ranks] == [2] * len(ranks), said
    assert "Traceback" not in said
    assert said.count("pygdist: error: ") == 1, said
    line = ranks[0].err.splitlines()[-1]
    assert line.startswith("pygdist: error: ")
    assert len(line) < 700
    for word in words:
        assert word in line, line
    return line


def files(folder: Path) -> set[str]:
    """Every file and folder below a folder, but for finished stores in the cache."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in names if not name.startswith("cache/") or "/." in name}


def _rendezvous() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def _run(args: Sequence[str], folder: Path, environments: Sequence[Mapping[str, str]]) -> list[Outcome]:
    start_server()
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [(f"{scratch}/out{rank}", f"{scratch}/err{rank}") for rank in range(len(environments))]
        processes: list[Any] = []
        for environment, output in zip(environments, outputs, strict=True):
            processes.append(context.Process(target=_body, args=(list(args), str(folder), dict(environment), *output)))
            processes[-1].start()
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


def _body(args: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not everybody leaves Ctrl-C as it is
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = ["pygdist", *args]
    from pygdist import cli

    sys.exit(cli.main(args))
