"""What Lightning broadcasts travels as JSON: no rank unpickles what another one has sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger

from pygdist import GraphDDPStrategy, InputError
from pygdist.testing import RankPool
from tests.lightning import runs

VALUES: list[Any] = [None, True, 3, 2**70, 0.1, float("inf"), "", "a/ü\ud800\n", [], {"a": [1, {"b": None}]}]
REFUSED: list[Any] = [Path("x"), (1, 2), {1: 2}, torch.ones(2), [{"a": {3}}]]


def _refuse_pickles(*_: Any, **__: Any) -> None:
    raise AssertionError("a pickle would travel")


class _Broadcasts(pl.Callback):
    """Broadcasts before each stage."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        mine = trainer.global_rank == trainer.world_size - 1
        for value in VALUES:
            self.received.append(trainer.strategy.broadcast(value if mine else None, src=trainer.world_size - 1))
        for value in REFUSED if trainer.world_size > 1 else ():
            with pytest.raises(InputError, match=r"broadcast of a \w+: ranks send each other no pickle"):
                trainer.strategy.broadcast(value if mine else "other", src=trainer.world_size - 1)


def _run(rank: int, world_size: int, folder: str) -> list[Any]:
    patch = pytest.MonkeyPatch()
    for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"):
        patch.setattr(dist, name, _refuse_pickles)
    module, data = runs.module(folder)
    broadcasts = _Broadcasts()
    callbacks = [broadcasts, ModelCheckpoint(), Timer(duration="00:01:00:00")]
    trainer = runs.trainer(
        rank, world_size, folder, max_epochs=2, callbacks=callbacks, logger=CSVLogger(folder),
        enable_checkpointing=True, strategy=GraphDDPStrategy(),
    )  # fmt: skip
    try:
        trainer.fit(module, datamodule=data)
        trainer.validate(module, datamodule=data)
        trainer.test(module, datamodule=data, ckpt_path="best")
        trainer.predict(module, datamodule=data, return_predictions=False)
    finally:
        patch.undo()
    return broadcasts.received


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_pickle_travels_in_a_run(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    for received in pool.run(_run, world_size, str(tmp_path)):
        assert received == VALUES * 4
