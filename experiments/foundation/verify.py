"""Compares one training step on N processes with one on one process, for common layers, on real and generated graphs.

    python -m experiments.foundation.verify --data DATA --ranks 2 3 4 --out figures

Prints a table and writes a CSV. DATA holds ``Planetoid/`` and ``LINKXDataset/`` in the layout of PyG's dataset classes;
PyG writes its processed files there.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE

from experiments.machine import cores, provenance
from pygdist import GraphDataModule
from pygdist.backends import CommBackend
from pygdist.commands.verify import verify

MODELS = {
    "GCN": lambda i, o: GCN(i, 16, 2, o),
    "SAGE mean": lambda i, o: GraphSAGE(i, 16, 2, o),
    "SAGE max": lambda i, o: GraphSAGE(i, 16, 2, o, aggr="max"),
    "GIN": lambda i, o: GIN(i, 16, 2, o),
    "GAT": lambda i, o: GAT(i, 16, 2, o, heads=4),
    "GATv2": lambda i, o: GAT(i, 16, 2, o, heads=4, v2=True),
}
GRAPHS = {
    "Cora": ("Planetoid", {"name": "Cora"}, 1433, 7),
    "cornell5": ("LINKXDataset", {"name": "cornell5"}, 4735, 2),
    "sbm": ("sbm", {"num_nodes": 2000}, 64, 10),
}


def row(data: Path | None, graph: str, name: str, ranks: int, cache: Path, *, double: bool) -> dict[str, object]:
    """Return the largest relative difference of one setting, and the quantity that has it."""
    dataset, arguments, num_features, num_classes = GRAPHS[graph]
    root = {} if graph == "sbm" else {"root": str(_folder(data, dataset))}
    module = GraphDataModule(dataset, {**root, **arguments}, cache_dir=cache)
    torch.manual_seed(0)
    model: nn.Module = MODELS[name](num_features, num_classes)
    start = time.perf_counter()
    differences, reference = verify(model, CommBackend(), module, world_size=ranks, double=double)
    worst = max(differences, key=lambda key: differences[key].relative)
    return {
        "graph": graph,
        "model": name,
        "ranks": ranks,
        "reference": reference,
        "dtype": "float64" if double else "float32",
        "relative": differences[worst].relative,
        "quantity": worst,
        "seconds": round(time.perf_counter() - start, 1),
    }


def _folder(data: Path | None, dataset: str) -> Path:
    if data is None or not (data / dataset).is_dir():
        raise SystemExit(f"{dataset}: give --data, a folder with {dataset}/ in the layout of PyG's dataset class")
    return data / dataset


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument(
        "--data", type=Path, help="folder with Planetoid/ and LINKXDataset/ in the layout of PyG's dataset classes"
    )
    cli.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    cli.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    cli.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    cli.add_argument("--double", action="store_true", help="compute in float64")
    cli.add_argument("--out", type=Path, default=Path("figures"), help="folder for verify.csv")
    return cli


def main() -> None:
    """Run the settings that the command line asks for."""
    options = parser().parse_args()
    rows = []
    facts = provenance(cores())
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, (options.out / "verify.csv").open("w", newline="") as file:
        for graph in options.graphs:
            for name in options.models:
                for ranks in options.ranks:
                    rows.append(row(options.data, graph, name, ranks, Path(cache), double=options.double))
                    writer = csv.DictWriter(file, fieldnames=[*rows[0], *facts])
                    if len(rows) == 1:
                        writer.writeheader()
                    writer.writerow({**rows[-1], **facts})
                    file.flush()
    table = Table(*rows[0], title="one training step, N processes against one")
    for shown in rows:
        table.add_row(*(f"{value:.1e}" if name == "relative" else str(value) for name, value in shown.items()))
    Console().print(table)


if __name__ == "__main__":
    main()
