"""Runs of ``model_averaging`` for the tests: parts of a small graph, a model, and what a job changes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.backends import Backend, ReplicaBackend
from pygdist.graph import write_store
from pygdist.lightning import ModelAveragingStrategy
from pygdist.lightning.parts import PartBatch
from tests.lightning import runs

State = dict[str, Tensor]


class _Marked(GCN):
    """With a buffer that tells how many rows it saw last in training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if self.training:
            self.rows.fill_(x.size(0))
        return super().forward(x, *args, **options)


def model(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "gat":
        return GAT(12, 8, num_layers=2, out_channels=4, heads=2)
    if name == "marked":
        return _Marked(12, 8, num_layers=2, out_channels=4)
    if name == "dropout":
        return GCN(12, 8, num_layers=2, out_channels=4, dropout=0.5)
    return GCN(12, 8, num_layers=2, out_channels=4, norm="batch_norm" if name == "norm" else None)


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4)
    if name == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9 if name == "momentum" else 0.0)


class Classifier(NodeClassifier):
    """With another optimiser, and a note of which nodes were trained on."""

    def __init__(self, model: nn.Module, *, optimizer: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.kind = optimizer
        self.trained_on: list[list[int]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.kind, self.parameters())

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.trained_on.append([])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trained_on:  # no epoch starts where a run goes on in the middle of one
            self.trained_on.append([])
        shard = batch.shard if isinstance(batch, PartBatch) else batch
        sample = getattr(batch, "sample", None)
        if sample is not None:
            self.trained_on[-1] += shard.surroundings.n_id[sample.n_id[sample.train_mask]].tolist()
        elif shard is not None:
            self.trained_on[-1] += shard.owned_id[shard.train_mask & (shard.y >= 0)].tolist()
        return super().training_step(batch, batch_idx)


def owners(num_parts: int, kind: str = "hash") -> np.ndarray:
    """The part of each node; ``uneven``: one has ten times another's training nodes, the last has none."""
    data, number = runs.graph(), np.arange(160)
    owner = np.random.default_rng(2).permutation(number) % num_parts
    if kind == "uneven":
        train = data.train_mask.numpy()
        of_train = np.cumsum(train) - 1
        owner = np.where(train, np.where(of_train % 14 < num_parts - 2, of_train % 14 + 1, 0), owner)
    return owner


def store_of(folder: Path, num_parts: int, kind: str = "hash", *, num_hops: int = 2) -> str:
    place = folder / f"{kind}-{num_parts}"
    if not place.exists():
        write_store(
            runs.graph(), owners(num_parts, kind), place, num_parts=num_parts, method=kind, arguments={}, notes=[],
            num_hops=num_hops, placement="replicas",
        )  # fmt: skip
    return str(place)


def train(rank: int, world_size: int, folder: str, store: str, job: dict[str, Any]) -> dict[str, Any]:
    """One run; ``job`` says what is not as usual."""
    history = runs.History()
    backend: Backend | str = job.get("backend") or ReplicaBackend(hops=job.get("hops", 2))
    classifier = Classifier(
        model(job.get("net", "gcn")), optimizer=job.get("optimizer", "sgd"), backend=backend, check=False
    )
    data = GraphDataModule(store=store, num_parts=job.get("num_parts"), batches=job.get("batches"))
    callbacks = [*job.get("callbacks", []), history]
    if job.get("keep"):
        when = job["keep"] if isinstance(job["keep"], dict) else {"filename": "{epoch}"}
        callbacks.append(ModelCheckpoint(dirpath=folder, save_top_k=-1, **when))
    averaging = job.get("averaging", {})
    settings = {"callbacks": callbacks, "enable_checkpointing": bool(job.get("keep")), "num_sanity_val_steps": 0}
    if averaging is not None:
        settings["strategy"] = ModelAveragingStrategy(check_order=True, **averaging)
    trainer = runs.trainer(rank, world_size, folder, **settings, **job.get("options", {}))
    trainer.fit(classifier, datamodule=data, ckpt_path=job.get("resume"))
    return {
        "history": history.epochs,
        "state": {name: value.clone() for name, value in classifier.model.state_dict().items()},
        "trained_on": classifier.trained_on,
        "epochs": trainer.current_epoch,
    }


def assert_same(ours: State, theirs: State, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name].double(), value.double(), rtol=0, atol=tolerance, msg=lambda said, of=name: f"{of}: {said}"
        )


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def without_noise(state: State) -> State:
    """A norm cancels the bias in front of it, whose gradient is rounding, which Adam scales up to steps."""
    return {name: value for name, value in state.items() if name not in ("convs.0.bias", "norms.0.module.running_mean")}


def loss_of(net: nn.Module, data: Data, mask: Tensor) -> Tensor:
    out = net(data.x, data.edge_index, data.edge_weight)
    return functional.cross_entropy(out[mask], data.y[mask])


def said_by(rank: int, world_size: int, folder: str, store: str, job: dict[str, Any]) -> str:
    with pytest.raises(InputError) as error:
        train(rank, world_size, folder, store, job)
    return str(error.value)
