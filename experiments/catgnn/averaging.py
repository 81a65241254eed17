"""Models averaged from time to time, or gradients in every step (CATGNN, Figures 9 and 11), on emulated hosts.

python -m experiments.catgnn.averaging --averaging model gradient --out figures
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.catgnn.graphs import show, write
from experiments.harness import Setting, train
from experiments.machine import SOME_FAILED

MODELS: dict[str, dict[str, Any]] = {"GCN": {}, "GAT": {"heads": 4}, "GraphSAGE": {}}
CLASSES = 10


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--nodes", type=int, default=20_000)
    cli.add_argument("--degree", type=float, default=10)
    cli.add_argument("--models", nargs="+", choices=MODELS, default=["GraphSAGE"])
    cli.add_argument("--averaging", nargs="+", choices=["model", "gradient"], default=["model"])
    cli.add_argument("--sync_every", type=int, nargs="+", default=[1], help="epochs between two averages of models")
    cli.add_argument("--hidden", type=int, default=256)
    cli.add_argument("--fan_out", type=int, nargs="+", default=[25, 10])
    cli.add_argument("--batch_size", type=int, default=512, help="nodes of a mini-batch; 0 trains parts whole")
    cli.add_argument("--hosts", type=int, default=4)
    cli.add_argument("--network", default="1gbit")
    cli.add_argument("--epochs", type=int, default=50)
    cli.add_argument("--every", type=int, default=1, help="epochs between two validations")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--curves", action="store_true", help="write one row per validation instead of per training")
    cli.add_argument("--out", type=Path, default=Path("figures"))
    cli.add_argument("--name", default="averaging", help="name of the table")
    return cli


def setting_of(model: str, averaging: str, sync_every: int, options: argparse.Namespace) -> Setting:
    """Return the setting of one training."""
    strategy: str | dict[str, Any] = "graph_ddp"
    if averaging == "model":
        strategy = {
            "class_path": "pygdist.lightning.ModelAveragingStrategy",
            "init_args": {"sync_every": sync_every},
        }
    sizes = {"in_channels": -1, "hidden_channels": options.hidden, "num_layers": 2, "out_channels": CLASSES}
    batches = {
        "class_path": "pygdist.sampler.NeighborBatches",
        "init_args": {"fan_out": options.fan_out, "batch_size": options.batch_size},
    }
    return Setting(
        name=f"{model}, {averaging}, {sync_every}",
        graph="sbm",
        graph_args={"num_nodes": options.nodes, "avg_degree": options.degree, "num_features": 32},
        prepare={"placement": "replicas", "split": [0.7, 0.15, 0.15]},
        model=f"torch_geometric.nn.models.{model}",
        model_args={**sizes, "dropout": 0.5, **MODELS[model]},
        partitioner="spring",
        backend="replica",
        strategy=strategy,
        ranks=options.hosts,
        network=options.network,
        epochs=options.epochs,
        timeline=False,
        test=True,
        fit={
            "trainer": {"check_val_every_n_epoch": options.every},
            "data": {"batches": batches} if options.batch_size else {},
        },
    )


def rows_of(run: dict[str, Any], head: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per training, or per validation; a single row with a note if the training failed."""
    head = {
        **head, "seed": run["seed"], "hosts": options.hosts, "network": options.network, "nodes": options.nodes,
        "degree": options.degree, "hidden": options.hidden, "epochs": options.epochs, "every": options.every,
        "batch_size": options.batch_size,
    }  # fmt: skip
    empty = (
        {"epoch": "", "val_acc": ""} if options.curves else {"test_acc": "", "sync_s": "", "sent_mb": "", "train_s": ""}
    )
    if run["note"]:
        return [{**head, **empty, "note": run["note"]}]
    if options.curves:
        return [{**head, "epoch": epoch, "val_acc": value, "note": ""} for epoch, value in run["scores"]]
    seconds: dict[float, float] = defaultdict(float)
    for row in run["epochs"]:
        seconds[row["rank"]] += row["exchange_s"]
    epochs: dict[float, float] = defaultdict(float)
    for row in run["epochs"]:
        epochs[row["epoch"]] = max(epochs[row["epoch"]], row["epoch_s"])
    figures = {
        "test_acc": run["test_acc"],
        "sync_s": min(seconds.values()),  # the rank that waits least for others
        "sent_mb": sum(row["sent_bytes"] for row in run["epochs"]) / 1e6,
        "train_s": sum(epochs.values()),
    }
    return [{**head, **figures, "note": ""}]


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for seed in options.seeds:
            for model in options.models:
                for averaging in options.averaging:
                    for sync_every in options.sync_every if averaging == "model" else [0]:
                        setting = setting_of(model, averaging, sync_every, options)
                        run = train(setting, seed, work=Path(work), traces=Path(work))
                        head = {"model": model, "averaging": averaging, "sync_every": sync_every}
                        rows += rows_of(run, head, options)
                        print(f"{setting.name}, seed {seed}: {rows[-1]['note'] or rows[-1]}", flush=True)
                        write(rows, options.out / f"{options.name}.csv", threads=1)
    columns = (
        "model",
        "averaging",
        "sync_every",
        "seed",
        "epoch",
        "val_acc",
        "test_acc",
        "sync_s",
        "sent_mb",
        "train_s",
    )
    show([{name: row[name] for name in columns if name in row} for row in rows], "Averages")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
