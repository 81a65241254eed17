"""A subclass with a loss of its own learns labels of any kind; scores that make no sense of them are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, NodeClassifier
from pygdist.commands.best_checkpoint import BestCheckpoint
from pygdist.lightning import NodeRegressor
from pygdist.testing import RankPool
from tests.lightning import runs

KINDS = ("numbers", "flags", "heads", "cube")


def _labels(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if kind == "heads":  # several classes per node
        return torch.randint(0, 5, (160, 2), generator=generator)
    y = torch.randn(160, 6, generator=generator, dtype=torch.float64)
    return y[:, 0] if kind == "numbers" else (y > 0).float() if kind == "flags" else y.reshape(160, 3, 2)


def _graph(kind: str) -> Data:
    data = runs.graph()
    data.y = _labels(kind)
    return data


def _model(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return GCN(12, 8, num_layers=2, out_channels=10 if kind == "heads" else 6 if kind != "numbers" else 2)


def _losses(kind: str, out: Tensor, y: Tensor) -> Tensor:
    if kind == "heads":
        return functional.cross_entropy(out.reshape(len(out), 5, 2), y, reduction="none").mean(dim=1)
    if kind == "numbers":  # a mean and a logarithm of a variance
        mean, spread = out[:, :1], out[:, 1:]
        return ((y - mean).square() / spread.exp() + spread).squeeze(1)
    return (out - y.flatten(1)).square().mean(dim=1)


class Own(NodeClassifier):
    """With a loss of its own, and plain steps."""

    kind = ""

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        return _losses(self.kind, out, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gaussian(NodeRegressor):
    """Predicts a mean and a variance: scores are of the mean."""

    kind = "numbers"
    node_losses = Own.node_losses
    configure_optimizers = Own.configure_optimizers

    def predictions(self, outputs: Any) -> Tensor:
        """The mean."""
        mean: Tensor = outputs[:, :1]
        return mean


def _fit(rank: int, world_size: int, folder: str, cls: type[Any], kind: str) -> tuple[Any, ...]:
    history = runs.History()
    best = BestCheckpoint(f"{folder}/{world_size}-{cls.__name__}-{kind}", monitor="val_acc", mode="max")
    module = cls(_model(kind))
    module.kind = kind
    data = GraphDataModule(_graph(kind), partitioner="hash", cache_dir=Path(folder) / "cache")
    options: dict[str, Any] = {"callbacks": [history, best], "enable_checkpointing": True, "max_epochs": 2}
    trainer = runs.trainer(rank, world_size, folder, **options)
    trainer.fit(module, datamodule=data)
    predicted = trainer.predict(module, datamodule=data)
    return history.epochs, {name: one.clone() for name, one in module.model.state_dict().items()}, predicted, (
        best.monitor, best.mode, float(best.best_model_score or 0),
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_any_labels_are_learned(kind: str, world_size: int, pool: RankPool, tmp_path: Path) -> None:
    whole, _ = GraphDataModule(_graph(kind), cache_dir=tmp_path / "whole").load()
    net, losses = _model(kind).double(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        train, val = whole.train_mask, whole.val_mask
        loss = _losses(kind, net(whole.x, whole.edge_index, whole.edge_weight)[train], whole.y[train]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            out = net(whole.x, whole.edge_index, whole.edge_weight)
            losses.append((float(loss), float(_losses(kind, out[val], whole.y[val]).mean())))
    for epochs, parameters, predicted, best in pool.run(_fit, world_size, str(tmp_path), Own, kind):
        scores = {"train_f1", "val_f1"} if kind == "flags" else set()
        for epoch, (train_loss, val_loss) in zip(epochs, losses, strict=True):
            assert set(epoch) == {"train_loss", "val_loss"} | scores
            assert epoch["train_loss"] == pytest.approx(train_loss, rel=1e-6)
            assert epoch["val_loss"] == pytest.approx(val_loss, rel=1e-6)
        for name, value in net.state_dict().items():
            assert torch.allclose(parameters[name], value, rtol=0, atol=1e-10), name
        if kind != "flags":
            assert best == ("val_loss", "min", pytest.approx(min(val for _, val in losses), rel=1e-6))
        for rows, values in predicted:
            assert torch.allclose(values, out[rows], rtol=0, atol=1e-10)


def test_scores_are_of_the_output_that_is_chosen(pool: RankPool, tmp_path: Path) -> None:
    for epochs, _, predicted, best in pool.run(_fit, 2, str(tmp_path), Gaussian, "numbers"):
        assert set(epochs[0]) == {f"{stage}_{name}" for stage in ("train", "val") for name in ("loss", "r2", "mae")}
        assert best[:2] == ("val_r2", "max")
        assert all(values.shape == (len(rows), 1) for rows, values in predicted)


def test_the_best_checkpoint_of_another_monitor_stays(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path, monitor="val_loss", mode="min")
    data: Any = GraphDataModule(runs.graph(), cache_dir=tmp_path)
    trainer = runs.trainer(0, 1, str(tmp_path), callbacks=[best], enable_checkpointing=True, max_epochs=1)
    trainer.fit(NodeClassifier(runs.model()), datamodule=data)
    assert (best.monitor, best.mode) == ("val_loss", "min")
