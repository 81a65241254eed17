"""Accuracy over time (NeutronStar, Figure 14): the harness's trainings, validated every few epochs.

    python -m experiments.neutronstar.accuracy --out figures

All three backends are exact. They reach the same accuracy after the same number of epochs, up to the random numbers of
dropout, but in different times. Seconds are those of training epochs, without validation.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

from experiments.catgnn.graphs import show, write
from experiments.cluster import why_unshaped
from experiments.harness import Setting, train
from experiments.machine import SOME_FAILED

BACKENDS = ("cache", "comm", "hybrid")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--nodes", type=int, default=40_000)
    cli.add_argument("--degree", type=int, default=12)
    cli.add_argument("--hidden", type=int, default=128)
    cli.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    cli.add_argument("--network", default="100mbit", help="rate of the hosts' links")
    cli.add_argument("--epochs", type=int, default=60)
    cli.add_argument("--every", type=int, default=5, help="epochs between two validations")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    cli.add_argument("--out", type=Path, default=Path("figures"))
    return cli


def setting_of(backend: str, hosts: int, options: argparse.Namespace) -> Setting:
    """Return the setting of one training."""
    return Setting(
        name=backend,
        graph_args={"num_nodes": options.nodes, "avg_degree": options.degree, "num_features": 64},
        model_args={"in_channels": -1, "hidden_channels": options.hidden, "num_layers": 3, "out_channels": 10,
                    "dropout": 0.5},
        partitioner="metis",
        backend=backend,
        ranks=hosts,
        network="unshaped" if why_unshaped() else options.network,
        epochs=options.epochs,
        timeline=False,
        fit={"trainer": {"check_val_every_n_epoch": options.every}},
    )  # fmt: skip


def rows_of(run: dict[str, Any], hosts: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per validation; a single row with a note if the training failed."""
    head = {
        "backend": run["setting"], "seed": run["seed"], "nodes": options.nodes, "degree": options.degree,
        "hidden": options.hidden, "hosts": hosts, "network": run["network"], "every": options.every,
        "epochs": options.epochs,
    }  # fmt: skip
    if run["note"]:
        return [{**head, "epoch": "", "seconds": "", "val_acc": "", "note": run["note"]}]
    slowest: dict[int, float] = {}
    for row in run["epochs"]:
        slowest[int(row["epoch"])] = max(slowest.get(int(row["epoch"]), 0.0), row["epoch_s"])
    passed = list(itertools.accumulate(slowest[epoch] for epoch in sorted(slowest)))
    return [
        {**head, "epoch": epoch, "seconds": round(passed[epoch], 4), "val_acc": value, "note": ""}
        for epoch, value in run["scores"]
    ]


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for turn, (seed, hosts) in enumerate(itertools.product(options.seeds, options.hosts)):
            first = turn % len(options.backends)
            for backend in [*options.backends[first:], *options.backends[:first]]:
                run = train(setting_of(backend, hosts, options), seed, work=Path(work), traces=Path(work))
                rows += rows_of(run, hosts, options)
                last = rows[-1]
                reached = last["note"] or f"{last['val_acc']} after {last['seconds']} s"
                print(f"{backend}, {hosts} hosts, seed {seed}: {reached}", flush=True)
                write(rows, options.out / "accuracy.csv", threads=1)
    columns = ("hosts", "backend", "seed", "epoch", "seconds", "val_acc", "note")
    show([{name: row[name] for name in columns} for row in rows], "Accuracy over time")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
