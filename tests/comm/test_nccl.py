"""Several GPUs over nccl: exactness, order, many steps beside DDP, and ranks that fail. ``make gpu-check-multi``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pygdist import Shard, distribute
from pygdist.backends import Backend, CommBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ONE_BUCKET_MB, sum_behind_exchanges
from pygdist.graph import write_store
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.loss import summed_loss
from pygdist.testing import random_graph, run_ranks
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from pygdist.testing.layers import build
from tests.lightning.programs import COMMAND, environment

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="nccl between ranks needs two GPUs")]
LAYERS = ["GCNConv", "SAGEConv-max", "GATConv", "GINConv", "TransformerConv", "BatchNorm", "GraphNorm"]
BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("comm", {}), ("comm", {"ring": False, "overlap": False}), ("comm", {"halo_gib": 1.0}), ("cache", {}),
    ("hybrid", {"cache_ratio": 0.5}), ("tensor", {"num_chunks": 2}),
]  # fmt: skip


def _bound(rank: int, store: str, backend: Backend) -> tuple[Communicator, Shard]:
    torch.cuda.set_device(rank)
    communicator, shard = Communicator(dist.new_group(backend="nccl")), Shard.load(store, rank).to(f"cuda:{rank}")
    communicator.meet(torch.device("cuda", rank))
    backend.bind(shard, communicator)
    return communicator, shard


def _differences(rank: int, world_size: int, store: str, kind: str) -> dict[str, float]:
    data, worst = random_graph(kind)[0], dict[str, float]()
    for name in LAYERS:
        for backend_name, arguments in BACKENDS:
            backend = resolve_backend(backend_name, **arguments)
            communicator, shard = _bound(rank, store, backend)
            model = distribute(build(name, 5, 3).cuda(), backend=backend, check=False)
            step = distributed_step(model, shard, communicator)
            found = largest_differences(step, reference_step(build(name, 5, 3), data), shard.owned_id.cpu())
            worst[f"{name}, {backend_name} {arguments}"] = max(one.absolute for one in found.values())
            communicator.close()
    return worst


@pytest.mark.parametrize("world_size", [2, 3])  # in a ring of three, order matters
@pytest.mark.parametrize("kind", ["directed", "one-sided"])
def test_layers_over_nccl(kind: str, world_size: int, tmp_path: Path) -> None:
    """Of the one-sided graph the last rank has no node, so its halos and those for it are empty."""
    if world_size > NUM_GPUS:
        pytest.skip(f"there are {NUM_GPUS} GPUs")
    data, part = random_graph("directed")
    parts = part[world_size] if kind == "directed" else part[world_size].clip(max=world_size - 2)
    write_store(data, parts, tmp_path / "store", num_parts=world_size, method="test", arguments={})
    for found in run_ranks(_differences, world_size, str(tmp_path / "store"), "directed"):
        assert max(found.values()) < 1e-10, found


def _many_steps(rank: int, world_size: int, store: str) -> float:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # kernels of all streams wait in one queue
    backend = CommBackend()
    communicator, shard = _bound(rank, store, backend)
    net = distribute(build("GCNConv", 5, 3).cuda(), backend=backend, check=False)
    model = DistributedDataParallel(net, [rank], bucket_cap_mb=ONE_BUCKET_MB, **DDP_OPTIONS)
    sum_behind_exchanges(model, communicator)
    optimizer, inputs, loss = torch.optim.Adam(model.parameters(), lr=0.01), edge_inputs(net, shard), 0.0
    for step in range(1000):
        optimizer.zero_grad()
        total, count = summed_loss(model(shard.x, shard.adjacency, **inputs), shard.y, shard.train_mask)
        total.backward()
        optimizer.step()
        if step in (0, 999):
            sums = communicator.gather([float(total), float(count)]).sum(dim=0)
            first, loss = (loss or float(sums[0] / sums[1])), float(sums[0] / sums[1])
    assert loss < first
    return loss


def test_a_thousand_steps_beside_ddp(tmp_path: Path) -> None:
    world_size = min(NUM_GPUS, 4)
    data, part = random_graph("directed")
    write_store(data, part[world_size], tmp_path / "store", num_parts=world_size, method="test", arguments={})
    losses = run_ranks(_many_steps, world_size, str(tmp_path / "store"))
    assert max(losses) == min(losses)


FAILING = """
import os, signal, torch
from lightning.pytorch.callbacks import Callback

class Fail(Callback):
    def __init__(self, rank: int, how: str):
        self.rank, self.how = rank, how

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_rank == self.rank and trainer.current_epoch == 2:
            if self.how == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device=loss.device)
            if self.how == "error":
                raise KeyError("planted")
            os.kill(os.getpid(), getattr(signal, self.how))
"""
CONFIG = """
model:
  model: {class_path: torch_geometric.nn.GCN, init_args: {in_channels: -1, hidden_channels: 8, num_layers: 2,
    out_channels: 4}}
data: {dataset: sbm, dataset_args: {num_nodes: 400, num_classes: 4}, cache_dir: cache}
trainer:
  accelerator: gpu
  devices: 2
  max_epochs: 6
  logger: false
  enable_progress_bar: false
  strategy: {class_path: pygdist.GraphDDPStrategy, init_args: {lost_after_s: 5}}
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["memory", "error", "SIGKILL", "SIGSTOP"])
def test_one_rank_fails_and_all_end(how: str, rank: int, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "run.yaml").write_text(CONFIG)
    options = [
        "--trainer.callbacks+=failing.Fail",
        f"--trainer.callbacks.rank={rank}",
        f"--trainer.callbacks.how={how}",
    ]
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, *COMMAND, *options], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert time.monotonic() - began < 90
    said = {"memory": "out of memory", "error": "planted"}.get(how, f"rank {rank}|look at rank 0")
    assert re.search(said, run.stderr)
