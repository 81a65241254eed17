"""Bodies that run inside the ranks of a pool: a Lightning trainer on processes that exist already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, GraphDDPStrategy, NodeClassifier
from pygdist.graph import degree_corrected_sbm


class PoolEnvironment(LightningEnvironment):
    """The pool started the processes and their group; Lightning only asks who is who.

    It is told by attributes: a trainer in the tests' own process leaves no place among ranks to programs started later.
    """

    main_address, main_port = "127.0.0.1", 0
    creates_processes_externally = True

    def __init__(self, rank: int, *, one_device: bool = False) -> None:
        """Args: ``one_device`` makes each rank a host with one device, which hosts may share."""
        super().__init__()
        self._ranks = (0, rank) if one_device else (rank, 0)

    def local_rank(self) -> int:
        return self._ranks[0]

    def node_rank(self) -> int:
        return self._ranks[1]


class History(Callback):
    """Keeps what every epoch logged."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning has computed the epoch's training metrics when its last callback runs; validation came before
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def graph() -> Data:
    """A small graph on which a GCN learns something; float64, with weights."""
    data = degree_corrected_sbm(160, num_classes=4, avg_degree=8, num_features=12, seed=3)
    data.x = data.x.double()
    generator = torch.Generator().manual_seed(5)
    data.edge_weight = torch.rand(data.num_edges, generator=generator, dtype=torch.float64) + 0.5
    return data


def model(**options: Any) -> torch.nn.Module:
    """A two-layer GCN with seeded parameters and no dropout unless asked for."""
    torch.manual_seed(7)
    net: torch.nn.Module = GCN(12, 8, num_layers=2, out_channels=4, **options)
    return net


def trainer(rank: int, world_size: int, folder: str, **options: Any) -> pl.Trainer:
    """A quiet trainer on the pool's processes."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": GraphDDPStrategy(check_order=True),
        "plugins": [PoolEnvironment(rank)],
        "max_epochs": 3,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**settings, **options})


def module(folder: str, *, options: dict[str, Any] | None = None, **settings: Any) -> tuple[NodeClassifier, Any]:
    """Classifier and data module over :func:`graph`; tests compare with one process themselves."""
    data = GraphDataModule(graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    return NodeClassifier(model(**(options or {})), **{"check": False, **settings}), data


def fit(
    rank: int, world_size: int, folder: str, options: dict[str, Any] | None = None, net: dict[str, Any] | None = None
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train a few epochs; what was logged, and the parameters at the end."""
    history = History()
    classifier, data = module(folder, options=net)
    run = trainer(rank, world_size, folder, callbacks=[history], **(options or {}))
    run.fit(classifier, datamodule=data)
    return history.epochs, {name: value.clone() for name, value in classifier.model.state_dict().items()}
