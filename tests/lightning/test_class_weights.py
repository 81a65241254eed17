"""Class weights give torch's weighted mean, over all ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pygdist.errors import InputError
from pygdist.lightning import GraphDataModule, NodeClassifier
from pygdist.testing import RankPool
from tests.lightning import runs

WEIGHTS = [0.2, 1.0, 3.0, 0.0]


def _fit(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Two epochs of SGD: what was logged, and the parameters afterwards."""
    history = runs.History()
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    module = Plain(runs.model(), class_weights=WEIGHTS)
    runs.trainer(rank, world_size, folder, callbacks=[history], max_epochs=2).fit(module, datamodule=data)
    return history.epochs, {name: value.clone() for name, value in module.model.state_dict().items()}


class Plain(NodeClassifier):
    """With plain steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _expected(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by torch on the whole graph."""
    whole, _ = GraphDataModule(runs.graph(), cache_dir=folder / "whole").load()
    model, losses = runs.model().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        out = model(whole.x, whole.edge_index, whole.edge_weight)[whole.train_mask]
        loss = functional.cross_entropy(
            out, whole.y[whole.train_mask], weight=torch.tensor(WEIGHTS, dtype=torch.float64)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, dict(copy.deepcopy(model).state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
def test_weighted_losses_are_those_of_torch(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    losses, parameters = _expected(tmp_path)
    for epochs, ours in pool.run(_fit, world_size, str(tmp_path)):
        assert [epoch["train_loss"] for epoch in epochs] == pytest.approx(losses, rel=1e-6)
        for name, value in parameters.items():
            assert torch.allclose(ours[name], value, rtol=0, atol=1e-10), name


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
