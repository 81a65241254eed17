"""Gradients that travel by the process group of exchanges: one sum, after all exchanges, and DDP's mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GCN

from pygdist import Shard, distribute
from pygdist.backends import CommBackend
from pygdist.comm import Communicator
from pygdist.comm.ddp import DDP_OPTIONS, ONE_BUCKET_MB, ddp_loss_scale, settle_buckets, sum_behind_exchanges
from pygdist.graph import write_store
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.loss import summed_loss
from pygdist.testing import random_graph, run_ranks
from pygdist.testing.exactness import reference_step


def _model() -> GCN:
    torch.manual_seed(1)
    return GCN(5, 600, num_layers=3, out_channels=3).double()  # more than DDP's first bucket takes


def _step(rank: int, world_size: int, store: str) -> tuple[list[str], dict[str, Tensor]]:
    """Return the exchanges and sums of a backward pass in order, and the gradients."""
    communicator, shard, calls = Communicator(dist.new_group()), Shard.load(store, rank), list[str]()
    backend = CommBackend()
    backend.bind(shard, communicator)
    options: dict[str, Any] = {**DDP_OPTIONS, "bucket_cap_mb": ONE_BUCKET_MB}
    model = DistributedDataParallel(distribute(_model(), backend=backend, check=False), **options)
    settle_buckets(model)
    sum_behind_exchanges(model, communicator)
    with pytest.MonkeyPatch.context() as patch:
        announce, reduce = communicator.announce, dist.all_reduce
        patch.setattr(communicator, "announce", lambda label: (calls.append("exchange"), announce(label)))
        patch.setattr(dist, "all_reduce", lambda *args, **given: (calls.append("sum"), reduce(*args, **given))[1])
        for _ in range(2):  # DDP arranges its buckets after the first step
            model.zero_grad()
            out = model(shard.x, shard.adjacency, **edge_inputs(model.module, shard))
            total, count = summed_loss(out, shard.y, shard.train_mask)
            (total * ddp_loss_scale(float(communicator.gather([count]).sum()), world_size)).backward()
    gradients = {name: one.grad for name, one in model.module.named_parameters() if one.grad is not None}
    return calls, gradients


def test_gradients_follow_the_exchanges_in_their_group(tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    expected = reference_step(_model(), data).gradients
    for calls, gradients in run_ranks(_step, 2, str(tmp_path / "store")):
        assert calls.count("sum") == 2
        assert calls[-1] == "sum"
        assert calls.count("exchange") > 4
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-10)
