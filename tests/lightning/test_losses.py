"""Losses of a user's choice are those of torch, over all ranks: class weights, and models with several outputs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data

from pygdist.backends import ReplicaBackend
from pygdist.errors import InputError
from pygdist.lightning import GraphDataModule, ModelAveragingStrategy, NodeClassifier
from pygdist.testing import RankPool
from tests.lightning import runs

WEIGHTS = [0.2, 1.0, 3.0, 0.0]


class Twofold(nn.Module):
    """Returns classes and hidden rows, and a number, in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.net = runs.model()

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> dict[str, Any]:
        hidden = self.net.convs[0](x, edge_index, edge_weight).relu()
        classes = self.net.convs[1](hidden, edge_index, edge_weight)
        return {"classes": classes, "more": (hidden, self.net.convs[0].bias.sum(), None)}


def _twofold_loss(out: dict[str, Any], y: Tensor) -> Tensor:
    return functional.cross_entropy(out["classes"], y, reduction="none") + out["more"][0].square().mean(dim=1)


class Plain(NodeClassifier):
    """With plain steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class TwofoldPlain(Plain):
    """For a model with several outputs."""

    def logits(self, outputs: Any) -> Tensor:
        """The classes."""
        classes: Tensor = outputs["classes"]
        return classes

    def node_losses(self, out: Any, y: Tensor) -> Tensor:
        """Cross-entropy, and a penalty on hidden rows."""
        return _twofold_loss(out, y)


def _made(kind: str, backend: Any = "comm") -> Plain:
    if kind == "weights":
        return Plain(runs.model(), backend, class_weights=WEIGHTS)
    return TwofoldPlain(Twofold(), backend)


def _fit(rank: int, world_size: int, folder: str, kind: str, parts: int | None) -> tuple[Any, ...]:
    """Two epochs of SGD: what was logged, the parameters afterwards, and predictions; by parts in turn if ``parts``."""
    history = runs.History()
    data = GraphDataModule(runs.graph(), partitioner="hash", num_parts=parts, cache_dir=Path(folder) / "cache")
    module = _made(kind, "comm" if parts is None else ReplicaBackend(hops=2))
    options = {} if parts is None else {"strategy": ModelAveragingStrategy()}
    trainer = runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=2, **options)
    trainer.fit(module, datamodule=data)
    predicted = trainer.predict(module, datamodule=data)
    assert len(pickle.dumps(module)) < 40_000, "nothing of the graph goes with it"
    return history.epochs, {name: value.clone() for name, value in module.model.state_dict().items()}, predicted


def _loss(model: nn.Module, whole: Data, mask: Tensor, kind: str) -> Tensor:
    out = model(whole.x, whole.edge_index, whole.edge_weight)
    if kind == "weights":
        return functional.cross_entropy(out[mask], whole.y[mask], weight=torch.tensor(WEIGHTS, dtype=torch.float64))
    rows = {"classes": out["classes"][mask], "more": (out["more"][0][mask],)}
    return _twofold_loss(rows, whole.y[mask]).mean()


def _expected(folder: Path, kind: str) -> tuple[list[tuple[float, float]], nn.Module, Data]:
    """The same by torch on the whole graph."""
    whole, _ = GraphDataModule(runs.graph(), cache_dir=folder / "whole").load()
    model, losses = _made(kind).model.double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = _loss(model, whole, whole.train_mask, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((float(loss), float(_loss(model, whole, whole.val_mask, kind))))
    return losses, model, whole


@pytest.mark.parametrize(("world_size", "parts"), [(1, None), (2, None), (1, 3)])
@pytest.mark.parametrize("kind", ["weights", "twofold"])
def test_losses_are_those_of_torch(
    kind: str, world_size: int, parts: int | None, pool: RankPool, tmp_path: Path
) -> None:
    losses, model, whole = _expected(tmp_path, kind)
    found = pool.run(_fit, world_size, str(tmp_path), kind, parts)
    if parts is not None:  # each part makes a step of its own
        ((_, parameters, predicted),) = found
        model.load_state_dict(parameters)
        losses = [(0.0, float(_loss(model, whole, whole.val_mask, kind)))]
    out = model(whole.x, whole.edge_index, whole.edge_weight)
    logits = out if kind == "weights" else out["classes"]
    for epochs, parameters, predicted in found:
        epochs = epochs[-len(losses) :]
        assert [epoch["val_loss"] for epoch in epochs] == pytest.approx([val for _, val in losses], rel=1e-6)
        if parts is None:
            assert [epoch["train_loss"] for epoch in epochs] == pytest.approx([loss for loss, _ in losses], rel=1e-6)
        for name, value in model.state_dict().items():
            assert torch.allclose(parameters[name], value, rtol=0, atol=1e-10), name
        for rows, values in predicted:
            assert torch.allclose(values, logits[rows], rtol=0, atol=1e-10)


class Reweighs(pl.Callback):
    """Gives other weights from epoch 1 on."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.class_weights = [1.0] * 4 if trainer.current_epoch == 0 else WEIGHTS


def _fit_reweighed(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    data: Any = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    module = Plain(runs.model(), class_weights=[1.0] * 4, check=False)
    trainer = runs.trainer(rank, world_size, folder, callbacks=[Reweighs()], max_epochs=2, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    return {name: value.clone() for name, value in module.model.state_dict().items()}


def test_weights_may_change_between_epochs(pool: RankPool, tmp_path: Path) -> None:
    whole, model = runs.graph(), runs.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for kind in ([1.0] * 4, WEIGHTS):
        out, mask = model(whole.x, whole.edge_index, whole.edge_weight), whole.train_mask
        optimizer.zero_grad()
        weight = torch.tensor(kind, dtype=torch.float64)
        functional.cross_entropy(out[mask], whole.y[mask], weight=weight).backward()
        optimizer.step()
    for parameters in pool.run(_fit_reweighed, 2, str(tmp_path)):
        for name, value in model.state_dict().items():
            assert torch.allclose(parameters[name], value, rtol=0, atol=1e-10), name


def _several(rank: int, world_size: int, folder: str) -> str:
    data: Any = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder).fit(NodeClassifier(Twofold()), datamodule=data)
    return str(error.value)


def test_of_several_outputs_one_must_be_named(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_several, 2, str(tmp_path)):
        assert said.startswith("the model returns a dict, expected one tensor; override logits(outputs) to return")


@pytest.mark.parametrize(
    ("weights", "said"),
    [([1.0, -1.0], "expected numbers from 0"), ([1.0, float("nan")], "expected numbers from 0")],
)
def test_weights_that_are_none_are_refused(weights: list[float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        NodeClassifier(runs.model(), class_weights=weights)


def _wrong_number(rank: int, world_size: int, folder: str) -> str:
    data: Any = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    with pytest.raises(InputError) as error:
        runs.trainer(rank, world_size, folder).fit(NodeClassifier(runs.model(), class_weights=[1.0]), datamodule=data)
    return str(error.value)


def test_each_class_needs_a_weight(pool: RankPool, tmp_path: Path) -> None:
    for said in pool.run(_wrong_number, 2, str(tmp_path)):
        assert said == "class_weights has 1 numbers for 4 classes, but one for each is needed"
