"""A rank that is killed in mid-epoch ends the run with its name, and the run resumes from its last checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pygdist.native import load
from tests.lightning.programs import CALLBACK, COMMAND, environment, fit

pytestmark = pytest.mark.slow

_CONFIG = """
seed_everything: 1
model:
  model:
    class_path: torch_geometric.nn.GCN
    init_args: {in_channels: -1, hidden_channels: 8, num_layers: 2, out_channels: 4}
data:
  dataset: sbm
  dataset_args: {num_nodes: 400, num_classes: 4}
  cache_dir: cache
checkpoint: {dirpath: checkpoints, monitor: null, save_last: true}
trainer: {devices: 3, accelerator: cpu, max_epochs: 6, logger: false, enable_progress_bar: false, default_root_dir: .}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "killing.py").write_text(CALLBACK)
    (tmp_path / "run.yaml").write_text(_CONFIG)
    return tmp_path


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("rank", [0, 2], ids=["launching-rank", "launched-rank"])
def test_a_killed_rank_ends_the_others_with_its_name_and_the_run_resumes(folder: Path, rank: int) -> None:
    kill = ["--trainer.callbacks+=killing.Kill", f"--trainer.callbacks.rank={rank}", "--trainer.callbacks.epoch=3"]
    run = fit(folder, *kill)
    said = run.stdout + run.stderr
    assert run.returncode == (-signal.SIGKILL if rank == 0 else 1), said
    complaints = [line for line in run.stderr.splitlines() if line.startswith("pygdist: error:")]
    assert complaints, said
    assert any(f"rank {rank} is lost" in line or "look at rank 0" in line for line in complaints), complaints
    assert all("epoch 3" in line for line in complaints)
    processes = {int(line.split()[-1]) for line in run.stdout.splitlines() if " is process " in line}
    assert len(processes) == 3
    assert not [pid for pid in processes if _is_alive(pid)], "a rank was left behind"
    if rank:
        resumed = fit(folder, "--ckpt_path=checkpoints/last.ckpt")
        assert resumed.returncode == 0, resumed.stderr
        assert "max_epochs=6" in resumed.stdout + resumed.stderr


_BATCHES = ["--data.batches=NeighborBatches", "--data.batches.fan_out=[4,4]", "--data.batches.batch_size=10"]
_PULLED = ["--model.backend=pull", *_BATCHES]
_SCORED = ["--model.backend=pushpull", "--model.model=torch_geometric.nn.GAT", *_BATCHES]  # waits for scores
_SCORED += [f"--model.model.{one}" for one in ("in_channels=-1", "hidden_channels=8", "num_layers=2", "out_channels=4")]
_PIPELINED = ["--model.backend=PushPullBackend", "--model.backend.pipeline=3", *_BATCHES]


@pytest.mark.usefixtures("warm_python")
@pytest.mark.skipif(load() is None, reason="the sampler is in the native library")
@pytest.mark.parametrize(
    ("ending", "batches"),
    [
        pytest.param("SIGKILL", _PULLED, id="killed-pull", marks=pytest.mark.exhaustive),
        pytest.param("SIGSTOP", _PULLED, id="stopped-pull"),
        pytest.param("SIGKILL", _PIPELINED, id="killed-pipeline"),
        pytest.param("SIGSTOP", _SCORED, id="stopped-scores"),
    ],
)
def test_a_rank_that_is_lost_while_batches_are_on_their_way_is_named(
    folder: Path, ending: str, batches: list[str]
) -> None:
    """Of a pipeline's step 2, where three batches are on their way."""
    batch = 2 if batches is _PIPELINED else 0
    kill = ["--trainer.callbacks+=killing.Kill", "--trainer.callbacks.rank=2", "--trainer.callbacks.epoch=3"]
    kill += [f"--trainer.callbacks.batch={batch}", f"--trainer.callbacks.forward={batches is _SCORED}"]
    strategy = ["--trainer.strategy=graph_ddp_spawn", "--trainer.strategy.lost_after_s=4"]
    run = fit(folder, *kill, f"--trainer.callbacks.signal={ending}", *strategy, *batches)
    gone_s = time.time() - (folder / "checkpoints" / "last.ckpt").stat().st_mtime  # which the epoch before wrote
    pids = dict(re.findall(r"rank (\d) is process (\d+)", run.stdout))
    said = [line for line in run.stderr.splitlines() if line.startswith("pygdist: error:")]
    assert run.returncode == 1, run.stderr
    assert any(f"rank 2 (process {pids['2']}) was" in line for line in said), run.stderr
    assert "Traceback" not in run.stderr
    assert "terminate called" not in run.stderr
    assert not [pid for pid in pids.values() if _is_alive(int(pid))], "a rank was left behind"
    assert gone_s < 30


@pytest.mark.parametrize(
    "rank", [0, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["launching-rank", "launched-rank"]
)
def test_a_frozen_rank_ends_the_others_with_its_name(folder: Path, rank: int) -> None:
    """It closes no connection: what a loss looks like to nccl, or from another machine."""
    freeze = ["--trainer.callbacks+=killing.Kill", f"--trainer.callbacks.rank={rank}", "--trainer.callbacks.epoch=3"]
    strategy = ["--trainer.strategy=pygdist.GraphDDPStrategy", "--trainer.strategy.lost_after_s=4"]
    command = [sys.executable, *COMMAND, *freeze, "--trainer.callbacks.signal=SIGSTOP", *strategy]
    run = subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert run.stderr is not None
    try:
        said = []
        for line in run.stderr:
            # one that sees another leave first may say so before it has waited long enough itself
            said += [line] if "; leaving" in line or line.startswith("pygdist: error:") else []
            if len(said) == 2:
                break
        if rank:
            assert run.wait(timeout=60) == 1
    finally:
        os.killpg(run.pid, signal.SIGKILL)  # with the one that is frozen
        run.wait()
    what = "look at rank 0" if rank == 0 else "rank 2 is lost ("
    # a launching rank that leaves first ends those that it launched
    assert len(said) == 2 if rank == 0 else said
    assert all(what in line and "epoch 3" in line for line in said), said


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("method", "rank", "ending"),
    [
        ("fork", 1, "SIGKILL"),
        ("fork", 0, "SIGSTOP"),
        ("spawn", 1, "SIGKILL"),
        pytest.param("fork", 0, "SIGKILL", marks=pytest.mark.exhaustive),
        pytest.param("fork", 1, "SIGSTOP", marks=pytest.mark.exhaustive),
        pytest.param("spawn", 0, "SIGSTOP", marks=pytest.mark.exhaustive),
        pytest.param("spawn", 1, "SIGSTOP", marks=pytest.mark.exhaustive),
    ],
)
def test_a_forked_or_spawned_rank_that_is_lost_is_named(folder: Path, method: str, rank: int, ending: str) -> None:
    """The others end by themselves: torch would send them SIGTERM, of which they would tell, or wait for 30 s."""
    kill = ["--trainer.callbacks+=killing.Kill", f"--trainer.callbacks.rank={rank}", "--trainer.callbacks.epoch=3"]
    strategy = [f"--trainer.strategy=graph_ddp_{method}", "--trainer.strategy.lost_after_s=4", "--trainer.devices=2"]
    run = fit(folder, *kill, f"--trainer.callbacks.signal={ending}", *strategy)
    gone_s = time.time() - (folder / "checkpoints" / "last.ckpt").stat().st_mtime  # which the epoch before wrote
    pids = dict(re.findall(r"rank (\d) is process (\d+)", run.stdout))
    fate = "was killed by SIGKILL" if ending == "SIGKILL" else r"was stopped for \d s, and was killed"
    said = [line for line in run.stderr.splitlines() if "SIGTERM" in line or line.startswith("pygdist: error:")]
    assert run.returncode == 1, run.stderr
    assert len(said) == 1, run.stderr
    assert re.fullmatch(rf"pygdist: error: rank {rank} \(process {pids[str(rank)]}\) {fate}", said[0])
    assert "Traceback" not in run.stderr
    assert "terminate called" not in run.stderr
    assert gone_s < 4 + 15
    assert not [pid for pid in pids.values() if _is_alive(int(pid))], "a rank was left behind"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True
