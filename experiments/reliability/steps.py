"""Trains each system for many steps: what a process holds must not grow.

    python -m experiments.reliability.steps --out figures
    python -m experiments.reliability.steps --steps 2000 --out figures     # a short version

``pygdist fit`` on two ranks, on a small generated graph. It logs every step, and validates and saves a checkpoint every
100 steps, when each rank also notes its resident memory, open descriptors and threads. The figures are the slopes over
the second half of the steps, largest over ranks: of memory, ``kb_per_step`` (KiB); of descriptors and threads for 1,000
steps. Prints a table, writes ``steps.csv``, and exits with code 1 if a slope is not below its limit or a run fails.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from experiments.machine import provenance
from experiments.reliability.campaign import SYSTEMS, arguments

EVERY = 100
LIMITS = {"kb_per_step": 0.1, "descriptors_per_1000": 0.1, "threads_per_1000": 0.1}
_FOLDER = "STEPS_FOLDER"  # environment variable


class Growth(pl.Callback):
    """Notes what the process holds, in a file of each rank."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write a line every 100 steps."""
        if trainer.global_step % EVERY == 0:
            process = psutil.Process()
            figures = process.memory_info().rss / 1024, process.num_fds(), process.num_threads()
            with open(f"{os.environ[_FOLDER]}/{trainer.global_rank}.csv", "a", newline="") as file:
                csv.writer(file).writerow([trainer.global_step, *figures])


def measure(system: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train one system; return its slopes."""
    command = [
        sys.executable, "-m", "pygdist.cli", "fit", *arguments(folder, 2), "--data.dataset_args={num_nodes: 500}",
        f"--trainer.max_epochs={steps}", f"--trainer.check_val_every_n_epoch={EVERY}",
        f"--checkpoint.every_n_epochs={EVERY}", "--checkpoint.monitor=null", "--checkpoint.save_last=false",
        "--trainer.callbacks+=experiments.reliability.steps.Growth", *SYSTEMS[system],
    ]  # fmt: skip
    run = subprocess.run(command, env={**os.environ, _FOLDER: str(folder)}, capture_output=True, text=True)
    checkpoints = list(folder.glob("runs/version_0/checkpoints/*.ckpt"))
    tables = [np.loadtxt(path, delimiter=",", ndmin=2) for path in sorted(folder.glob("?.csv"))]
    if run.returncode or len(checkpoints) != 1 or not tables or min(map(len, tables)) < steps // EVERY:
        return {"system": system, "steps": 0, "note": run.stderr[-500:]}
    late = [table[len(table) // 2 :] for table in tables]
    slopes = [np.polyfit(table[:, 0], table[:, 1:], 1)[0] for table in late]
    memory, descriptors, threads = (float(one) for one in np.max(slopes, axis=0))
    return {
        "system": system,
        "steps": steps,
        "kb_per_step": round(memory, 4),
        "descriptors_per_1000": round(1000 * descriptors, 4),
        "threads_per_1000": round(1000 * threads, 4),
        "mib": round(float(max(table[-1, 1] for table in tables)) / 1024, 1),
        "note": "",
    }


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    cli = argparse.ArgumentParser(description="Train each system for many steps, and tell what grows.")
    cli.add_argument("--steps", type=int, default=10_000, help="steps of each system (default: 10,000)")
    cli.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for steps.csv")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Train each system, and tell what grows."""
    options = parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    columns = ["system", "steps", *LIMITS, "mib", "note"]
    table = Table(*columns)
    for system in options.systems:
        with tempfile.TemporaryDirectory() as folder:
            row = measure(system, options.steps, Path(folder))
        rows.append(row)
        print(system, row, flush=True)
        table.add_row(*(str(row.get(name, "")) for name in columns))
        with (options.out / "steps.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns, *provenance(1)])
            writer.writeheader()
            writer.writerows({**one, **provenance(1)} for one in rows)
    Console().print(table)
    return int(any(not row["steps"] or any(row[name] >= LIMITS[name] for name in LIMITS) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
