"""Evaluation on the whole graph of a model that is trained on parts: what is kept from one to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch_geometric.nn import GCN

from pygdist import GraphDataModule
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


def test_attributes_that_are_no_parameters_are_seen_to_change() -> None:
    net = GCN(4, 8, 2, out_channels=3)
    net.temperature, net.steps, net.of, net.kinds = torch.ones(1), [1, {"a": torch.ones(2)}], np.ones(2), {1}
    net.steps.append(net.steps)  # type: ignore[arg-type]
    distribute(net, backend=ReplicaBackend())

    def change(at: int) -> None:
        if at == 0:
            net.temperature.mul_(2)
        elif at == 1:
            net.temperature = net.temperature * 2
        elif at == 2:
            net.steps[1]["a"].add_(1)
        elif at == 3:
            net.steps.append(2)
        elif at == 4:
            net.of *= 2
        else:
            net.kinds.add(2)

    for at in range(6):
        made = WholeGraphEvaluation(net, Communicator(), Savings(), ReplicaBackend(), in_turns=False, check=False)
        assert made.is_of(net)
        change(at)
        assert not made.is_of(net), at


class Warm(GCN):
    """Divides by a temperature that is no parameter."""

    temperature = torch.ones(())

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = super().forward(*args, **kwargs) / self.temperature
        return out


class Cools(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.model.temperature = pl_module.model.temperature / 2

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def _cooled(rank: int, world_size: int, folder: str, backend: str) -> list[float]:
    torch.manual_seed(3)
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    module, seen = runs.NodeClassifier(Warm(12, 8, 2, 4), backend=backend, check=False, lr=1e-12), Cools()
    runs.trainer(rank, world_size, folder, callbacks=[seen], num_sanity_val_steps=1).fit(module, datamodule=data)
    return seen.losses


def test_an_evaluation_runs_the_model_as_it_is(pool: RankPool, tmp_path: Path) -> None:
    (expected,) = pool.run(_cooled, 1, str(tmp_path / "one"), "comm")
    assert len(set(expected)) == len(expected) > 2
    for losses in pool.run(_cooled, 2, str(tmp_path / "two"), "replica"):
        assert losses == pytest.approx(expected, rel=1e-6)
