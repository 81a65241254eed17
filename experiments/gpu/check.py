"""Checks a machine's GPUs: tests, then tables.

    python -m experiments.gpu.check             # make gpu-check: on one GPU, about five minutes
    python -m experiments.gpu.check --gpus 2    # make gpu-check-multi: between GPUs, over nccl

On one GPU: the CUDA tests (kernels of all types and graphs, every layer and backend, ranks that share the GPU over
gloo, runs from fit to export in all precisions, waits, memory, repeated runs), then the tables of kernels and
of steps. On several: layers over nccl, ranks that fail, and the table of steps by number of GPUs. The exit code is 1 if
a test fails, and 2 without as many GPUs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.catgnn.graphs import show, write
from experiments.gpu import kernels, scaling, steps

_RESULTS = Path(__file__).parent / "results"
#: Tables on one GPU and on several: their names, the columns that are shown, and what measures them.
_ONE: list[tuple[str, list[str], Callable[[Any], list[dict[str, Any]]]]] = [
    (
        "kernels", ["graph", "kernel", "by", "dtype", "features", "median_s", "gb_s", "share_of_copy", "extra_gib"],
        lambda o: kernels.measure(o.nodes, o.edges, o.features, o.rounds),
    ),
    (
        "steps", ["model", "by", "dtype", "step_s", "times_faster", "step_gib"],
        lambda o: steps.measure(o.nodes, o.edges, o.features[-1], o.rounds),
    ),
]  # fmt: skip
_SEVERAL = [
    (
        "scaling", ["backend", "ranks", "step_s", "speedup", "peak_gib"],
        lambda o: scaling.measure(o.nodes, o.edges, o.features[-1], o.rounds),
    )
]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--gpus", type=int, default=1, help="GPUs that are needed; 2 check several together")
    cli.add_argument("--tables", nargs="+", choices=[name for name, *_ in _ONE + _SEVERAL], help="only these, no tests")
    cli.add_argument("--nodes", type=int, default=200_000, help="of the graph that is measured")
    cli.add_argument("--edges", type=int, default=10_000_000)
    cli.add_argument("--features", type=int, nargs="+", default=[32, 128])
    cli.add_argument("--rounds", type=int, default=7, help="runs of which the median counts")
    cli.add_argument("--out", type=Path, default=_RESULTS, help="folder of the tables")
    return cli


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < options.gpus:
        sees = f"torch {torch.__version__} sees {found}"
        print(f"gpu-check needs {options.gpus} GPU(s) of CUDA, and {sees}", file=sys.stderr)
        return 2
    several, failed = options.gpus > 1, False
    if options.tables is None:
        chosen = "multi_gpu" if several else "cuda and not multi_gpu"
        workers = ["--numprocesses", str(1 if several else _num_workers()), "--dist", "load", "--maxschedchunk", "1"]
        command = [sys.executable, "-m", "pytest", "-m", chosen, "-q", *workers, "tests"]
        one_thread = {"OMP_NUM_THREADS": "1", **os.environ}  # by process, as there are as many as cores
        failed = bool(subprocess.run(command, check=False, env=one_thread).returncode)
    about = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "driver": _driver()}
    for name, shown, measure in _SEVERAL if several else _ONE:
        if name not in (options.tables or [name]):
            continue
        rows = measure(options)
        show([{column: row[column] for column in shown} for row in rows], f"{name}: {', '.join(about.values())}")
        write([{**row, **about} for row in rows], options.out / f"{name}.csv", threads=1)
    return int(failed)


def _num_workers() -> int:
    """Return how many tests run at a time: each may have four processes on the GPU, of half a gigabyte."""
    by_memory = torch.cuda.get_device_properties(0).total_memory // (4 << 30)
    return int(max(2, min((os.cpu_count() or 1) - 2, by_memory, 14)))


def _driver() -> str:
    """Return the version of the GPU's driver; empty where nvidia-smi is not found."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
