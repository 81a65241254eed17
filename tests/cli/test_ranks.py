"""Several ranks: a mistake that one rank finds ends all of them with one line; each way of starting ranks trains."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.commands import Outcome, assert_mistake, files, pygdist, slurm, torchrun

pytestmark = pytest.mark.slow

FIT = ("fit", "--config=run.yaml")

MISTAKES = {
    "no such dataset": (["--data.dataset=nowhere"], ["dataset 'nowhere'"]),
    "NaN": (["--data.dataset=GRAPHS/nan"], ["x: 1 of 120 nodes"]),
    "edges out of range": (["--data.dataset=GRAPHS/edge"], ["edge_index: edge 5"]),
    "labels out of range": (["--data.dataset=GRAPHS/label", "--data.num_classes=4"], ["y: 1 labels out of range"]),
    "more ranks than nodes": (["--data.dataset=GRAPHS/one-node"], ["num_parts is 2", "1 nodes"]),
    "unknown partitioner": (["--data.partitioner=metiss"], ["unknown partitioner 'metiss'", "chunk, dbh"]),
    "no such store": (["--data.store=nowhere"], ["nowhere: there is no such folder"]),
    "parts of another world size": (["--data.store=STORE"], ["has 3 parts", "2 ranks"]),
    "too few outputs": (["--model.model.out_channels=3"], ["3 values per node", "out_channels to 4"]),
    "other inputs": (["--model.model.in_channels=5"], ["12 features per node"]),
    "backend of one process": (["--model.backend=single"], ["backend 'single'", "use backend cache, comm"]),
    "other number of processes": (
        ["--trainer.num_nodes=2"],
        ["devices=2", "num_nodes=2", "torchrun has started 2 processes, 2 of them on"],
    ),
    "ddp": (["--trainer.strategy=ddp"], ["'ddp'", "use graph_ddp"]),
    "missing checkpoint": (["--ckpt_path=no.ckpt"], ["no.ckpt: there is no such checkpoint"]),
    "checkpoint of another model": (
        ["--ckpt_path=CHECKPOINT", "--model.model.hidden_channels=16"],
        ["--ckpt_path", "another model"],
    ),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES)
def test_one_line_from_all_ranks(
    args: list[str], words: list[str], folder: Path, graphs: Path, store: Path, checkpoint: Path
) -> None:
    places = {"GRAPHS": str(graphs), "STORE": str(store), "CHECKPOINT": str(checkpoint)}
    for name, place in places.items():
        args = [arg.replace(name, place) for arg in args]
    before = files(folder)
    assert_mistake(torchrun(*FIT, *args, folder=folder), *words)
    assert files(folder) - {"cache"} == before


DIFFERENCES = {
    "--model.lr=0.5": "--model.lr is 0.01 on rank 0, but 0.5 on rank 1; start all processes with the same options",
    "--model.model.hidden_channels=16": "hidden_channels is 8 on rank 0, but 16 on rank 1",
    "--trainer.max_epochs=9": "--trainer.max_epochs is 3 on rank 0, but 9 on rank 1",
    "--data.store=nowhere": "--data.store is None on rank 0, but nowhere on rank 1",
    "--model.backend=cache": "--model.backend is comm on rank 0, but cache on rank 1",
    "--optimizer=SGD": "--optimizer.class_path is absent on rank 0, but torch.optim.SGD on rank 1",
    "--model.class_weights=[1.0,2.0,1.0,1.0]": "--model.class_weights",
    "--resume": "--resume is None on rank 0, but True on rank 1",
}


@pytest.mark.parametrize(("option", "words"), DIFFERENCES.items(), ids=DIFFERENCES)
def test_machines_with_other_options_are_refused(option: str, words: str, folder: Path) -> None:
    assert_mistake(torchrun(*FIT, folder=folder, second=[option]), words)


def test_machines_may_have_other_folders(folder: Path) -> None:
    second = [f"--trainer.default_root_dir={folder}/there", f"--data.cache_dir={folder}/cached"]
    _check_run(folder, torchrun(*FIT, folder=folder, second=second))


@pytest.fixture
def damaged(folder: Path, graphs: Path) -> Path:
    """A folder whose store has one wrong byte, in the part that only rank 1 reads."""
    assert pygdist("partition", f"--dataset={graphs / 'good'}", "--out=parts", folder=folder).code == 0
    path = folder / "parts" / "part_1" / "x.npy"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return folder


def test_a_part_that_is_on_another_machine_is_named(damaged: Path) -> None:
    shutil.rmtree(damaged / "parts" / "part_1")
    args = (*FIT, "--data.store=parts")
    assert_mistake(torchrun(*args, folder=damaged), "parts/part_1: there is no such folder on", "found by rank 1")


def test_a_damaged_part_is_named_by_the_rank_that_finds_it(damaged: Path) -> None:
    args = (*FIT, "--data.store=parts")
    assert_mistake(torchrun(*args, folder=damaged), "part_1/x.npy: is damaged", "rank 1")
    (damaged / "parts" / "part_1" / "x.npy").unlink()
    assert_mistake(torchrun(*args, folder=damaged), "part_1/x.npy: is missing", "rank 1")


@pytest.mark.usefixtures("warm_python")
def test_the_launcher_ends_all_ranks_after_a_mistake(damaged: Path) -> None:
    outcome = _process("-m", "pygdist.cli", *FIT, "--data.store=parts", "--trainer.devices=2", folder=damaged)
    assert_mistake(outcome, "part_1/x.npy: is damaged", "rank 1")
    assert not (damaged / "runs").exists()


REFUSES = """
import time
from lightning.pytorch import Callback
from pygdist.errors import RefusedError

class Refuse(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.global_rank == 0 and trainer.current_epoch == 1:
            raise RefusedError("parts: could not be written (No space left on device)")
        if trainer.current_epoch == 1:
            time.sleep(8)  # as one that still imports, or reads its part
"""


def test_the_others_ask_rank_0_which_keeps_their_store_what_it_was_refused(folder: Path) -> None:
    (folder / "refusing.py").write_text(REFUSES)
    outcomes = torchrun(*FIT, "--trainer.callbacks+=refusing.Refuse", folder=folder)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    said = [line for outcome in outcomes for line in outcome.err.splitlines() if "pygdist: error:" in line]
    assert said == ["pygdist: error: parts: could not be written (No space left on device)"]


def test_the_launcher_trains(folder: Path) -> None:
    _check_run(folder, [_process("-m", "pygdist.cli", *FIT, "--trainer.devices=2", folder=folder)])


@pytest.mark.usefixtures("warm_python")
def test_torchrun_trains(folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    _check_run(folder, [_process(*launcher, "-m", "pygdist.cli", *FIT, folder=folder)])


def test_slurm_trains_and_one_task_tells_of_a_mistake(folder: Path) -> None:
    _check_run(folder, slurm(*FIT, folder=folder))
    assert_mistake(slurm(*FIT, "--model.backend=single", folder=folder), "backend 'single'")
    two = slurm(*FIT, "--trainer.num_nodes=2", folder=folder)
    assert_mistake(two, "2 ranks were started, but --trainer.devices and --trainer.num_nodes ask for 4")


@pytest.mark.usefixtures("warm_python")
def test_models_averaged_over_more_parts_than_ranks(folder: Path) -> None:
    args = ("--config=run.yaml", "--model.backend=replica", "--trainer.strategy=model_averaging", "--data.num_parts=4")
    outcome = _process("-m", "pygdist.cli", "fit", *args, "--trainer.devices=2", folder=folder)
    assert outcome.code == 0, outcome.err
    assert "backend 'replica' is not exact: rows of other parts' nodes are computed from what is kept" in outcome.err
    last = f"--ckpt_path={folder / 'runs' / 'version_0' / 'checkpoints' / 'last.ckpt'}"
    tested = torchrun("test", *args, last, folder=folder)
    assert [rank.code for rank in tested] == [0, 0], tested[0].err
    alone = pygdist("test", "--config=run.yaml", "--model.backend=single", last, folder=folder)
    # four parts on two ranks, or all on one: it is the same model on the whole graph
    scores = [dict(re.findall(r"(test_\w+)\D+([\d.]+)", outcome.out)) for outcome in (tested[0], alone)]
    assert scores[0].keys() == {"test_acc", "test_loss"}
    for name, score in scores[0].items():
        assert float(score) == pytest.approx(float(scores[1][name]), rel=1e-5)


def _check_run(folder: Path, outcomes: list[Outcome]) -> None:
    said = "\n".join(outcome.err for outcome in outcomes)
    assert {outcome.code for outcome in outcomes} == {0}, said
    assert said.count("Starting with 2 processes") == 1, "Lightning's lines are not repeated by our handler"
    run = folder / "runs" / "version_0"
    assert {"checkpoints", "config.yaml", "metrics.csv"} <= {path.name for path in run.iterdir()}
    assert [path.name for path in (folder / "runs").iterdir()] == ["version_0"]
    with (run / "metrics.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["sent_bytes_total"]]
    assert len(rows) == 3
    assert all(float(row["sent_bytes_min"]) > 0 for row in rows)


def _process(*args: str, folder: Path) -> Outcome:
    """An interpreter of its own; asserts that no process is left in the folder."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *args],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=180)
        left = _processes_in(folder)
        assert not left, f"{left} outlived the command"
    finally:
        for other in _processes_in(folder):
            other.kill()
    return Outcome(process.returncode, out, err)


def _processes_in(folder: Path) -> list[psutil.Process]:
    """Those that run there, whoever started them."""
    return [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(folder)]
