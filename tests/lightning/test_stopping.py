"""A signal that is to save first: ranks agree on the step, the checkpoint is whole, and the run goes on from it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
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


_SLOW = """
import time

import lightning.pytorch as pl


class Slow(pl.Callback):
    def __init__(self, **seconds):
        self.seconds = seconds

    def on_train_epoch_start(self, trainer, module):
        print("trains", flush=True)

    def on_validation_start(self, trainer, module):
        print("validates", flush=True)
        time.sleep(100.0)
"""


def _await(run: subprocess.Popen[str], word: str, times: int) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        times -= word in line
        if times == 0:
            return
    raise AssertionError(run.communicate())


def _begin(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(_SLOW)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.Popen(
        [sys.executable, "-m", "pygdist.cli", "fit", "--data.dataset=sbm", "--data.dataset_args={num_nodes: 500}",
         "--data.cache_dir=cache", "--model.model=torch_geometric.nn.GCN", "--model.model.in_channels=-1",
         "--model.model.hidden_channels=8", "--model.model.num_layers=2", "--model.model.out_channels=10",
         "--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_epochs=100000",
         "--trainer.enable_progress_bar=false", "--trainer.callbacks+=slow.Slow", *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("method", "who"), [("fork", "starter"), ("fork", "rank 1"), ("spawn", "starter")])
def test_ranks_of_one_program_end_with_it(method: str, who: str, tmp_path: Path) -> None:
    run = _begin(tmp_path, f"--trainer.strategy=graph_ddp_{method}", "--trainer.limit_val_batches=0")
    ranks = []
    try:
        _await(run, "trains", 6)
        found = psutil.Process(run.pid).children(recursive=True)
        ranks = [one for one in found if "resource_tracker" not in " ".join(one.cmdline())]
        process = run.pid if who == "starter" else ranks[1].pid
        os.kill(process, signal.SIGTERM)
        _, errors = run.communicate(timeout=120)
    finally:
        for one in (run, *ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    told = [line for line in errors.splitlines() if line.startswith("pygdist: error:")]
    name = "process" if who == "starter" else "rank 1 (process"
    assert (run.returncode, told) == (
        143,
        [f"pygdist: error: SIGTERM reached {name} {process}" + ")" * (who != "starter")],
    )
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_long_validation_does_not_outlast_a_signal_that_is_to_save(tmp_path: Path) -> None:
    run = _begin(tmp_path, "--trainer.strategy.checkpoint_on_signal=true", "--trainer.num_sanity_val_steps=0")
    try:
        _await(run, "validates", 1)
        run.terminate()
        _, errors = run.communicate(timeout=40)
    finally:
        run.kill()
    assert run.returncode == 143
    assert f"SIGTERM reached rank 0 (process {run.pid})" in errors
