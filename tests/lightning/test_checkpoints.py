"""A checkpoint resumes bit for bit, on another number of ranks, and without pygdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from pygdist.commands.export import export
from pygdist.testing import RankPool
from tests.lightning import runs


def _fit(
    rank: int, world_size: int, folder: str, epochs: int, resume: str | None, backend: str = "comm"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train up to ``epochs``, from ``resume`` on if given; writes ``folder/last.ckpt``."""
    history = runs.History()
    checkpoint = ModelCheckpoint(dirpath=folder, save_last=True)  # without a monitor: after every epoch
    classifier, data = runs.module(folder, backend=backend)
    trainer = runs.trainer(
        rank, world_size, folder, max_epochs=epochs, callbacks=[history, checkpoint], enable_checkpointing=True
    )
    trainer.fit(classifier, datamodule=data, ckpt_path=resume)
    state = {name: value.clone() for name, value in classifier.model.state_dict().items()}
    return [epoch["train_loss"] for epoch in history.epochs], state


@pytest.mark.slow
def test_resuming_is_going_on(pool: RankPool, tmp_path: Path) -> None:
    whole, parameters = pool.run(_fit, 2, str(tmp_path / "whole"), 8, None)[0]
    first, _ = pool.run(_fit, 2, str(tmp_path / "half"), 4, None)[0]
    last = str(tmp_path / "half" / "last.ckpt")
    for losses, state in pool.run(_fit, 2, str(tmp_path / "again"), 8, last):
        assert first + losses == pytest.approx(whole, rel=1e-6)  # the metric's own sums are single precision
        for name, value in parameters.items():
            assert torch.equal(state[name], value), f"{name}: bit for bit with the same number of ranks"
    for world_size, backend in ((1, "single"), (1, "comm"), (3, "comm")):
        for losses, state in pool.run(_fit, world_size, str(tmp_path / f"{backend}-{world_size}"), 8, last, backend):
            assert len(losses) == 4, "it goes on at the epoch where it stopped"
            for name, value in parameters.items():
                assert torch.allclose(state[name], value, rtol=0, atol=1e-5), (name, world_size, backend)


_WITHOUT = """
import sys, torch
from torch_geometric.nn import GCN
model = GCN(12, 8, num_layers=2, out_channels=4)
state = torch.load(sys.argv[1], weights_only=True)
if "state_dict" in state:  # Lightning's file: the model's part is under 'model.'
    state = {k.removeprefix("model."): v for k, v in state["state_dict"].items() if k.startswith("model.")}
model.load_state_dict(state)
assert not any(name.split(".")[0] == "pygdist" for name in sys.modules)
print(sum(float(p.double().sum()) for p in model.parameters()))
"""


@pytest.mark.slow
def test_the_model_loads_where_there_is_no_pygdist(pool: RankPool, tmp_path: Path) -> None:
    _, parameters = pool.run(_fit, 2, str(tmp_path), 2, None)[0]
    export(tmp_path / "last.ckpt", tmp_path / "model.pt")
    total = sum(float(value.float().double().sum()) for value in parameters.values())
    for file in ("model.pt", "last.ckpt"):
        run = subprocess.run(
            [sys.executable, "-c", _WITHOUT, str(tmp_path / file)], capture_output=True, text=True, cwd=tmp_path
        )
        assert run.returncode == 0, run.stderr
        assert abs(float(run.stdout) - total) < 1e-6


def _stop_early(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    classifier, data = runs.module(folder)
    stop = EarlyStopping("val_loss", mode="min", patience=1, min_delta=10.0)  # no epoch improves by so much
    best = ModelCheckpoint(dirpath=folder, monitor="val_loss", mode="min")
    trainer = runs.trainer(rank, world_size, folder, max_epochs=50, callbacks=[stop, best], enable_checkpointing=True)
    trainer.fit(classifier, datamodule=data)
    return trainer.current_epoch, best.best_model_path


def test_all_ranks_stop_early_at_the_same_epoch(pool: RankPool, tmp_path: Path) -> None:
    answers: list[Any] = pool.run(_stop_early, 3, str(tmp_path))
    assert {epoch for epoch, _ in answers} == {2}
    assert len({path for _, path in answers}) == 1
