"""Test accuracy after ``pygdist fit`` on one process and on several, on real graphs; a table and a CSV.

    python experiments/foundation/accuracy.py DATA --runs cora-gcn --ranks 1 4 --seeds 0 1 2 --out accuracy.csv

DATA holds ``Planetoid/`` and ``LINKXDataset/`` in the layout of PyG's dataset classes; PyG writes beside the raw files.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

CORA = {
    "data": {
        "dataset": "Planetoid",
        "dataset_args": {"name": "Cora", "transform": {"class_path": "torch_geometric.transforms.NormalizeFeatures"}},
    },
    "epochs": 200,
}
CORNELL5 = {"data": {"dataset": "LINKXDataset", "dataset_args": {"name": "cornell5"}, "split": [0.5, 0.25, 0.25]}}
MODELS = "torch_geometric.nn.models."
RUNS: dict[str, dict[str, Any]] = {
    "cora-gcn": {**CORA, "class_path": f"{MODELS}GCN", "hidden": 16, "classes": 7},
    "cornell5-gcn": {**CORNELL5, "class_path": f"{MODELS}GCN", "hidden": 64, "classes": 2, "epochs": 150},
    "cornell5-sage": {**CORNELL5, "class_path": f"{MODELS}GraphSAGE", "hidden": 64, "classes": 2, "epochs": 100},
}


def configuration(name: str, data: Path, folder: Path, ranks: int, seed: int) -> dict[str, Any]:
    """What ``pygdist fit --config`` gets: the setting of the GCN paper, on a public or a random split."""
    run = RUNS[name]
    source = {
        **run["data"],
        "dataset_args": {"root": str(data / run["data"]["dataset"]), **run["data"]["dataset_args"]},
    }
    sizes = {"in_channels": -1, "hidden_channels": run["hidden"], "num_layers": 2, "out_channels": run["classes"]}
    return {
        "seed_everything": seed,
        "model": {
            "model": {"class_path": run["class_path"], "init_args": {**sizes, "dropout": 0.5}},
            "backend": "comm",
            "lr": 0.01,
            "weight_decay": 5e-4,
        },
        "data": {**source, "cache_dir": str(folder / "cache")},
        "trainer": {"max_epochs": run["epochs"], "devices": ranks, "enable_progress_bar": False, "logger": False},
        "checkpoint": {"dirpath": str(folder / f"{name}-{ranks}-{seed}")},
    }


def pygdist(*arguments: str) -> tuple[str, float]:
    """Run the command; its output, and the peak memory of its processes together in GiB (shared pages counted once)."""
    command = [sys.executable, "-m", "pygdist.cli", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0
    while True:
        try:
            out, errors = process.communicate(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, _memory(process.pid))
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {process.returncode}:\n{errors}")
    return out, peak / 2**30


def _memory(pid: int) -> int:
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


def row(name: str, data: Path, folder: Path, ranks: int, seed: int) -> dict[str, Any]:
    """Train, then test the last and the best checkpoint on one process."""
    config = configuration(name, data, folder, ranks, seed)
    checkpoints = Path(config["checkpoint"]["dirpath"])
    path = folder / f"{checkpoints.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    for old in checkpoints.glob("*.ckpt"):
        old.unlink()
    start = time.perf_counter()
    _, peak = pygdist("fit", "--config", str(path))
    seconds = time.perf_counter() - start
    best = next(file for file in checkpoints.glob("*.ckpt") if file.name != "last.ckpt")
    test = ["test", "--config", str(path), "--trainer.devices=1", "--ckpt_path"]
    return {
        "run": name,
        "ranks": ranks,
        "seed": seed,
        "epochs": RUNS[name]["epochs"],
        "last": _accuracy(pygdist(*test, str(checkpoints / "last.ckpt"))[0]),
        "best": _accuracy(pygdist(*test, str(best))[0]),
        "peak_gib": round(peak, 2),
        "seconds": round(seconds, 1),
    }


def _accuracy(output: str) -> float:
    found = re.search(r"test_acc\W+([\d.]+)", output)
    if found is None:
        raise SystemExit(f"pygdist test printed no test_acc:\n{output}")
    return round(float(found[1]), 4)


def main() -> None:
    """Run the settings that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folder", type=Path, default=Path("accuracy-runs"), help="parts and checkpoints go here")
    parser.add_argument("--out", type=Path, default=Path("accuracy.csv"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    settings = [(name, seed, ranks) for name in options.runs for seed in options.seeds for ranks in options.ranks]
    with options.out.open("w", newline="") as file:
        for name, seed, ranks in track(settings, "training"):
            rows.append(row(name, options.data, options.folder, ranks, seed))
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if len(rows) == 1:
                writer.writeheader()
            writer.writerow(rows[-1])
            file.flush()
    table = Table(*rows[0], title="test accuracy, last epoch and best on the validation nodes")
    for found in rows:
        table.add_row(*(str(value) for value in found.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
