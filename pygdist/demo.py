"""``make demo``: train one GCN on the built-in graph with plain PyG, then with pygdist on one process and on several.

All runs start from the same parameters and train the same number of epochs with dropout 0, so their losses can be
compared number by number. Each run has its own, fresh processes. The demo needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, MLP

from pygdist.graph import load_graph
from pygdist.lightning import ExchangeMonitor, GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.memory.machine import peak_rss_bytes
from pygdist.memory.scratch import ScratchFolder

HIDDEN, LEARNING_RATE, WEIGHT_DECAY = 64, 0.01, 5e-4
_TOLERANCE = 1e-3  # of losses in float32: Adam divides by small numbers, so rounding grows along the run
_WARM_UP = 3  # epochs that are not timed: memory is allocated, degrees and transposes are computed

#: Where the system can, a server forks the processes of all runs.
_START: Literal["forkserver", "spawn"] = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Results of a run."""

    losses: Sequence[float]  # mean training loss of each epoch, before its step
    accuracy: float  # share of test nodes classified correctly after the last epoch
    epoch_s: Sequence[float]
    sent_bytes: int = 0  # in the last epoch, summed over ranks
    peak_gib: float  # resident memory, summed over processes
    threads: int  # of each process

    @property
    def median_epoch_s(self) -> float:
        """Median seconds per epoch after warm-up."""
        return statistics.median(self.epoch_s[_WARM_UP:] or self.epoch_s)


def train_with_pyg(model: nn.Module, data: Data, epochs: int) -> Run:
    """Train in an ordinary full-batch loop without pygdist: the reference. An MLP is called without the edges."""
    inputs = (data.x,) if isinstance(model, MLP) else (data.x, data.edge_index)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses, seconds = [], []
    for _ in range(epochs):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(*inputs)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    model.eval()
    with torch.no_grad():
        hit = _hits(model(*inputs), data)
    accuracy, peak_gib, threads = float(hit.float().mean()), peak_rss_bytes() / 2**30, torch.get_num_threads()
    return Run(losses=losses, accuracy=accuracy, epoch_s=seconds, peak_gib=peak_gib, threads=threads)


def train_with_pygdist(model: nn.Module, data: Data, epochs: int, *, ranks: int, folder: Path) -> Run:
    """Train with Lightning and backend ``comm`` on ``ranks`` processes, each with a range of the nodes.

    The model is trained in place; the parts and the log go to ``folder``.
    """
    module = NodeClassifier(model, backend="comm", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    graph = GraphDataModule(data, partitioner="chunk", cache_dir=folder / "parts")
    logger = CSVLogger(folder, name="log", version=ranks)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy=GraphDDPStrategy(start_method=_START), max_epochs=epochs,
        limit_val_batches=0, log_every_n_steps=1, logger=logger, callbacks=[ExchangeMonitor(), _Finish()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=graph)
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def logged(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row[name]]

    return Run(
        losses=logged("train_loss"),
        accuracy=logged("test_acc")[-1],
        epoch_s=logged("epoch_s"),
        sent_bytes=round(logged("sent_bytes_total")[-1]),
        peak_gib=logged("peak_gib_total")[-1],
        threads=int(logged("threads")[-1]),
    )


class _Finish(pl.Callback):
    """Logs the test accuracy when training ends, so that no processes are started again for a test."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, NodeClassifier)
        assert trainer.logger is not None
        shard = pl_module.backend.shard
        pl_module.eval()
        with torch.no_grad():
            hit = _hits(pl_module(shard), shard)
        correct, count = pl_module.communicator.gather([float(hit.sum()), hit.numel()]).sum(dim=0).tolist()
        trainer.logger.log_metrics({"test_acc": correct / count, "threads": torch.get_num_threads()})


def _hits(out: Tensor, graph: Any) -> Tensor:
    """Tell for each test node if it is classified correctly; ``graph`` is the whole graph or a rank's shard."""
    hit: Tensor = out[graph.test_mask].argmax(dim=-1) == graph.y[graph.test_mask]
    return hit


def _references(gcn: nn.Module, mlp: nn.Module, data: Data, epochs: int) -> tuple[Run, Run]:
    # on copies, since the parent shares these parameters and needs them untrained; the GCN first, for its peak memory
    return train_with_pyg(copy.deepcopy(gcn), data, epochs), train_with_pyg(copy.deepcopy(mlp), data, epochs)


def _context() -> BaseContext:
    """Return the way to start processes: the server imports what takes longest, once for all."""
    context = get_context(_START)
    if _START == "forkserver":
        context.set_forkserver_preload(["pygdist.lightning"])  # no effect on a server that runs
    return context


def compare(console: Console, *, nodes: int, epochs: int, ranks: int, seed: int) -> tuple[Run, Run, Run]:
    """Train the same GCN three ways, print progress and a table.

    Returns:
        The runs of plain PyG, of pygdist on one process, and of pygdist on ``ranks`` processes.
    """
    data = load_graph("sbm", num_nodes=nodes, seed=seed)
    classes = int(data.y.max()) + 1
    console.print(f"graph: {nodes:,} nodes, {data.num_edges:,} edges, {data.num_features} features, {classes} classes")
    console.print(f"model: GCN, 2 layers, hidden {HIDDEN}, dropout 0; {epochs} epochs of Adam on the full graph")
    torch.manual_seed(seed)
    gcn = GCN(data.num_features, HIDDEN, num_layers=2, out_channels=classes, dropout=0.0)
    mlp = MLP([data.num_features, HIDDEN, classes], norm=None)
    start = time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[{time.perf_counter() - start:4.0f} s] {text}", markup=False, highlight=False)

    say("plain PyG on a single process, and an MLP, which does not see the edges")
    with ProcessPoolExecutor(1, mp_context=_context()) as executor:
        pyg, no_edges = executor.submit(_references, gcn, mlp, data, epochs).result()
    runs = []
    with contextlib.closing(ScratchFolder()) as scratch:
        for world_size in (1, ranks):
            say(f"pygdist on {world_size} process{'es' if world_size > 1 else ''}")
            model = copy.deepcopy(gcn)
            runs.append(train_with_pygdist(model, data, epochs, ranks=world_size, folder=scratch.path))
    say("done")
    one, many = runs
    console.print(_table((pyg, one, many), ranks))
    console.print(f"An MLP, which does not see the edges, classifies {no_edges.accuracy:.2%} of the test nodes.")
    return pyg, one, many


def _table(runs: Sequence[Run], ranks: int) -> Table:
    table = Table("", title="The same GCN, three ways")
    for name in ("single process\nplain PyG", "1 rank\npygdist", f"{ranks} ranks\npygdist"):
        table.add_column(name, justify="right")
    table.add_row("final loss", *(f"{run.losses[-1]:.7f}" for run in runs))
    differences = (f"{largest_difference(run, runs[0]):.1e}" for run in runs[1:])
    table.add_row("largest difference in loss, all epochs", "", *differences)
    table.add_row("test accuracy", *(f"{run.accuracy:.2%}" for run in runs))
    table.add_row("seconds per epoch (median)", *(f"{run.median_epoch_s:.4f}" for run in runs))
    table.add_row("bytes exchanged per epoch", *(f"{run.sent_bytes:,}" for run in runs))
    table.add_row("peak memory, all processes", *(f"{run.peak_gib:.2f} GiB" for run in runs))
    table.add_row("processes x threads", *(f"{n} x {run.threads}" for n, run in zip((1, 1, ranks), runs, strict=True)))
    return table


def largest_difference(run: Run, reference: Run) -> float:
    """Return the largest absolute difference in loss over all epochs."""
    return max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))


def _quiet() -> None:
    """Silence Lightning's advice, which is for authors of training scripts."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and print one table; return 0 if the losses of all epochs agree within 1e-3, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m pygdist.demo", description="Train one GCN with plain PyG and with pygdist, and compare."
    )
    parser.add_argument("--nodes", type=int, default=20_000, help="nodes of the graph (default: 20000)")
    parser.add_argument("--epochs", type=int, default=60, help="training epochs (default: 60)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the distributed run (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the graph and of the parameters (default: 0)")
    options = parser.parse_args(argv)
    _quiet()
    pyg, one, many = compare(Console(), **vars(options))
    return int(max(largest_difference(run, pyg) for run in (one, many)) > _TOLERANCE)


if __name__ == "__mp_main__":  # a spawned rank imports this file again
    _quiet()

if __name__ == "__main__":
    raise SystemExit(main())
