"""Environments that no run expects: variables of launchers and libraries, folders that are gone, closed streams."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.reliability.malformed.case import EITHER, FIT, PARTITION, REFUSED, TAKEN, Case

_RANKS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
          "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "graph", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
          "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost", "SLURM_NNODES": "1",
          "SLURM_NTASKS_PER_NODE": "1"}  # fmt: skip

#: Variables, and how ``pygdist fit`` must end with them.
VARIABLES: list[tuple[dict[str, str], str]] = [
    *(
        ({**_RANKS, name: value}, REFUSED)
        for name, value in (
            ("MASTER_PORT", "abc"), ("MASTER_PORT", "-1"), ("MASTER_PORT", "99999999"), ("MASTER_PORT", ""),
            ("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-3"), ("WORLD_SIZE", "1e9"),
            ("WORLD_SIZE", ""), ("RANK", "abc"), ("RANK", "9"), ("RANK", "-1"), ("LOCAL_RANK", "abc"),
            ("LOCAL_RANK", "9"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "abc"), ("LOCAL_WORLD_SIZE", "0"),
            ("GROUP_RANK", "abc"), ("MASTER_ADDR", "no.such.host.invalid"), ("MASTER_ADDR", "a b\n"),
        )
    ),
    *(
        ({**_SLURM, name: value}, REFUSED)
        for name, value in (
            ("SLURM_NTASKS", "abc"), ("SLURM_NTASKS", "4"), ("SLURM_PROCID", "abc"), ("SLURM_PROCID", "9"),
            ("SLURM_LOCALID", "abc"), ("SLURM_NODEID", "abc"), ("SLURM_JOB_ID", "abc"),
        )
    ),
    *(({**_RANKS, name: "abc"}, TAKEN) for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")),
    *(
        ({name: value}, EITHER)
        for name, value in (
            ("WORLD_SIZE", "abc"), ("LOCAL_RANK", "9"), ("RANK", "x"), ("SLURM_PROCID", "abc"), ("MASTER_PORT", "abc"),
            ("PL_TRAINER_MAX_EPOCHS", "abc"), ("PL_TRAINER_DEVICES", "two"), ("PL_TRAINER_NOSUCH", "1"),
            ("PL_FIT__MODEL__LR", "fast"), ("PL_GLOBAL_SEED", "abc"), ("PL_GLOBAL_SEED", "-5"),
            ("PYGDIST_FIT__MODEL__LR", "fast"), ("PYGDIST_NOSUCH", "\n"), ("PYGDIST_THREADS", "abc"),
            ("PYGDIST_CONFIG", "no"), ("OMP_NUM_THREADS", "abc"), ("OMP_NUM_THREADS", "-4"),
            ("OMP_NUM_THREADS", "99999999"), ("MKL_NUM_THREADS", "abc"), ("CUDA_VISIBLE_DEVICES", "abc"),
            ("PYTHONHASHSEED", "7"), ("PYTHONIOENCODING", "ascii"), ("LC_ALL", "nosuch"),
            ("LC_ALL", "C"), ("LANG", "\xff"), ("TERM", ""), ("COLUMNS", "abc"), ("COLUMNS", "-3"), ("PATH", ""),
            ("GLOO_SOCKET_IFNAME", "nosuch"), ("TP_SOCKET_IFNAME", "nosuch"), ("JSONARGPARSE_DEBUG", "1"),
            ("TORCH_LOGS", "nosuch"), ("TORCH_DISTRIBUTED_DEBUG", "abc"), ("MPLBACKEND", "nosuch"),
            ("TORCHINDUCTOR_CACHE_DIR", "/proc/nosuch"), ("XDG_CACHE_HOME", "/proc/nosuch"),
        )
    ),
    *(({name: value}, TAKEN) for name, value in (
        ("TMPDIR", "/no/such/place"), ("TMPDIR", ""), ("TMPDIR", "run.yaml"), ("HOME", ""), ("HOME", "/no/such/place"),
        ("USER", ""), ("TZ", "nosuch"), ("NO_COLOR", "1"),
    )),
]  # fmt: skip


def _leave(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    shutil.rmtree(folder / "gone")


def _close(*descriptors: int) -> Callable[[Path], None]:
    def begin(folder: Path) -> None:
        for one in descriptors:
            os.close(one)

    return begin


def _full(folder: Path) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def surrounding_cases() -> Iterator[Case]:
    """Yield variables, a folder that is gone, and streams that are closed or full."""
    for environment, ends in VARIABLES:
        own = {name: value for name, value in environment.items() if _RANKS.get(name, _SLURM.get(name)) != value}
        shown = ", ".join(f"{name}={ascii(value)[1:-1]}" for name, value in own.items())
        launcher = (
            "torchrun: " if "TORCHELASTIC_RUN_ID" in environment else "SLURM: " if "SLURM_JOB_ID" in environment else ""
        )
        yield Case("variable", launcher + shown, FIT, (), ends=ends, environment=environment)
    started = {"PYTHONUNBUFFERED": "1"}
    yield Case("folder that is gone", "fit", FIT, begin=_leave, environment=started)
    yield Case("folder that is gone", "partition", PARTITION, begin=_leave, environment=started)
    yield Case("folder that is gone", "help", ("--help",), begin=_leave, environment=started, ends=EITHER)
    yield Case("stream", "no input", FIT, begin=_close(0), environment=started, ends=TAKEN)
    yield Case("stream", "no output", FIT, begin=_close(1), environment=started, ends=TAKEN)
    yield Case("stream", "no input, no output", PARTITION, begin=_close(0, 1), environment=started, ends=TAKEN)
    yield Case("stream", "full output", PARTITION, begin=_full, environment=started, ends=EITHER)
    yield Case("stream", "full output of help", ("--help",), begin=_full, environment=started, ends=EITHER)
