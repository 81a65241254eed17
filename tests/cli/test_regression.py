"""``--task=regression`` predicts numbers: all commands, one process or two."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pygdist.graph import save_npy
from tests.cli.commands import assert_mistake, pygdist, torchrun
from tests.cli.conftest import CONFIG, graph

TASK = ("--config=run.yaml", "--task=regression")


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A folder with a graph whose nodes have two numbers each, all whole, and a run that predicts them."""
    data = graph()
    data.y = torch.stack([data.y.float() - 1, data.x[:, 0].round()], dim=1)
    save_npy(data, tmp_path / "numbers")
    (tmp_path / "run.yaml").write_text(
        CONFIG.replace("DATASET", "numbers").replace("out_channels: 4", "out_channels: 2")
    )
    return tmp_path


def test_it_trains_resumes_and_predicts(numbers: Path) -> None:
    for rank in torchrun("fit", *TASK, "--model.loss=huber", folder=numbers):
        assert rank.code == 0, rank.err
    run = numbers / "runs" / "version_0"
    rows = (run / "metrics.csv").read_text().splitlines()
    assert {"train_r2", "val_r2", "val_mae", "val_loss"} <= set(rows[0].split(","))
    checkpoints = {path.stem.partition("-")[0] for path in (run / "checkpoints").glob("*.ckpt")}
    assert "last" in checkpoints
    assert len(checkpoints) == 2, "and the best"
    last = f"--ckpt_path={run}/checkpoints/last.ckpt"
    outcome = pygdist("fit", *TASK, last, "--trainer.max_epochs=4", folder=numbers)
    assert outcome.code == 0, outcome.err
    outcome = pygdist("test", *TASK, last, folder=numbers)
    assert outcome.code == 0, outcome.err
    assert "test_mae" in outcome.out
    assert pygdist("predict", *TASK, last, folder=numbers).code == 0
    predicted = np.load(numbers / "predictions.npy")
    assert predicted.shape == (120, 2)
    assert predicted.dtype == np.float32
    assert pygdist("export", f"{run}/checkpoints/last.ckpt", "model.pt", folder=numbers).code == 0


def test_it_is_verified(numbers: Path) -> None:
    for reference in ("pyg", "single"):
        verify = ("verify", *TASK, "--world-size=2", "--double", f"--reference={reference}", "--model.loss=l1")
        outcome = pygdist(*verify, folder=numbers)
        assert outcome.code == 0, outcome.err
        assert "equal within 1e-10" in outcome.out
    wide = ("--model.model.init_args.out_channels=3",)
    assert_mistake(pygdist("verify", *TASK, *wide, folder=numbers), "values of shape", "for targets of")


def test_whole_numbers_are_kept_in_parts_if_asked_for(numbers: Path) -> None:
    partition = ("partition", "--dataset=numbers", "--parts=2")
    outcome = pygdist(*partition, "--float_labels=true", "--out=parts", "--json", folder=numbers)
    assert outcome.code == 0, outcome.err
    meta = json.loads(outcome.out)
    assert (meta["targets"], meta["num_classes"], meta["multi_label"]) == ([2], 0, False)
    assert "targets: 2" in pygdist("info", "parts", folder=numbers).out
    store = ("--data.store=parts", "--data.dataset=sbm", "--data.partitioner=null")
    for rank in torchrun("fit", *TASK, *store, folder=numbers):
        assert rank.code == 0, rank.err
    told = torchrun("fit", "--config=run.yaml", *store, folder=numbers)
    assert_mistake(told, "NodeClassifier learns classes", "use NodeRegressor (--task=regression)")


def test_classes_are_no_numbers(folder: Path) -> None:
    told = pygdist("fit", *TASK, "--model.model.out_channels=1", folder=folder)
    assert_mistake(told, "y: torch.int64", "NodeClassifier")
    assert_mistake(pygdist("fit", *TASK, "--model.loss=rmse", folder=folder), "loss", "mse")
