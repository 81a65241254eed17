"""Accuracy by number of parts and by delay (DistGNN, Table 5): all seeds of a case train on the same parts.

python -m experiments.distgnn.accuracy --data DATA --graphs cornell5 --parts 4 --delays cd-0 cd-5 --out figures
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from experiments.catgnn.graphs import rows_before, show, write
from pygdist import distribute
from pygdist.backends import DelayedBackend, Savings, SingleBackend
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ddp_loss_scale
from pygdist.graph import Shard, degree_corrected_sbm, load_graph, prepare
from pygdist.nn.graphsage import GraphSAGEGCN
from pygdist.nn.loss import summed_loss
from pygdist.partition import partition_graph
from pygdist.testing import RankPool

SPLIT = (0.6, 0.2, 0.2)
#: By graph: what makes it, and layers and hidden units of its model.
GRAPHS: dict[str, tuple[dict[str, Any], int, int]] = {
    "cornell5": ({"name": "LINKXDataset", "variant": "cornell5"}, 2, 32),
    "cornell5-pca": ({"name": "LINKXDataset", "variant": "cornell5"}, 2, 32),
    "Cora": ({"name": "Planetoid", "variant": "Cora"}, 2, 16),
    "sbm": ({"num_nodes": 8000, "num_classes": 10, "avg_degree": 10, "num_features": 32}, 3, 64),
}
MODELS = {"GraphSAGE": GraphSAGEGCN, "GCN": GCN}
#: Names as in the paper, and what it leaves open: r, what rows use meanwhile, and gradients.
DELAYS: dict[str, dict[str, Any]] = {
    "cd-0": {},
    "cd-1": {"delay": 1},
    "cd-5": {"delay": 5},
    "cd-10": {"delay": 10},
    "0c": {"delay": "never"},
    "cd-5, keep": {"delay": 5, "keep": True},
    "cd-5, stale": {"delay": 5, "gradients": "stale"},
    "cd-5, keep, stale": {"delay": 5, "keep": True, "gradients": "stale"},
}
#: Principal components in "cornell5-pca" that replace the 4,735 features of cornell5, whose sums take 3 s an epoch.
COMPONENTS = 128
LAST = 10  # epochs whose mean is told beside the best one

CASE = (
    "graph", "model", "parts", "delays", "first_hop", "cheaper_side", "seed", "layers", "hidden", "lr", "epochs",
)  # fmt: skip
RESULTS = ("test_acc", "test_acc_last", "val_acc", "val_acc_one_process", "train_s", "replication")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--data", type=Path, help="folder with Planetoid/ and LINKXDataset/, for Cora and cornell5")
    cli.add_argument("--graphs", nargs="+", choices=GRAPHS, default=["sbm", "cornell5"])
    cli.add_argument("--models", nargs="+", choices=MODELS, default=["GraphSAGE"])
    cli.add_argument("--parts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    cli.add_argument("--delays", nargs="+", choices=DELAYS, default=list(DELAYS))
    cli.add_argument("--first_hop", nargs="+", choices=["on", "off"], default=["off"], help="keep sums of features")
    cli.add_argument("--cheaper_side", nargs="+", choices=["on", "off"], default=["on"])
    cli.add_argument("--lr", type=float, default=0.01)
    cli.add_argument("--epochs", type=int, default=150)
    cli.add_argument("--every", type=int, default=5, help="epochs between two validations, but for the last ones")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    cli.add_argument("--out", type=Path, default=Path("figures"))
    cli.add_argument("--name", default="accuracy", help="name of the table")
    cli.add_argument("--resume", action="store_true", help="keep the rows of OUT/NAME.csv and add missing ones")
    return cli


@cache
def graph_of(name: str, folder: Path | None) -> Data:
    """Return an undirected graph with a split."""
    made = GRAPHS[name][0]
    if "name" not in made:
        data = degree_corrected_sbm(seed=0, **made)
    elif folder is None:
        raise SystemExit(f"{name}: give --data, a folder with {made['name']}/ in the layout of PyG's dataset class")
    else:
        data = load_graph(made["name"], root=str(folder / made["name"]), name=made["variant"])
    if name.endswith("-pca"):
        torch.manual_seed(0)
        data.x = data.x @ torch.pca_lowrank(data.x, q=COMPONENTS, niter=4)[2]
    public = SPLIT if name != "Cora" else None
    prepared, _ = prepare(data, symmetrize=True, remove_duplicates=True, split=public, split_seed=0)
    return prepared


def model_of(case: Mapping[str, Any], num_features: int, num_classes: int) -> nn.Module:
    """Return the model of a case, with the parameters of its seed."""
    torch.manual_seed(case["seed"])
    model: nn.Module = MODELS[case["model"]](
        num_features, case["hidden"], num_layers=case["layers"], out_channels=num_classes, dropout=0.5
    )
    return model


def train(rank: int, world_size: int, store: str, case: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Train on one rank; return the scores of all ranks by epoch, the parameters at the end, and seconds of epochs."""
    torch.set_num_threads(1)
    shard, communicator = Shard.load(store, rank), Communicator(dist.new_group() if world_size > 1 else None)
    backend = DelayedBackend(**DELAYS[case["delays"]])
    backend.bind(shard, communicator)
    savings = Savings(first_hop=case["first_hop"] == "on", cheaper_side=case["cheaper_side"] == "on")
    model = distribute(model_of(case, shard.x.size(1), shard.num_classes or 0), backend=backend, savings=savings)
    trained = DistributedDataParallel(model, **DDP_OPTIONS) if world_size > 1 else model
    torch.manual_seed(case["seed"] * world_size + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=case["lr"], weight_decay=5e-4)
    scores, seconds = [], 0.0
    assert shard.y is not None
    assert shard.train_mask is not None
    for epoch in range(case["epochs"]):
        start = time.perf_counter()
        optimizer.zero_grad()
        total, count = summed_loss(trained.train()(shard.x, shard.adjacency), shard.y, shard.train_mask)
        labelled = communicator.gather([float(count)]).sum()
        (total * ddp_loss_scale(float(labelled), world_size)).backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        if (epoch + 1) % every == 0 or epoch >= case["epochs"] - LAST:
            with torch.no_grad():
                right = model.eval()(shard.x, shard.adjacency).argmax(1) == shard.y
            scores.append([_share(right, mask, communicator) for mask in (shard.val_mask, shard.test_mask)])
    with torch.no_grad():  # in float64, so that rounding moves no node
        right = model.double().eval()(shard.x.double(), shard.adjacency).argmax(1) == shard.y
    val_acc = _share(right, shard.val_mask, communicator)
    backend.unbind()
    state = model.state_dict() if rank == 0 else {}
    return {"scores": scores, "val_acc": val_acc, "state": state, "seconds": seconds}


@torch.no_grad()
def accuracy_of_one(case: Mapping[str, Any], store: Path, state: dict[str, Tensor]) -> float:
    """Return the validation accuracy of parameters by ``single``, in float64; plain PyG copies rows to edges."""
    shard, backend = Shard.load(str(store), 0), SingleBackend()
    backend.bind(shard, Communicator(None))
    model = model_of(case, shard.x.size(1), shard.num_classes or 0).double()
    model.load_state_dict(state)
    out = distribute(model, backend=backend).eval()(shard.x.double(), shard.adjacency)
    assert shard.y is not None
    return _share(out.argmax(1) == shard.y, shard.val_mask, backend.communicator)


def _share(right: Tensor, mask: Tensor | None, communicator: Communicator) -> float:
    assert mask is not None
    counts = communicator.gather([float((right & mask).sum()), float(mask.sum())]).sum(0)
    return float(counts[0] / counts[1])


def measure(pool: RankPool, options: argparse.Namespace, case: dict[str, Any], work: Path) -> dict[str, str]:
    """Train once, and return the results: test accuracy at the best validation accuracy, and of the last epochs."""
    data = graph_of(case["graph"], options.data)
    folder = work / f"{case['graph']}-{case['parts']}"
    meta = partition_graph(data, folder, num_parts=case["parts"], placement="edges")
    ranks = pool.run(train, case["parts"], str(folder), case, options.every)
    scores = ranks[0]["scores"]
    best = max(range(len(scores)), key=lambda at: scores[at][0])
    whole = work / f"{case['graph']}-whole"
    if not whole.exists():
        partition_graph(data, whole, num_parts=1)
    one_process = accuracy_of_one(case, whole, ranks[0]["state"])
    if abs(one_process - ranks[0]["val_acc"]) > 1e-6:
        raise RuntimeError(f"{case}: evaluation gives {ranks[0]['val_acc']}, one process {one_process}")
    num_rows = sum(part["num_owned"] + part["num_halo"] for part in meta["parts"])
    results = (
        scores[best][1], statistics.fmean(test for _, test in scores[-LAST:]), scores[best][0], one_process,
        max(one["seconds"] for one in ranks), num_rows / data.num_nodes,
    )  # fmt: skip
    return dict(zip(RESULTS, (f"{value:.6g}" for value in results), strict=True))


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each different training once, all delays of a seed in a row."""
    names = ("graph", "model", "parts", "seed", "first_hop", "cheaper_side", "delays")
    lists = (
        options.graphs, options.models, options.parts, options.seeds, options.first_hop, options.cheaper_side,
        options.delays,
    )  # fmt: skip
    for values in itertools.product(*lists):
        case = dict(zip(names, values, strict=True))
        _, layers, hidden = GRAPHS[case["graph"]]
        case |= {"layers": layers, "hidden": hidden, "lr": options.lr, "epochs": options.epochs}
        if case["parts"] > 1 or case["delays"] == "cd-0":  # one part has nothing to delay
            yield {name: case[name] for name in CASE}


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    path = options.out / f"{options.name}.csv"
    rows = rows_before(path, CASE) if options.resume else {}
    with tempfile.TemporaryDirectory() as work, RankPool(max(options.parts), timeout_s=3600) as pool:
        for case in cases(options):
            key = tuple(str(case[name]) for name in CASE)
            if key not in rows:
                rows[key] = {**dict(zip(CASE, key, strict=True)), **measure(pool, options, case, Path(work))}
                print(*(f"{name}={value}" for name, value in rows[key].items()), flush=True)
                write(rows.values(), path, threads=1)
    show([{name: row[name] for name in (*CASE, *RESULTS)} for row in rows.values()], "Accuracy")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
