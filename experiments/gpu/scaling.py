"""Seconds of a training step on 1, 2, ... GPUs of this machine, over nccl: GraphSAGE on a partitioned graph."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

from pygdist import Shard, distribute
from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ONE_BUCKET_MB, ddp_loss_scale, sum_behind_exchanges
from pygdist.graph import power_law, prepare
from pygdist.nn.loss import labelled_rows, summed_loss
from pygdist.partition import partition_graph
from pygdist.testing import run_ranks

_BACKENDS = ("comm", "tensor")
_WIDTH, _CLASSES = 256, 16


def measure(
    nodes: int, edges: int, features: int, rounds: int, *, kind: str = "cuda", most: int | None = None
) -> list[dict[str, Any]]:
    """Return a row for each backend and number of ranks: seconds of a step, and peak memory, on the slowest rank.

    Args:
        nodes: Nodes of the graph.
        edges: Its edges.
        features: Its features.
        rounds: Steps that count.
        kind: ``cuda``; ``cpu`` tries this script without GPUs.
        most: Most ranks; all GPUs by default.
    """
    data, _ = prepare(power_law(nodes, edges, num_features=features, num_classes=_CLASSES))
    rows = []
    for backend in _BACKENDS:
        first_s = 0.0
        for num_ranks in range(1, (torch.cuda.device_count() if most is None else most) + 1):
            with tempfile.TemporaryDirectory() as folder:
                store = Path(folder) / "store"
                partition_graph(data, store, num_parts=num_ranks, partitioner="chunk")
                found = run_ranks(_steps, num_ranks, str(store), backend, kind, rounds)
            spent, peak = (max(column) for column in zip(*found, strict=True))
            first_s = first_s or spent
            rows.append(
                {
                    "backend": backend, "ranks": num_ranks, "nodes": nodes, "edges": data.num_edges,
                    "features": features, "hidden": _WIDTH, "step_s": spent, "speedup": first_s / spent,
                    "peak_gib": peak / 2**30,
                }
            )  # fmt: skip
    return rows


def _steps(rank: int, world_size: int, store: str, backend: str, kind: str, rounds: int) -> tuple[float, int]:
    """Return the median seconds of a step of this rank, and the peak bytes on its GPU."""
    device, group, options = torch.device("cpu"), None, dict[str, Any]()
    if kind == "cuda":
        device, options = torch.device("cuda", rank), {"device_ids": [rank]}
        torch.cuda.set_device(device)
    if world_size > 1:
        group = dist.new_group(backend="nccl" if kind == "cuda" else "gloo")
    communicator, runs = Communicator(group), resolve_backend(backend)
    shard = Shard.load(store, rank).to(device)
    runs.bind(shard, communicator)
    torch.manual_seed(0)
    net = GraphSAGE(shard.x.size(1), _WIDTH, num_layers=3, out_channels=_CLASSES).to(device)
    model = distribute(net, backend=runs, check=False)
    if world_size > 1:
        model = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB, **options, **DDP_OPTIONS)
        sum_behind_exchanges(model, communicator)
    assert shard.y is not None
    assert shard.train_mask is not None
    optimizer, labelled = torch.optim.Adam(model.parameters()), labelled_rows(shard.y, shard.train_mask)
    scale = ddp_loss_scale(float(communicator.gather([float(labelled.numel())]).sum()), world_size)
    spent = list[float]()
    for _ in range(rounds + 2):  # the first ones plan, and fetch what is kept
        began = time.perf_counter()
        optimizer.zero_grad()
        total, _ = summed_loss(model(shard.x, shard.adjacency), shard.y, labelled)
        (total * scale).backward()
        optimizer.step()
        if kind == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - began)
    communicator.barrier()
    peak = torch.cuda.max_memory_allocated(device) if kind == "cuda" else 0
    communicator.close()
    return statistics.median(spent[2:]), peak
