"""Ranks train one model: layers that are unfrozen in mid-run, and ranks whose models part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.utils.prune import random_unstructured

from pygdist import GraphDataModule, InputError, NodeClassifier
from pygdist.testing import RankPool
from tests.lightning import runs


class Thaw(pl.Callback):
    """Trains the first layer from epoch 1 on, and not the second in epoch 2."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.model.convs[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.model.convs[0].requires_grad_(trainer.current_epoch > 0)
        pl_module.model.convs[1].requires_grad_(trainer.current_epoch != 2)


class ThawHere(pl.Callback):
    """Freezes a layer on one rank alone."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.model.convs[0].requires_grad_(trainer.global_rank == 0)


class Drift(pl.Callback):
    """Changes a weight on one rank alone."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            pl_module.model.convs[1].lin.weight.data[0, 0] += 1e-3


class Prune(pl.Callback):
    """Draws a mask on each rank, as ModelPruning does."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            random_unstructured(pl_module.model.convs[1].lin, "weight", amount=0.3)


class Descends(NodeClassifier):
    """Steps are as long as gradients are, which Adam would hide."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Searches(NodeClassifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def _fit(
    rank: int, world_size: int, folder: str, kind: type[NodeClassifier], callbacks: list[pl.Callback]
) -> dict[str, Tensor] | str:
    data = GraphDataModule(runs.graph(), partitioner="hash", cache_dir=Path(folder) / "cache")
    module = kind(runs.model(), check=False)
    run = runs.trainer(rank, world_size, folder, callbacks=callbacks, max_epochs=4, num_sanity_val_steps=0)
    try:
        run.fit(module, datamodule=data)
    except InputError as error:
        return str(error)
    return {name: value.clone() for name, value in module.model.state_dict().items()}


def test_layers_that_are_unfrozen_get_the_mean_gradient(pool: RankPool, tmp_path: Path) -> None:
    (alone,) = pool.run(_fit, 1, str(tmp_path), Descends, [Thaw()])
    assert isinstance(alone, dict)
    for state in pool.run(_fit, 2, str(tmp_path), Descends, [Thaw()]):
        assert isinstance(state, dict), state
        for name, value in alone.items():
            assert torch.allclose(state[name], value, rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    ("kind", "callbacks", "words"),
    [
        (Descends, [Drift()], "the parameters of rank 1 differ from those of rank 0 after 1 epoch: a callback"),
        (Descends, [Prune()], "the parameters of rank 1 differ from those of rank 0 after 1 epoch: a callback"),
        (Descends, [ThawHere()], "rank 1 trains other parameters than rank 0"),
        (Searches, [], "optimizer LBFGS decides by the loss of trial steps"),
    ],
    ids=["drift", "masks", "frozen-on-one-rank", "lbfgs"],
)
def test_ranks_whose_models_would_part_are_stopped(
    kind: type[NodeClassifier], callbacks: list[pl.Callback], words: str, pool: RankPool, tmp_path: Path
) -> None:
    for said in pool.run(_fit, 2, str(tmp_path), kind, callbacks):
        assert isinstance(said, str), "the run goes on"
        assert said.startswith(words)
