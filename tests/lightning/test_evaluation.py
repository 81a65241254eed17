"""Evaluation on the whole graph of a model that is trained on parts: what is kept from one to the next."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch_geometric.nn import GCN

from pygdist.backends import ReplicaBackend, Savings
from pygdist.comm import Communicator
from pygdist.lightning import ModelAveragingStrategy
from pygdist.lightning.evaluation import WholeGraphEvaluation
from pygdist.routing import distribute
from pygdist.testing import RankPool
from tests.lightning import runs


class Bytes(pl.Callback):
    """What each validation sends."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.sent.append(-pl_module.communicator.meter.read().sent_bytes)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.sent[-1] += pl_module.communicator.meter.read().sent_bytes


def _validated(rank: int, world_size: int, folder: str) -> tuple[list[int], int]:
    classifier, data = runs.module(folder, backend="replica")
    sent = Bytes()
    options = {"callbacks": [sent], "num_sanity_val_steps": 0, "strategy": ModelAveragingStrategy()}
    runs.trainer(rank, world_size, folder, **options).fit(classifier, datamodule=data)
    assert classifier._kept_evaluation is None, "it goes with the run"
    return sent.sent, sum(data.meta["parts"][peer]["recv_counts"][rank] for peer in range(world_size))


def test_what_is_fixed_travels_once(pool: RankPool, tmp_path: Any) -> None:
    for (first, *later), rows in pool.run(_validated, 2, str(tmp_path)):
        assert later == [rows * (8 + 4) * 8] * 2, "the products of both layers"
        assert first >= later[0] + rows * 8, "and degrees"


def test_a_model_that_was_changed_is_copied_anew() -> None:
    net = distribute(GCN(4, 8, 2, out_channels=3, dropout=0.5, norm="batch_norm"), backend=ReplicaBackend())
    made = WholeGraphEvaluation(net, Communicator(), Savings(), ReplicaBackend(), in_turns=False, check=False)
    with torch.no_grad():
        net.convs[0].lin.weight.mul_(2)
    net.eval()
    assert made.is_of(net)
    assert made.model.convs[0].lin.weight is net.convs[0].lin.weight
    net.dropout.p = 0.1
    assert not made.is_of(net)
    net.dropout.p = 0.5
    assert made.is_of(net)
    net.norms[0].module.running_mean = torch.zeros(8)
    assert not made.is_of(net)
