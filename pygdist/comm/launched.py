"""Processes that ``torchrun`` has started: they join by torchrun's environment variables, and take a GPU each."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from pygdist.errors import InputError
from pygdist.launch_variables import check_launch
from pygdist.memory.gpus import number_of

# numbers of processes that srun, Open MPI's mpirun, and MPICH's and Intel's have started
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def join(store: dist.Store | None = None) -> bool:
    """Join the processes that the environment variables describe; return false if there are none, or they have joined.

    The processes meet in ``store``, by default the store of ``torchrun``.

    Raises:
        InputError: If a variable is missing, or has an impossible value
            (:func:`~pygdist.launch_variables.check_launch`).
    """
    if dist.is_initialized():
        return False
    check_launch(os.environ)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and store is None:
        raise InputError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start the script by torchrun")
    kind = "cpu:gloo,cuda:nccl" if has_own_gpus() else "gloo"
    if store is None:
        dist.init_process_group(kind)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(kind, store=store, rank=rank, world_size=world_size)
    return True


def check_alone() -> None:
    """Refuse processes that would each train alone on the whole graph, as they do not know of each other.

    Raises:
        InputError: If another launcher than torchrun has started several processes.
    """
    for name in _TASKS if "WORLD_SIZE" not in os.environ and not dist.is_initialized() else ():
        number = os.environ.get(name, "1")
        if number.isdecimal() and int(number) > 1:
            raise InputError(
                f"{number} processes were started ({name}), but not by torchrun: WORLD_SIZE is not set, so each would "
                "train alone on the whole graph; start one torchrun on each machine, as in srun "
                "--ntasks-per-node=1 torchrun ..., or set WORLD_SIZE=1 if each is a run of its own"
            )


def new_group(device: torch.device) -> dist.ProcessGroup:
    """Make a group of all processes: over nccl if each has a GPU of its own, else over gloo.

    Every process makes the call, with its device. nccl refuses processes that share a GPU.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    mine = torch.tensor([number_of(device) if device.type == "cuda" else -1.0], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine, group=group)
    gpus = [float(one) for one in gathered]
    if -1.0 in gpus or len(set(gpus)) < len(gpus):
        return group
    dist.destroy_process_group(group)
    group = dist.new_group(backend="nccl")
    return group


def is_first_of_machine() -> bool:
    """Tell if this process is the first of its machine; the first process partitions the graph."""
    return number_on_machine() == 0


def number_on_machine() -> int:
    """Return the number of this process among the processes of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def has_own_gpus() -> bool:
    """Tell if each process of this machine has a GPU of its own."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= here


def own_device() -> torch.device:
    """Return the device of this process: its own GPU, or the CPU."""
    return torch.device("cuda", number_on_machine()) if has_own_gpus() else torch.device("cpu")
