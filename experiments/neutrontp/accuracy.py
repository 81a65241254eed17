"""Accuracy by epoch (NeutronTP, Figure 16) of a model and its decoupled form, on the same graph and split.

python -m experiments.neutrontp.accuracy --data DATA --out figures
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from experiments.catgnn.graphs import show, write
from experiments.harness import Setting, train
from experiments.machine import SOME_FAILED

GRAPHS: dict[str, dict[str, Any]] = {
    "Cora": {"graph": "Planetoid", "graph_args": {"root": "{data}/Planetoid", "name": "Cora"}, "classes": 7},
    "cornell5": {
        "graph": "LINKXDataset", "graph_args": {"root": "{data}/LINKXDataset", "name": "cornell5"}, "classes": 2,
        "prepare": {"split": [0.5, 0.25, 0.25]},
    },
    "generated": {"graph": "sbm", "graph_args": {"num_nodes": 4000, "avg_degree": 6}, "classes": 10},
}  # fmt: skip
FORMS = ("coupled", "decoupled")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--data", help="folder with Planetoid/ and LINKXDataset/, for Cora and cornell5")
    cli.add_argument("--graphs", nargs="+", choices=GRAPHS, default=["Cora", "cornell5"])
    cli.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    cli.add_argument("--hidden", type=int, default=64)
    cli.add_argument("--hosts", type=int, default=4)
    cli.add_argument("--epochs", type=int, default=100)
    cli.add_argument("--every", type=int, default=5, help="epochs between two validations")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    cli.add_argument("--out", type=Path, default=Path("figures"))
    return cli


def setting_of(graph: str, form: str, options: argparse.Namespace) -> Setting:
    """Return the setting of one training."""
    dataset = GRAPHS[graph]
    arguments = {
        "in_channels": -1, "hidden_channels": options.hidden, "num_layers": 2, "out_channels": dataset["classes"],
        "dropout": 0.5,
    }  # fmt: skip
    made = {"class_path": "torch_geometric.nn.models.GCN", "init_args": arguments}
    return Setting(
        name=f"{graph}, {form}",
        graph=dataset["graph"],
        graph_args=dataset["graph_args"],
        prepare=dataset.get("prepare", {}),
        model=made["class_path"] if form == "coupled" else "pygdist.nn.decoupled.decouple",
        model_args=arguments if form == "coupled" else {"model": made},
        backend="tensor",
        ranks=options.hosts,
        epochs=options.epochs,
        timeline=False,
        fit={"trainer": {"check_val_every_n_epoch": options.every}},
        places={"data": options.data or ""},
    )


def rows_of(run: dict[str, Any], graph: str, form: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per validation; a single row with a note if the training failed."""
    head = {
        "graph": graph, "form": form, "seed": run["seed"], "hosts": options.hosts, "hidden": options.hidden,
        "every": options.every, "epochs": options.epochs,
    }  # fmt: skip
    if run["note"]:
        return [{**head, "epoch": "", "val_acc": "", "note": run["note"]}]
    return [{**head, "epoch": epoch, "val_acc": value, "note": ""} for epoch, value in run["scores"]]


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for graph in options.graphs:
            for seed in options.seeds:
                for form in options.forms:
                    run = train(setting_of(graph, form, options), seed, work=Path(work), traces=Path(work))
                    rows += rows_of(run, graph, form, options)
                    print(f"{graph}, {form}, seed {seed}: {rows[-1]['note'] or rows[-1]['val_acc']}", flush=True)
                    write(rows, options.out / "accuracy.csv", threads=1)
    columns = ("graph", "form", "seed", "epoch", "val_acc", "note")
    show([{name: row[name] for name in columns} for row in rows], "Accuracy by epoch")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
