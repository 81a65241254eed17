"""Runs of ``delayed`` with a delay resume bit for bit, and end with flights open."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.programs import CALLBACK, fit

pytestmark = pytest.mark.slow

_CONFIG = """
seed_everything: 1
model:
  model:
    class_path: torch_geometric.nn.GraphSAGE
    init_args: {in_channels: -1, hidden_channels: 8, num_layers: 3, out_channels: 4}
  backend: {class_path: pygdist.backends.DelayedBackend, init_args: {delay: 5}}
data:
  dataset: sbm
  dataset_args: {num_nodes: 400, num_classes: 4}
  cache_dir: cache
checkpoint: {dirpath: checkpoints, monitor: null, save_last: true}
trainer: {devices: 3, accelerator: cpu, max_epochs: 14, logger: false, enable_progress_bar: false, default_root_dir: .}
"""

_RAISE = """
class Raise(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        if (trainer.global_rank, trainer.current_epoch) == (1, 7):
            raise ValueError("of rank 1")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "killing.py").write_text(CALLBACK + _RAISE)
    (tmp_path / "run.yaml").write_text(_CONFIG)
    return tmp_path


def _last(folder: Path, name: str = "checkpoints") -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / name / "last.ckpt", weights_only=True)
    return found


_KILL = ("--trainer.callbacks+=killing.Kill", "--trainer.callbacks.rank=2", "--trainer.callbacks.epoch=8")


@pytest.mark.usefixtures("warm_python")
def test_resume_of_a_killed_run_is_the_unbroken_run(folder: Path) -> None:
    keep = ("--model.backend.keep=true", "--model.backend.gradients=stale")
    whole = fit(folder, *keep, "--checkpoint.dirpath=whole")
    assert whole.returncode == 0, whole.stderr
    began = time.monotonic()
    killed = fit(folder, *keep, *_KILL)
    assert killed.returncode == 1, killed.stderr
    assert time.monotonic() - began < 60
    assert "rank 2 is lost" in killed.stderr
    assert "terminate called" not in killed.stderr
    saved = _last(folder)
    assert saved["epoch"] == 7
    assert set(saved["backend_state"]["parts"]) == {"0", "1", "2"}
    resumed = fit(folder, *keep, "--ckpt_path=checkpoints/last.ckpt")
    assert resumed.returncode == 0, resumed.stderr
    assert "has no state" not in resumed.stdout + resumed.stderr
    ours, theirs = _last(folder), _last(folder, "whole")
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value), name
    for part, state in theirs["backend_state"]["parts"].items():
        assert state.keys() == ours["backend_state"]["parts"][part].keys()
        assert all(torch.equal(ours["backend_state"]["parts"][part][name], value) for name, value in state.items())


@pytest.mark.usefixtures("warm_python")
def test_resume_on_other_ranks_or_with_another_delay_warms_up_anew_and_says_so(folder: Path) -> None:
    assert fit(folder, "--trainer.max_epochs=7").returncode == 0
    for changed in ("--trainer.devices=2", "--model.backend.delay=2"):
        resumed = fit(folder, "--ckpt_path=checkpoints/last.ckpt", changed, "--trainer.max_epochs=9")
        assert resumed.returncode == 0, resumed.stderr
        said = " ".join((resumed.stdout + resumed.stderr).split())
        assert said.count("no state of backend 'delayed' for these parts of the graph and these arguments;") == 1


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("how", ["raises", "interrupted"])
def test_end_of_a_run_with_flights_open(how: str, folder: Path) -> None:
    interrupt = (*_KILL, "--trainer.callbacks.signal=SIGINT")
    began = time.monotonic()
    run = fit(folder, *(interrupt if how == "interrupted" else ["--trainer.callbacks+=killing.Raise"]))
    said = run.stdout + run.stderr
    assert run.returncode == (128 + signal.SIGINT if how == "interrupted" else 1), said
    assert time.monotonic() - began < 60
    assert "terminate called" not in said
    assert ("SIGINT reached rank 2" if how == "interrupted" else "of rank 1") in said
