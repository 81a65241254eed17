"""``pygdist doctor``: say what this machine has, and how fast its processes exchange rows."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pygdist.commands.messages import ArgumentParser
from pygdist.display import as_text

_PACKAGES = ("pygdist", "torch", "torch_geometric", "lightning", "triton", "numpy", "pymetis", "torch_sparse")
_GIB = 2**30


def machine_facts() -> dict[str, Any]:
    """Return the versions of packages, and the processor, memory, disks, GPUs and native library of this machine."""
    import torch

    from pygdist.memory.machine import memory_bytes
    from pygdist.native import load

    library = load()
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "processor": {
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "memory_gib": {"limit": memory_bytes() / _GIB, "free shared memory": _free("/dev/shm")},
        "free_disk_gib": {"home": _free(Path.home()), "temporary files": _free(tempfile.gettempdir())},
        "native_library": "loaded" if library is not None else "missing: aggregation is several times slower",
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "no GPU",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _free(folder: str | Path) -> float | None:
    try:
        return shutil.disk_usage(folder).free / _GIB
    except OSError:
        return None


def _gpu(number: int) -> dict[str, Any]:
    import torch

    facts = torch.cuda.get_device_properties(number)
    return {"name": facts.name, "gib": facts.total_memory / _GIB, "capability": f"{facts.major}.{facts.minor}"}


def exchanges(communicator: Any) -> list[dict[str, Any]]:
    """Return the rate and latency between each rank and the next ones; every rank makes the call.

    Ranks are measured pair by pair, while the others wait; of more than five ranks, neighbours in a ring.
    """
    import torch

    from pygdist.backends.planning.network import probe_exchange
    from pygdist.comm import ExchangePlan

    size, rank = communicator.world_size, communicator.rank
    hosts, rows = communicator.gather_text(socket.gethostname()), []
    pairs = [(one, other) for one in range(size) for other in range(one + 1, size)]
    if size > 5:
        pairs = [(one, (one + 1) % size) for one in range(size)]
    like = torch.empty(0, device=communicator.device)
    for source, target in pairs:
        count = 1 << 20
        send = tuple(count * (rank == source and peer == target) for peer in range(size))
        receive = tuple(count * (rank == target and peer == source) for peer in range(size))
        index = torch.arange(count if rank == source else 0, device=communicator.device)
        plan = ExchangePlan(send_index=index, send_counts=send, recv_counts=receive)
        found = probe_exchange(communicator, plan, like)
        rows.append(
            {
                "from": f"{source} ({hosts[source]})", "to": f"{target} ({hosts[target]})",
                "mb_per_s": 2 * like.element_size() / found.value_s / 1e6 if found.value_s else None,
                "latency_us": found.latency_s * 1e6,
            }
        )  # fmt: skip
    return rows


def _on_this_machine(rank: int, num_ranks: int) -> list[dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from pygdist.comm import Communicator

    return exchanges(Communicator(dist.new_group(), device=torch.device("cpu")))


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    result = ArgumentParser(
        prog="pygdist doctor",
        description="Say what this machine has, and measure exchanges: between two processes of this machine by gloo, "
        "or, under torchrun, between all processes of the run (by nccl if each process has a GPU).",
    )
    result.add_argument("--json", action="store_true", help="print JSON")
    result.add_argument("--no-exchange", action="store_true", help="do not measure exchanges")
    return result


def run(command: str, arguments: list[str]) -> int:
    """Run the command line: print what there is; under ``torchrun`` measure between its processes."""
    options = parser().parse_args(arguments)
    facts, rank = machine_facts(), 0
    if not options.no_exchange:
        facts["exchange_by"], facts["exchanges"], rank = _measured()
    if rank == 0:
        if options.json:
            sys.stdout.write(json.dumps(facts, indent=1) + "\n")
        else:
            _show(facts)
    return 0


def _measured() -> tuple[str, list[dict[str, Any]], int]:
    """Return who carries exchanges, what they take, and this rank."""
    from pygdist.comm import Communicator
    from pygdist.comm.launched import join, new_group, own_device
    from pygdist.testing import run_ranks

    if not join():
        return "gloo, two processes of this machine", run_ranks(_on_this_machine, 2)[0], 0
    device = own_device()
    communicator = Communicator(new_group(device), device=device)
    found = exchanges(communicator)
    communicator.close()
    carrier = "nccl" if communicator.is_nccl else "gloo"
    return f"{carrier}, {communicator.world_size} processes", found, communicator.rank


def _show(facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for name, value in facts.items():
        if name == "exchanges":
            continue
        console.print(f"{name.replace('_', ' ')}: {as_text(value)}", soft_wrap=True, markup=False)
    if rows := facts.get("exchanges"):
        table = Table(box=None, pad_edge=False)
        for name in rows[0]:
            table.add_column(name.replace("_", " "), justify="left" if name in ("from", "to") else "right")
        for row in rows:
            table.add_row(*map(as_text, row.values()))
        console.print(table)
