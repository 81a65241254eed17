"""Ranks started from Python: what one finds wrong reaches the caller, and a notebook's threads do no harm.

Each test is a script of its own, so that a hang ends.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from pygdist.errors import InputError
from pygdist.lightning.launcher import GraphLauncher, ProcessLauncher
from pygdist.memory.gpus import driver_runs
from pygdist.testing import RankPool

pytestmark = pytest.mark.slow

_THREADS = """
import sys

import lightning.pytorch as pl
import torch
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, NodeClassifier
from pygdist.graph import load_graph


class Threads(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        module.log("threads", float(torch.get_num_threads()), sync_dist=True)


torch.set_num_threads(3)
data = load_graph("sbm", num_nodes=2000)
model = GCN(64, 64, num_layers=2, out_channels=10)
model(data.x, data.edge_index).sum().backward()
assert torch.get_num_threads() == 3

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="graph_ddp_notebook", max_epochs=2, logger=False,
    callbacks=[Threads()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(NodeClassifier(model), datamodule=GraphDataModule(data, cache_dir=sys.argv[1]))
assert trainer.callback_metrics["threads"] == 1, trainer.callback_metrics
assert torch.get_num_threads() == 3, "the notebook itself keeps its threads"
"""


def test_ranks_forked_from_a_process_with_threads_train(tmp_path: Path) -> None:
    # with OMP_NUM_THREADS set Lightning leaves the number of threads alone, and the ranks used to wait for ever
    _run(_THREADS, tmp_path, OMP_NUM_THREADS="3")


_FAILURE = """
import os
import signal
import sys

import lightning.pytorch as pl
from torch_geometric.nn import GCN

import pygdist
from pygdist import GraphDataModule, NodeClassifier


class Kill(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder, strategy, out_channels):
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=5, logger=False, callbacks=[Kill()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = GCN(64, 8, num_layers=2, out_channels=int(out_channels))
    data = GraphDataModule("sbm", {"num_nodes": 500}, cache_dir=folder)
    try:
        trainer.fit(NodeClassifier(model), datamodule=data)
    except (pygdist.InputError, pygdist.LostRankError) as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("strategy", ["graph_ddp_spawn", "graph_ddp_notebook"])
def test_a_mistake_that_ranks_find_is_raised_in_the_caller(strategy: str, tmp_path: Path) -> None:
    said = _run(_FAILURE, tmp_path, strategy, "3")
    assert said.startswith("InputError: the model returns 3 values per node, but the graph has 10 classes"), said


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    "strategy", [pytest.param("graph_ddp_spawn", marks=pytest.mark.exhaustive), "graph_ddp_notebook"]
)
def test_a_killed_rank_is_named_in_the_caller(strategy: str, tmp_path: Path) -> None:
    said = _run(_FAILURE, tmp_path, strategy, "10")
    assert said.startswith("LostRankError: rank 1 (process "), said
    assert said.strip().endswith("was killed by SIGKILL")


_LATE = """
import time
from types import SimpleNamespace

from pygdist.lightning import launcher

# as on a busy machine: it finds both ended
launcher.connection = SimpleNamespace(wait=lambda *_, timeout: time.sleep(8))
"""


@pytest.mark.usefixtures("warm_python")
def test_a_killed_rank_is_named_though_the_error_of_another_is_seen_first(tmp_path: Path) -> None:
    said = _run(_LATE + _FAILURE, tmp_path, "graph_ddp_notebook", "10")
    assert said.startswith("LostRankError: rank 1 (process "), said


_ALIKE = """
import sys

import lightning.pytorch as pl
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, GraphDDPStrategy, NodeClassifier


def loss(start_method):
    pl.seed_everything(7)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=GraphDDPStrategy(start_method=start_method), max_epochs=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    module = NodeClassifier(GCN(64, 8, num_layers=2, out_channels=10, dropout=0.5))
    trainer.fit(module, datamodule=GraphDataModule("sbm", {"num_nodes": 500}, cache_dir=sys.argv[1]))
    return trainer.callback_metrics["train_loss"].item()


if __name__ == "__main__":
    print(*(loss(method) for method in ("fork", "forkserver", "spawn")))
"""


@pytest.mark.usefixtures("warm_python")
def test_every_start_method_trains_the_same(tmp_path: Path) -> None:
    """Ranks share no parameters, and draw from the caller's random generators."""
    fork, server, spawn = _run(_ALIKE, tmp_path).split()
    assert fork == server == spawn


_END = """
import atexit
import contextlib
import sys
import threading
from pathlib import Path

folder = Path(sys.argv[1])


def threads():
    names = [thread.name for thread in threading.enumerate() if thread.name != "pygdist-observer"]  # it only sleeps
    for file in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            names.append(file.read_text().strip())
    return names


@atexit.register  # before anything else, so it runs last
def look():
    left = [name for name in threads() if "gloo" in name or "pygdist" in name]
    with (folder.parent / "ends").open("a") as file:
        file.write(f"{trainer.global_rank} {left}\\n")


import lightning.pytorch as pl
from torch_geometric.nn import GCN

from pygdist import GraphDataModule, InputError, NodeClassifier


class Looks(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        assert any("gloo" in name for name in threads())  # so they are called


def training():
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy="graph_ddp", max_epochs=2, logger=False, callbacks=[Looks()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )


# everything is kept: the script's own names are there when Python ends
data = GraphDataModule("sbm", {"num_nodes": 500}, cache_dir=folder)
trainer = training()
try:
    trainer.fit(NodeClassifier(GCN(64, 8, num_layers=2, out_channels=3)), datamodule=data)
except InputError as error:  # all ranks agree on it
    assert "returns 3 values per node" in str(error)
trainer = training()
module = NodeClassifier(GCN(64, 8, num_layers=2, out_channels=10))
trainer.fit(module, datamodule=data)
trainer.validate(module, datamodule=data)
"""


def test_no_thread_is_left_to_run_on_when_python_ends(tmp_path: Path) -> None:
    """Gloo's would abort the process, now and then."""
    _run(_END, tmp_path)
    ends, deadline = tmp_path / "ends", time.monotonic() + 60
    while len(ends.read_text().splitlines()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # rank 1 may end after rank 0
    assert sorted(ends.read_text().splitlines()) == ["0 []", "1 []"]


def _run(text: str, folder: Path, *args: str, **environment: str) -> str:
    """Run a script in an interpreter of its own; what it printed last."""
    path = folder / "script.py"
    path.write_text(text)
    script = subprocess.run(
        [sys.executable, str(path), str(folder / "cache"), *args],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert script.returncode == 0, script.stderr
    return script.stdout.strip().rpartition("\n")[2]


@pytest.mark.parametrize(("kind", "method", "started"), [("cuda", "fork", False), ("cpu", "forkserver", True)])
def test_other_ranks_are_forked(kind: str, method: str, started: bool) -> None:
    launcher = ProcessLauncher(mock.Mock(parallel_devices=[torch.device(kind)]), method)
    with mock.patch("pygdist.lightning.launcher.driver_runs", return_value=started):
        launcher._check_gpus()


def test_without_a_driver_none_runs() -> None:
    assert driver_runs() is torch.cuda.is_available()


@pytest.mark.parametrize(("method", "started"), [("fork", True), ("forkserver", False)])
def test_forked_ranks_on_gpus_are_refused(method: str, started: bool) -> None:
    strategy = mock.Mock(parallel_devices=[torch.device("cuda", 0)])
    with (
        mock.patch("pygdist.lightning.launcher.driver_runs", return_value=started),
        pytest.raises(InputError, match=f"forked \\('{method}'\\) cannot use GPUs.*'graph_ddp_spawn'"),
    ):
        ProcessLauncher(strategy, method).launch(print)


def test_ranks_of_a_machine_with_a_gpu_import_pyg_themselves() -> None:
    with mock.patch("torch.cuda.is_available", return_value=True), RankPool(1) as pool:
        assert pool.run(_started_by, 1) == ["spawn"]


def _started_by(rank: int, num_ranks: int) -> str:
    return str(multiprocessing.get_start_method(allow_none=True))


@pytest.mark.parametrize(
    ("environment", "variables", "words"),
    [
        (
            SLURMEnvironment(auto_requeue=False),
            {"SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "graph"},
            "devices=2 and num_nodes=1, but SLURM has --ntasks-per-node=1 and --nodes=2",
        ),
        (
            TorchElasticEnvironment(),
            {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"},
            "devices=2 and num_nodes=1, but torchrun has started 3 processes, 2 of them on this machine",
        ),
    ],
)
def test_other_numbers_of_processes_are_refused(
    environment: ClusterEnvironment, variables: dict[str, str], words: str
) -> None:
    launcher = GraphLauncher(environment, num_processes=2, num_nodes=1)
    with mock.patch.dict(os.environ, variables), pytest.raises(InputError, match=words):
        launcher.launch(print)


@pytest.mark.parametrize(("num_nodes", "node_rank", "told"), [(2, None, True), (2, "0", False), (1, None, False)])
def test_machines_that_nobody_has_started_are_told_how(
    num_nodes: int,
    node_rank: str | None,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    if node_rank is not None:
        monkeypatch.setenv("NODE_RANK", node_rank)
    launcher = GraphLauncher(LightningEnvironment(), num_processes=1, num_nodes=num_nodes)
    with caplog.at_level("INFO", logger="pygdist"):
        assert launcher.launch(lambda: "ran") == "ran"
    assert ("num_nodes=2, but neither torchrun nor SLURM has started this process" in caplog.text) == told
