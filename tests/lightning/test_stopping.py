"""A signal that is to save first: ranks agree on the step, the checkpoint is whole, and the run goes on from it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pygdist import GraphDDPStrategy
from pygdist.errors import SignalError
from pygdist.testing import RankPool
from tests.lightning import runs


class Signals(Callback):
    """Sends a signal to one rank in mid-run."""

    def __init__(self, rank: int, signum: int, epoch: int = 2) -> None:
        self.rank, self.signum, self.epoch = rank, signum, epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == self.epoch:
            os.kill(os.getpid(), self.signum)


def _fit(rank: int, world_size: int, folder: str, resume: str | None, *callbacks: Callback, save: bool = True) -> Any:
    classifier, data = runs.module(folder)
    trainer = runs.trainer(
        rank, world_size, folder, max_epochs=6, callbacks=[*callbacks, ModelCheckpoint(dirpath=folder)],
        enable_checkpointing=True, strategy=GraphDDPStrategy(checkpoint_on_signal=save),
    )  # fmt: skip
    try:
        trainer.fit(classifier, datamodule=data, ckpt_path=resume)
    except SignalError as error:
        return str(error), error.code
    return {name: value.clone() for name, value in classifier.model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "epoch"), [(0, 2), (1, 2), (1, 5)])  # 5 is the last one
def test_the_run_that_a_signal_saved_goes_on(who: int, epoch: int, pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(_fit, 2, str(tmp_path), None)[0]
    path = tmp_path / "on_signal.ckpt"
    said = f"SIGTERM reached rank {who}; the run was saved in {path}"
    assert pool.run(_fit, 2, str(tmp_path), None, Signals(who, signal.SIGTERM, epoch)) == [(said, 143)] * 2
    for state in pool.run(_fit, 2, str(tmp_path), str(path)):
        assert all(torch.equal(state[name], value) for name, value in whole.items())


def _fit_unsaved(rank: int, world_size: int, folder: str, signum: int) -> Any:
    said = _fit(rank, world_size, folder, None, Signals(1, signum), save=False)
    return said, os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("fork_server")
def test_otherwise_all_ranks_end_at_once_with_one_reason(signum: signal.Signals, code: int, tmp_path: Path) -> None:
    with RankPool(3, timeout_s=60) as own:
        answers = own.run(_fit_unsaved, 3, str(tmp_path), signum)
    (_, pid) = answers[1]
    assert [answer for answer, _ in answers][::2] == [(f"{signum.name} reached rank 1 (process {pid})", code)] * 2
    assert answers[1][0] == (f"{signum.name} reached rank 1 (process {pid})", code)
    assert not (tmp_path / "on_signal.ckpt").exists()
