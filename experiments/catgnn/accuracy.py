"""Accuracy of models trained on parts and averaged, beside models of the whole graph (CATGNN, Figures 2, 7, 11, 12).

One process trains all parts; the result is that of one process per part (tests/lightning/test_averaging.py).

python -m experiments.catgnn.accuracy --data DATA --graphs Cora --models GCN --parts 1 4 --out figures
"""

from __future__ import annotations

import argparse
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

from experiments.catgnn.graphs import rows_before, show, write
from pygdist import GraphDataModule, NodeClassifier
from pygdist.backends import ReplicaBackend
from pygdist.graph import degree_corrected_sbm, load_graph, prepare
from pygdist.lightning import ModelAveragingStrategy
from pygdist.sampler import NeighborBatches

#: Splits of the paper's Table 3; OTHERS, from Sec. 5.1, where the table gives none.
SPLITS = {"Cora": (0.45, 0.18, 0.37), "CiteSeer": (0.55, 0.15, 0.30)}
OTHERS = (0.70, 0.15, 0.15)
DATASETS = {"Cora": "Planetoid", "CiteSeer": "Planetoid", "cornell5": "LINKXDataset"}
GENERATED: dict[str, dict[str, Any]] = {
    "generated": {"num_nodes": 8000, "num_classes": 10, "avg_degree": 10, "num_features": 32},
}
MODELS = {"GCN": GCN, "GAT": GAT, "GraphSAGE": GraphSAGE}
HEADS = 4
#: Hidden units and batch size where the paper's would take hours: a mini-batch of cornell5 is nearly the whole graph.
SIZES = {"cornell5": (64, 0)}

#: Columns that identify a training, and columns with its results.
CASE = (
    "graph", "model", "partitioner", "parts", "sync_every", "hops", "layers", "seed", "hidden", "epochs", "every",
    "batch_size",
)  # fmt: skip
RESULTS = ("test_acc", "test_acc_on_parts", "val_acc", "train_s")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument(
        "--data", type=Path, help="folder with Planetoid/ and LINKXDataset/ in the layout of PyG's dataset classes"
    )
    cli.add_argument("--graphs", nargs="+", choices=[*DATASETS, *GENERATED], default=[*DATASETS, *GENERATED])
    cli.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    cli.add_argument(
        "--parts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of parts; 1 trains on the whole graph"
    )
    cli.add_argument("--sync_every", type=int, nargs="+", default=[1], help="epochs between two averages")
    cli.add_argument("--hops", type=int, nargs="+", default=[1], help="hops of neighbours that a part keeps")
    cli.add_argument("--partitioners", nargs="+", default=["spring"])
    cli.add_argument("--layers", type=int, nargs="+", default=[2])
    cli.add_argument("--hidden", type=int, help="hidden units (default: the paper's 256; 64 on cornell5)")
    cli.add_argument("--epochs", type=int, default=100)
    cli.add_argument("--every", type=int, default=1, help="epochs between two validations")
    cli.add_argument(
        "--batch_size", type=int, help="batch size of GraphSAGE (default: 512; 0 on cornell5); 0 trains parts whole"
    )
    cli.add_argument("--fan_out", type=int, nargs="+", default=[25, 10])
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    cli.add_argument("--out", type=Path, default=Path("figures"))
    cli.add_argument("--name", default="accuracy", help="name of the table")
    cli.add_argument("--resume", action="store_true", help="keep the rows of OUT/NAME.csv and add missing ones")
    return cli


@cache
def graph_of(name: str, folder: Path | None, seed: int) -> Data:
    """Return an undirected graph with the paper's split, drawn from a seed."""
    if name in GENERATED:
        data = degree_corrected_sbm(seed=0, **GENERATED[name])
    elif folder is None:
        raise SystemExit(f"{name}: give --data, a folder with {DATASETS[name]}/ in the layout of PyG's dataset class")
    else:
        data = load_graph(DATASETS[name], root=str(folder / DATASETS[name]), name=name)
    split = SPLITS.get(name, OTHERS)
    prepared, _ = prepare(data, symmetrize=True, remove_duplicates=True, split=split, split_seed=seed)
    return prepared


def model_of(name: str, data: Data, hidden: int, layers: int) -> nn.Module:
    """Return a model with the paper's sizes."""
    more = {"heads": HEADS} if name == "GAT" else {}
    num_classes = int(data.y.max()) + 1
    model: nn.Module = MODELS[name](
        data.num_features, hidden, num_layers=layers, out_channels=num_classes, dropout=0.5, **more
    )
    return model


class Times(pl.Callback):
    """Records the seconds of training epochs and the accuracy of every validation."""

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
    """Train once, test the model that is best on the validation nodes, and return the results."""
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
    module.exact_evaluation = False  # on the neighbours that parts keep, as in the paper
    on_parts = trainer.test(module, datamodule=graph, ckpt_path="best", verbose=False)[0]["test_acc"]
    val = max(score for _, score in times.scores)
    return dict(zip(RESULTS, map(str, (tested, on_parts, val, times.seconds)), strict=True))


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each different training once."""
    names = ("graph", "model", "partitioner", "parts", "sync_every", "hops", "layers", "seed")
    lists = (
        options.graphs, options.models, options.partitioners, options.parts, options.sync_every, options.hops,
        options.layers, options.seeds,
    )  # fmt: skip
    seen = set()
    for values in itertools.product(*lists):
        case = dict(zip(names, values, strict=True))
        if case["parts"] == 1:  # options of parts do not matter to the whole graph
            case |= {"sync_every": 1, "hops": 1, "partitioner": ""}
        hidden, batch_size = SIZES.get(case["graph"], (256, 512))
        case["hidden"] = options.hidden or hidden
        case |= {"epochs": options.epochs, "every": options.every}
        batch_size = batch_size if options.batch_size is None else options.batch_size
        case["batch_size"] = batch_size if case["model"] == "GraphSAGE" else 0
        if (key := tuple(case.values())) not in seen:
            seen.add(key)
            yield case


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    path = options.out / f"{options.name}.csv"
    rows = rows_before(path, CASE) if options.resume else {}
    with tempfile.TemporaryDirectory() as work:
        for case in cases(options):
            key = tuple(str(case[name]) for name in CASE)
            if key not in rows:
                rows[key] = {**dict(zip(CASE, key, strict=True)), **train(options, case, Path(work))}
                print(*(f"{name}={value}" for name, value in rows[key].items()), flush=True)
                write(rows.values(), path, threads=torch.get_num_threads())
    show([{name: row[name] for name in (*CASE, *RESULTS)} for row in rows.values()], "Accuracy")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
