"""A mini-batch script of one's own: PyG's NeighborLoader on each host, features fetched from their owners.

    python -m experiments.p3.baseline --out figures

Every host holds the edges of the whole graph, which DistDGL's samplers reach too, and the features of its own nodes.
Batches start from the host's own training nodes; the features of sampled nodes come from their owners, batch by batch.
An all-reduce after the backward pass averages the gradients, so its time and bytes are separate figures. An epoch is
one pass over the training nodes. Sampling needs torch_sparse or pyg-lib.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.catgnn.graphs import show, write
from experiments.cluster import Cluster, why_unshaped
from experiments.harness import WARM_UP
from experiments.machine import SOME_FAILED, provenance

if TYPE_CHECKING:
    from torch.nn import Module

    from pygdist.comm import Communicator

GRAPHS: dict[str, dict[str, Any]] = {
    "like Reddit": {"dataset": "reddit-like", "args": {"scale": 0.05}, "hidden": 256, "classes": 41},
    "like products": {"dataset": "products-like", "args": {"scale": 0.02}, "hidden": 64, "classes": 47},
    "cornell5": {
        "dataset": "LINKXDataset", "args": {"root": "{data}/LINKXDataset", "name": "cornell5"},
        "hidden": 64, "classes": 2,
        "prepare": ["--split=[0.5, 0.25, 0.25]"],
    },
}  # fmt: skip
FIGURES = ("epoch_s", "compute_s", "exchange_s", "averaging_s", "sent_bytes", "gradient_bytes")  # of one rank
COLUMNS = (
    "graph", "fan_out", "hosts", "network", "epoch_s", "epoch_s_min", "epoch_s_max", "compute_s_max", "compute_s_min",
    "exchange_s_max", "exchange_s_min", "averaging_s_max", "averaging_s_min", "sent_bytes", "gradient_bytes", "batches",
    "note",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    cli.add_argument("--data", help="folder with LINKXDataset/, for cornell5")
    cli.add_argument("--scale", type=float, help="scale of the generated graphs, instead of their defaults")
    cli.add_argument("--hosts", type=int, default=4)
    cli.add_argument("--network", default="1gbit", help="rate of the hosts' links")
    cli.add_argument(
        "--fan-outs",
        nargs="+",
        default=["25,10", "10,25"],
        help="numbers of neighbours sampled in the first and the second hop",
    )
    cli.add_argument("--batch", type=int, default=1024, help="training nodes per batch on each host")
    cli.add_argument("--epochs", type=int, default=5)
    cli.add_argument("--out", type=Path, default=Path("figures"))
    cli.add_argument("--worker", help=argparse.SUPPRESS)
    return cli


def worker(options: dict[str, Any]) -> None:
    """Train on one host; rank 0 prints the figures of each epoch."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GCN

    from pygdist.comm import Communicator, NodeDirectory
    from pygdist.graph import Shard, open_part

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    communicator, shard = Communicator(dist.new_group()), Shard.load(options["store"], rank)
    directory = NodeDirectory(shard.owned_id, shard.num_nodes, communicator)
    edges = []
    for part in range(size):
        arrays = {name: torch.from_numpy(value) for name, value in open_part(options["store"], part).items()}
        degrees = arrays["indptr"].diff()
        targets = arrays["n_id"][: degrees.numel()].repeat_interleave(degrees)
        edges.append(torch.stack([arrays["n_id"][arrays["src"].long()], targets]))
    assert shard.y is not None
    assert shard.train_mask is not None
    y = torch.full((shard.num_nodes,), -1)
    y[shard.owned_id] = shard.y
    torch.manual_seed(rank)
    loader = NeighborLoader(
        Data(edge_index=torch.cat(edges, dim=1), y=y, num_nodes=shard.num_nodes),
        num_neighbors=options["fan_out"], batch_size=options["batch"], shuffle=True,
        input_nodes=shard.owned_id[shard.train_mask],
    )  # fmt: skip
    torch.manual_seed(0)
    model = GCN(shard.x.size(1), options["hidden"], num_layers=2, out_channels=options["classes"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    counts = communicator.gather([float(len(loader))])
    if not counts.min():
        raise SystemExit("a host has no training nodes")
    batches = int(counts.max())  # the same on each host, since batches exchange; some loaders start again
    epochs = []
    for _ in range(WARM_UP + options["epochs"]):
        communicator.barrier()
        communicator.meter.reset()
        start, averaging_s, gradient_bytes = time.perf_counter(), 0.0, 0
        for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), batches):
            plan, position = directory.plan(batch.n_id)
            rows = torch.cat([shard.x, communicator.exchange_rows(shard.x, plan)])[position]
            out = model(rows, batch.edge_index)[: batch.batch_size]
            optimizer.zero_grad()
            cross_entropy(out, batch.y[: batch.batch_size]).backward()
            fetched = dataclasses.replace(communicator.meter.read())
            average(model, communicator)
            traffic = communicator.meter.read()
            averaging_s += traffic.exchange_s - fetched.exchange_s
            gradient_bytes += traffic.sent_bytes - fetched.sent_bytes
            optimizer.step()
        seconds, traffic = time.perf_counter() - start, communicator.meter.read()
        figures = [
            seconds, seconds - traffic.exchange_s, traffic.exchange_s - averaging_s, averaging_s,
            float(traffic.sent_bytes - gradient_bytes), float(gradient_bytes),
        ]  # fmt: skip
        epochs.append([dict(zip(FIGURES, rank, strict=True)) for rank in communicator.gather(figures).tolist()])
    if rank == 0:
        print(json.dumps({"epochs": epochs[WARM_UP:], "batches": batches}), flush=True)
    dist.destroy_process_group()


def average(model: Module, communicator: Communicator) -> None:
    """Replace each gradient by its mean over ranks."""
    import torch

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = torch.cat([gradient.flatten() for gradient in gradients])
    communicator.reduce_in_place(total, "gradients")
    total /= communicator.world_size
    for gradient, mean in zip(gradients, total.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def measure(name: str, fan_out: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one graph and fan-out; return its row."""
    graph = GRAPHS[name]
    dataset_args = dict(graph["args"])
    if "scale" in dataset_args:
        dataset_args["scale"] = options.scale or dataset_args["scale"]
    if "root" in dataset_args:
        dataset_args["root"] = dataset_args["root"].replace("{data}", options.data)
    row: dict[str, Any] = {"graph": name, "fan_out": fan_out, "hosts": options.hosts, "note": ""}
    row |= {"scale": dataset_args.get("scale", ""), **provenance(1)}
    shaped = why_unshaped() is None
    with (
        tempfile.TemporaryDirectory() as work,
        Cluster(options.hosts, rate=options.network if shaped else None, shaped=shaped) as cluster,
    ):
        row["network"] = cluster.described
        store = Path(work) / "parts"
        made = [sys.executable, "-m", "pygdist.cli", "partition", f"--dataset={graph['dataset']}", f"--out={store}"]
        made += [f"--dataset_args={json.dumps(dataset_args)}", "--method=metis", f"--parts={options.hosts}"]
        made += graph.get("prepare", [])
        with Cluster(1, rate=None, shaped=False) as here:
            (outcome,) = here.run(made)
        if outcome.code:
            return row | {"note": f"partition: {outcome.err.strip().splitlines()[-1]}"}
        wanted = {
            "store": str(store),
            "fan_out": [int(one) for one in fan_out.split(",")],
            "batch": options.batch,
            "epochs": options.epochs,
            "hidden": graph["hidden"],
            "classes": graph["classes"],
        }
        command = [sys.executable, "-m", "experiments.p3.baseline", "--worker", json.dumps(wanted)]
        outcomes = cluster.run(command, timeout=1800)
    failed = next((one for one in outcomes if one.code and not one.waited), None)
    if failed is not None:
        return row | {"note": f"host {failed.host}: {failed.err.strip().splitlines()[-1]}"}
    said = json.loads(outcomes[0].out.splitlines()[-1])
    seconds = [max(rank["epoch_s"] for rank in epoch) for epoch in said["epochs"]]
    middle = {
        f"{figure}_{end.__name__}": statistics.median(end(rank[figure] for rank in epoch) for epoch in said["epochs"])
        for figure in ("compute_s", "exchange_s", "averaging_s")
        for end in (min, max)
    }
    middle |= {
        figure: statistics.median(sum(rank[figure] for rank in epoch) for epoch in said["epochs"])
        for figure in ("sent_bytes", "gradient_bytes")
    }
    return row | middle | {
        "epoch_s": statistics.median(seconds), "epoch_s_min": min(seconds), "epoch_s_max": max(seconds),
        "batches": said["batches"],
    }  # fmt: skip


def main() -> int:
    """Run what the command line asks for."""
    options = parser().parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    if missing := [name for name in options.graphs if "root" in GRAPHS[name]["args"] and not options.data]:
        raise SystemExit(f"{missing[0]}: give --data, a folder with LINKXDataset/ in the layout of PyG's dataset class")
    rows = []
    for name, fan_out in itertools.product(options.graphs, options.fan_outs):
        rows.append({**dict.fromkeys(COLUMNS, ""), **measure(name, fan_out, options)})
        write(rows, options.out / "baseline.csv")
        print(f"{name}, {fan_out}: {rows[-1]['note'] or rows[-1]['epoch_s']}", flush=True)
    show([{column: row[column] for column in COLUMNS} for row in rows], "Mini-batches")
    return SOME_FAILED if any(row["note"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
