"""Checks of the environment variables by which torchrun, SLURM or a user tells a process its rank.

Lightning reads them while it is imported, and fails on one that is no number. Other libraries fail on variables of
their own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from pygdist.errors import InputError

_RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES")
_JOBS = ("SLURM_JOB_ID",)  # Lightning makes a port of it
_PORTS = ("MASTER_PORT", "STANDALONE_PORT")
_INTERFACES = "GLOO_SOCKET_IFNAME"
_SWITCHES = ("JSONARGPARSE_DEBUG",)
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR",)
_OF = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE", "SLURM_PROCID": "SLURM_NTASKS"}


def check_launch(environment: Mapping[str, str]) -> None:
    """Refuse a rank, a number of ranks or a port that is no number or out of range, and an interface that is none.

    Raises:
        InputError: Names the variable.
    """
    numbers = {}
    for names, least, most in ((_RANKS, 0, 2**31), (_SIZES, 1, 2**31), (_JOBS, 1, 2**63), (_PORTS, 1, 65_535)):
        for name in names:
            text = environment.get(name)
            if text is None:
                continue
            if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
                raise InputError(
                    f"the environment variable {name} is {text[:40]!r}, expected a number from {least} to {most}, as "
                    f"torchrun or SLURM sets it; start with one of these, or unset {name}",
                    of_one_rank=True,  # which rank is the first is not known
                )
            numbers[name] = int(text)
    interfaces = [name for _, name in socket.if_nameindex()]
    for interface in filter(None, environment.get(_INTERFACES, "").split(",")):
        if interface not in interfaces:
            raise InputError(
                f"the environment variable {_INTERFACES} names {interface[:40]!r}, but the network interfaces of this "
                f"machine are {', '.join(interfaces)}; name one of these, or unset {_INTERFACES}",
                of_one_rank=True,
            )
    nodes, places = numbers.get("SLURM_NNODES", 1), {"SLURM_NODELIST", "MASTER_ADDR"} & environment.keys()
    # Lightning would take this machine for that of rank 0
    if "SLURM_PROCID" in environment and nodes > 1 and not places:
        raise InputError(
            f"the environment variable SLURM_NNODES is {nodes}, but SLURM_NODELIST, which names the machine of rank 0, "
            "is not set; start with srun, or set it",
            of_one_rank=True,
        )
    for name, size in _OF.items():
        if name in numbers and size in numbers and numbers[name] >= numbers[size]:
            raise InputError(
                f"the environment variable {name} is {numbers[name]}, but {size} is {numbers[size]}, and ranks count "
                f"from 0; start all ranks with torchrun or SLURM, or unset both variables",
                of_one_rank=True,
            )


def check_libraries(environment: Mapping[str, str]) -> None:
    """Refuse environment variables that make a library of the command line fail while it is imported.

    Raises:
        InputError: Names the variable.
    """
    for name in _SWITCHES:
        if environment.get(name, "").lower() not in ("", "true", "false"):
            raise InputError(f"the environment variable {name} is {environment[name][:40]!r}, expected true or false")
    for name in filter(environment.get, _FOLDERS):
        try:
            os.makedirs(environment[name], exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the environment variable {name} names {environment[name][:200]}: {error.strerror}; name a folder "
                f"that can be written to, or unset {name}"
            ) from error


def job_of_slurm() -> str | None:
    """Return the number of the SLURM job that this process is of, if any; it stays when SLURM starts the job again."""
    return os.environ.get("SLURM_JOB_ID")


def count(name: str) -> int:
    """Return the number in an environment variable that counts starts; 0 if there is none."""
    value = os.environ.get(name, "0")
    return int(value) if value.isdigit() else 0
