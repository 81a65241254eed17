"""Mini-batch training by ``pull`` and by PyG's NeighborLoader with DDP: seconds per epoch of two processes.

    python -m experiments.p3.loaders --out results

The two train in turns, each in processes of its own, with the same model, fan-outs, batch size and optimiser. PyG's
processes hold the whole graph; those of ``pull`` a part each. PyG's loader needs torch_sparse or pyg-lib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.catgnn.graphs import show, write
from experiments.machine import SOME_FAILED, provenance

LOADERS = ("pygdist, pull", "PyG, NeighborLoader")
MODELS = ("GraphSAGE", "GCN", "GAT")
COLUMNS = ("model", "loader", "epoch_s", "epoch_s_min", "epoch_s_max", "steps", "train_acc", "note")
RANKS, HIDDEN, CLASSES, FAN_OUT, RATE, DECAY = 2, 32, 47, [25, 10], 0.01, 5e-4
WARM_UP = 1  # epochs that do not count


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    cli.add_argument("--scale", type=float, default=0.05, help="scale of the graph like ogbn-products")
    cli.add_argument("--batch", type=int, default=1000, help="training nodes per batch on each process")
    cli.add_argument("--epochs", type=int, default=5, help="epochs that count, of each training")
    cli.add_argument("--rounds", type=int, default=3, help="trainings of each contender")
    cli.add_argument("--out", type=Path, default=Path("figures"))
    cli.add_argument("--train", help=argparse.SUPPRESS)
    return cli


def of_pygdist(job: dict[str, Any]) -> None:
    """Train by ``pull``; rank 0 prints the seconds of each epoch, its steps and the accuracy of the last."""
    import lightning.pytorch as pl
    import torch
    from torch_geometric import nn

    from pygdist import GraphDataModule, NodeClassifier
    from pygdist.sampler import NeighborBatches

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.steps: list[int] = [0]

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            self.steps.append(trainer.global_step)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = GraphDataModule(
        "products-like", {"scale": job["scale"]}, partitioner="metis", cache_dir=job["folder"],
        batches=NeighborBatches(FAN_OUT, job["batch"]),
    )  # fmt: skip
    net = getattr(nn, job["model"])(100, HIDDEN, num_layers=2, out_channels=CLASSES)
    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu", devices=RANKS, strategy="graph_ddp", max_epochs=job["epochs"] + WARM_UP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(NodeClassifier(net, "pull", lr=RATE, weight_decay=DECAY), datamodule=data)
    if trainer.global_rank == 0:
        steps = clock.steps[-1] - clock.steps[-2]
        accuracy = float(trainer.callback_metrics["train_acc"])
        print(json.dumps({"seconds": clock.seconds, "steps": steps, "accuracy": accuracy}), flush=True)


def of_pyg(job: dict[str, Any]) -> None:
    """Train by PyG's loader; rank 0 prints as :func:`of_pygdist` does."""
    import torch

    from pygdist.graph import load_graph, prepare

    data, _ = prepare(load_graph("products-like", scale=job["scale"]))
    torch.multiprocessing.spawn(_pyg_rank, (job, data, str(Path(job["folder"]) / "rendezvous")), nprocs=RANKS)


def _pyg_rank(rank: int, job: dict[str, Any], data: Any, meeting: str) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch_geometric import nn
    from torch_geometric.loader import NeighborLoader

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    net = DistributedDataParallel(getattr(nn, job["model"])(100, HIDDEN, num_layers=2, out_channels=CLASSES))
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, weight_decay=DECAY)
    train = data.train_mask.nonzero().view(-1)
    mine = train.split(-(-train.numel() // RANKS))[rank]
    loader = NeighborLoader(data, FAN_OUT, input_nodes=mine, batch_size=job["batch"], shuffle=True)
    seconds, accuracy = [], 0.0
    for _ in range(job["epochs"] + WARM_UP):
        start, hits = time.perf_counter(), 0
        for batch in loader:
            out, y = net(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
            optimizer.zero_grad()
            cross_entropy(out, y).backward()
            optimizer.step()
            hits += int((out.argmax(dim=1) == y).sum())
        seconds.append(time.perf_counter() - start)
        accuracy = hits / mine.numel()
    if rank == 0:
        print(json.dumps({"seconds": seconds, "steps": len(loader), "accuracy": accuracy}), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # a process group that ends with the interpreter may wait for its own thread for ever


def train(loader: str, job: dict[str, Any]) -> dict[str, Any]:
    """Train once in processes of its own; return what rank 0 said, or the last line of an error as ``note``."""
    with tempfile.TemporaryDirectory() as folder:
        named = {**job, "loader": loader, "folder": job["folder"] if loader == LOADERS[0] else folder}
        command = [sys.executable, "-m", "experiments.p3.loaders", "--train", json.dumps(named)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    said = [line for line in run.stdout.splitlines() if line.startswith('{"seconds"')]
    if run.returncode or not said:
        return {"note": (run.stderr.strip().splitlines() or ["no answer"])[-1]}
    answer: dict[str, Any] = json.loads(said[-1])
    return answer


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if options.train:
        job = json.loads(options.train)
        (of_pygdist if job["loader"] == LOADERS[0] else of_pyg)(job)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            job = {"model": model, "scale": options.scale, "batch": options.batch, "epochs": options.epochs}
            answers: dict[str, list[dict[str, Any]]] = {loader: [] for loader in LOADERS}
            for number in range(options.rounds):
                for loader in LOADERS[:: 1 if number % 2 == 0 else -1]:
                    answers[loader].append(train(loader, {**job, "folder": folder}))
            rows += [row_of(model, loader, answers[loader]) | provenance(1) for loader in LOADERS]
            write(rows, options.out / "loaders.csv")
            print(
                f"{model}: " + ", ".join(f"{row['loader']} {row['epoch_s'] or row['note']}" for row in rows[-2:]),
                flush=True,
            )
    show([{column: row[column] for column in COLUMNS} for row in rows], "Mini-batches beside PyG's")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


def row_of(model: str, loader: str, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a contender over its trainings."""
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), "model": model, "loader": loader}
    if failed := next((one for one in answers if "note" in one), None):
        return {**row, "note": failed["note"]}
    epochs = [seconds for one in answers for seconds in one["seconds"][WARM_UP:]]
    return {
        **row, "epoch_s": statistics.median(epochs), "epoch_s_min": min(epochs), "epoch_s_max": max(epochs),
        "steps": answers[0]["steps"], "train_acc": statistics.mean(one["accuracy"] for one in answers),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
