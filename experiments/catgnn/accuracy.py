"""Accuracy of models trained on parts and averaged, beside the same on the whole graph (CATGNN, Figures 2, 7, 11, 12).

All parts are trained by one process, which gives what as many processes give (tests/lightning/test_averaging.py).

python -m experiments.catgnn.accuracy --data DATA --graphs Cora --models GCN --parts 1 4 --out figures
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE
from typing_extensions import override

from experiments.catgnn.graphs import show, write
from pygdist import GraphDataModule, NodeClassifier
from pygdist.backends import ReplicaBackend
from pygdist.graph import degree_corrected_sbm, load_graph, prepare
from pygdist.lightning import ModelAveragingStrategy
from pygdist.sampler import NeighborBatches

#: Of the paper's Table 3, and of Sec. 5.1 where it gives none.
SPLITS = {"Cora": (0.45, 0.18, 0.37), "CiteSeer": (0.55, 0.15, 0.30)}
OTHERS = (0.70, 0.15, 0.15)
DATASETS = {"Cora": "Planetoid", "CiteSeer": "Planetoid", "cornell5": "LINKXDataset"}
GENERATED: dict[str, dict[str, Any]] = {
    "generated": {"num_nodes": 8000, "num_classes": 10, "avg_degree": 10, "num_features": 32},
}
MODELS = {"GCN": GCN, "GAT": GAT, "GraphSAGE": GraphSAGE}
HEADS = 4
#: Hidden units and nodes of a mini-batch where the paper's take hours: a mini-batch of cornell5 is nearly the graph.
SIZES = {"cornell5": (64, 0)}

#: What tells one training from another, and what it found.
CASE = (
    "graph", "model", "partitioner", "parts", "sync_every", "hops", "layers", "seed", "hidden", "epochs", "every",
    "batch_size",
)  # fmt: skip
FOUND = ("test_acc", "test_acc_on_parts", "val_acc", "train_s")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--data", type=Path, help="a folder with Planetoid and LINKXDataset")
    found.add_argument("--graphs", nargs="+", choices=[*DATASETS, *GENERATED], default=[*DATASETS, *GENERATED])
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    found.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8], help="1 is training on the whole graph")
    found.add_argument("--sync_every", type=int, nargs="+", default=[1], help="epochs between two averages")
    found.add_argument("--hops", type=int, nargs="+", default=[1], help="of neighbours that a part keeps")
    found.add_argument("--partitioners", nargs="+", default=["spring"])
    found.add_argument("--layers", type=int, nargs="+", default=[2])
    found.add_argument("--hidden", type=int, help="256 by default, as the paper has it; 64 on cornell5")
    found.add_argument("--epochs", type=int, default=100)
    found.add_argument("--every", type=int, default=1, help="epochs between two validations")
    found.add_argument(
        "--batch_size", type=int, help="of GraphSAGE, 512 by default; 0, as on cornell5, takes parts whole"
    )
    found.add_argument("--fan_out", type=int, nargs="+", default=[25, 10])
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    found.add_argument("--out", type=Path, default=Path("figures"))
    found.add_argument("--name", default="accuracy", help="of the table")
    found.add_argument("--resume", action="store_true", help="keep the rows of OUT/NAME.csv, and add those it lacks")
    return found


@cache
def graph_of(name: str, folder: Path | None, seed: int) -> Data:
    """A graph with the paper's split, drawn from a seed; undirected, as the paper has it."""
    if name in GENERATED:
        data = degree_corrected_sbm(seed=0, **GENERATED[name])
    elif folder is None:
        raise SystemExit(f"{name}: give --data, a folder with {DATASETS[name]}/ in the layout of PyG's dataset class")
    else:
        data = load_graph(DATASETS[name], root=str(folder / DATASETS[name]), name=name)
    split = SPLITS.get(name, OTHERS)
    found, _ = prepare(data, symmetrize=True, remove_duplicates=True, split=split, split_seed=seed)
    return found


def model_of(name: str, data: Data, hidden: int, layers: int) -> nn.Module:
    """A model with the paper's sizes."""
    more = {"heads": HEADS} if name == "GAT" else {}
    num_classes = int(data.y.max()) + 1
    found: nn.Module = MODELS[name](
        data.num_features, hidden, num_layers=layers, out_channels=num_classes, dropout=0.5, **more
    )
    return found


class Times(pl.Callback):
    """Seconds of training epochs, and what every validation found."""

    def __init__(self) -> None:
        self.seconds, self.scores = 0.0, list[tuple[int, float]]()

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.is_last_batch:
            self.seconds += time.perf_counter() - self._start

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.scores.append((trainer.current_epoch + 1, float(trainer.callback_metrics["val_acc"])))


def train(options: argparse.Namespace, case: dict[str, Any], work: Path) -> dict[str, str]:
    """What one training found; the best model on the validation nodes is tested."""
    seed = case["seed"]
    pl.seed_everything(seed, verbose=False)
    data = graph_of(case["graph"], options.data, seed)
    fan_out = [*options.fan_out, *options.fan_out[-1:] * case["layers"]][: case["layers"]]
    batches = NeighborBatches(fan_out, case["batch_size"]) if case["batch_size"] else None
    module = NodeClassifier(
        model_of(case["model"], data, case["hidden"], case["layers"]), backend=ReplicaBackend(hops=case["hops"])
    )
    graph = GraphDataModule(
        data, partitioner=case["partitioner"] if case["parts"] > 1 else "chunk", num_parts=case["parts"],
        batches=batches, batch_seed=seed, cache_dir=work / "cache",
    )  # fmt: skip
    times = Times()
    best = ModelCheckpoint(work / "checkpoints", monitor="val_acc", mode="max", enable_version_counter=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ModelAveragingStrategy(sync_every=case["sync_every"]),
        max_epochs=options.epochs,
        check_val_every_n_epoch=max(options.every, 1),
        num_sanity_val_steps=0,
        callbacks=[times, best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=graph)
    tested = trainer.test(module, datamodule=graph, ckpt_path="best", verbose=False)[0]["test_acc"]
    module.exact_evaluation = False  # on what is kept of the neighbours, as the paper has it
    on_parts = trainer.test(module, datamodule=graph, ckpt_path="best", verbose=False)[0]["test_acc"]
    val = max(score for _, score in times.scores)
    return dict(zip(FOUND, map(str, (tested, on_parts, val, times.seconds)), strict=True))


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is trained, each once."""
    names = ("graph", "model", "partitioner", "parts", "sync_every", "hops", "layers", "seed")
    lists = (
        options.graphs, options.models, options.partitioners, options.parts, options.sync_every, options.hops,
        options.layers, options.seeds,
    )  # fmt: skip
    seen = set()
    for values in itertools.product(*lists):
        case = dict(zip(names, values, strict=True))
        if case["parts"] == 1:  # the whole graph is trained once, whatever is done with parts
            case |= {"sync_every": 1, "hops": 1, "partitioner": ""}
        hidden, batch_size = SIZES.get(case["graph"], (256, 512))
        case["hidden"] = options.hidden or hidden
        case |= {"epochs": options.epochs, "every": options.every}
        batch_size = batch_size if options.batch_size is None else options.batch_size
        case["batch_size"] = batch_size if case["model"] == "GraphSAGE" else 0
        if (key := tuple(case.values())) not in seen:
            seen.add(key)
            yield case


def rows_before(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """The rows of a table that an earlier run left, by what was trained."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[name] for name in CASE): row for row in csv.DictReader(file)}


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    path = options.out / f"{options.name}.csv"
    rows = rows_before(path) if options.resume else {}
    with tempfile.TemporaryDirectory() as work:
        for case in cases(options):
            key = tuple(str(case[name]) for name in CASE)
            if key not in rows:
                rows[key] = {**dict(zip(CASE, key, strict=True)), **train(options, case, Path(work))}
                print(*(f"{name}={value}" for name, value in rows[key].items()), flush=True)
                write(rows.values(), path, threads=torch.get_num_threads())
    show([{name: row[name] for name in (*CASE, *FOUND)} for row in rows.values()], "Accuracy")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
