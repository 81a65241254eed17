"""Runs ``pygdist`` as a user does, in processes of its own, without paying seconds of imports each time.

Each run is forked from a server that has imported everything (``tests/server.py``). Several ranks get the environment
that torchrun, or SLURM, would give them.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pygdist import cli
from tests.server import Outcome, begin, run

_FURTHER = "ARGUMENTS_OF_THE_SECOND_RANK"

__all__ = ["Outcome", "assert_mistake", "pygdist", "slurm", "start", "torchrun"]


def pygdist(*args: str, folder: Path, env: Mapping[str, str] | None = None) -> Outcome:
    """Run the command in a folder, on one process."""
    return run(_main, args, folder, [env or {}])[0]


def start(*args: str, folder: Path) -> Any:
    """The command in a folder, on one process that is running; it writes to the files ``out`` and ``err``."""
    return begin(_main, args, folder, {}, (f"{folder}/out", f"{folder}/err"))


def torchrun(
    *args: str, folder: Path, env: Mapping[str, str] | None = None, second: Sequence[str] = ()
) -> list[Outcome]:
    """Run the command on two ranks that torchrun started; the ``second`` one gets further arguments."""
    shared = {**_rendezvous(), **(env or {}), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in range(2)]
    ranks[1][_FURTHER] = " ".join(second)
    return run(_main, [*args, "--trainer.devices=2"], folder, ranks)


def slurm(*args: str, folder: Path, env: Mapping[str, str] | None = None) -> list[Outcome]:
    """Run the command on two tasks of one machine that SLURM's srun started."""
    shared = {**_rendezvous(), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "graph", "SLURM_NTASKS": "2", **(env or {})}
    shared |= {"SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1"}
    tasks = [shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    return run(_main, [*args, "--trainer.devices=2"], folder, tasks)


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
    # below the ports that the system gives to whoever asks for any, as ranks of other tests do meanwhile
    for port in random.sample(range(15_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    raise OSError("100 ports are taken")


def _main(args: list[str]) -> int:
    args = [*args, *os.environ.get(_FURTHER, "").split()]
    sys.argv = ["pygdist", *args]
    return cli.main(args)
