"""Where the machine refuses room, files or memory, a command ends in one line, leaves nothing, and runs once it may."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest

from pygdist import cli
from tests.cli.commands import Outcome, assert_mistake, files, pygdist, torchrun
from tests.server import run

pytestmark = pytest.mark.slow

FIT = "fit --config=run.yaml"


def _limited(args: list[str]) -> int:
    """The command under a limit: its name in ``resource``, the limit, and the command line."""
    name, limit, *line = args
    if name == "RLIMIT_NOFILE" and int(limit):
        limit = str(int(limit) + len(os.listdir("/proc/self/fd")))
    if int(limit):
        resource.setrlimit(getattr(resource, name), (int(limit), int(limit)))
    return cli.main(line)


def limited(name: str, limit: int, line: str, *, folder: Path) -> Outcome:
    """Run a command under a limit; it leaves no temporary file, not even those that PyG makes."""
    with tempfile.TemporaryDirectory() as scratch:
        outcome = run(_limited, [name, str(limit), *line.split()], folder, [{"TMPDIR": scratch}])[0]
        assert not os.listdir(scratch)
    return outcome


LIMITS = {
    "logs": ("RLIMIT_FSIZE", 2000, FIT, ["/version_1/", "File too large; raise the limit on the size of files"]),
    "cache": ("RLIMIT_FSIZE", 3000, FIT, ["cache/", "File too large"]),
    "parts": ("RLIMIT_FSIZE", 3000, "partition --dataset=sbm --out=parts", ["parts: could not", "File too large"]),
    "replicas": ("RLIMIT_FSIZE", 9000, "partition --dataset=sbm --hops=2 --out=parts", ["parts: could", "too large"]),
    "weights": ("RLIMIT_FSIZE", 2000, "export LAST model.pt", ["model.pt: could not be written"]),
    "safetensors": ("RLIMIT_FSIZE", 500, "export LAST m.safetensors", ["m.safetensors: could not", "File too large"]),
    "files": ("RLIMIT_NOFILE", 20, FIT, ["a process may open", "ranks need about 72; raise the limit (ulimit -n)"]),
    "memory": (
        "RLIMIT_NOFILE", 0, f"{FIT} --model.model.hidden_channels=1000000000000000", ["Cannot allocate memory; use"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "limit", "line", "words"), LIMITS.values(), ids=LIMITS)
def test_limits(name: str, limit: int, line: str, words: list[str], folder: Path, checkpoint: Path) -> None:
    line = line.replace("LAST", str(checkpoint))
    if "/version_1/" in words:  # the store is there
        assert limited(name, 0, line, folder=folder).code == 0
    before = files(folder)
    assert_mistake(limited(name, limit, line, folder=folder), *words)
    assert files(folder) - {"cache"} == before - {"cache"}
    if "memory" not in words[0]:
        outcome = limited(name, 0, line, folder=folder)
        assert outcome.code == 0, outcome.err


class FullDisk(pl.Callback):
    """Writes to a full disk after the second epoch, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            with open("/dev/full", "w") as file:
                file.write("all")


@pytest.mark.parametrize("start", ["torchrun", "fork"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_is_refused_something(rank: int, start: str, folder: Path) -> None:
    callback = ("--trainer.callbacks+=tests.cli.test_disks.FullDisk", f"--trainer.callbacks.rank={rank}")
    if start == "torchrun":
        outcomes = torchrun(*FIT.split(), *callback, folder=folder)
        outcomes = [outcomes[rank], outcomes[1 - rank]]  # the other says nothing
    else:
        fork = ("--trainer.devices=2", "--trainer.strategy=graph_ddp_fork")
        outcomes = [pygdist(*FIT.split(), *callback, *fork, folder=folder)]
    assert_mistake(outcomes, "/dev/full: No space left on device; make room there, or choose another folder")


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 96 KiB below the folder."""
    place = folder / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96k", "pygdist-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_kills_no_prediction(folder: Path, small_disk: Path, checkpoint: Path) -> None:
    many = "--data.dataset_args={num_nodes: 20000, num_features: 12, num_classes: 4, avg_degree: 2}"
    args = ("--config=run.yaml", f"--ckpt_path={checkpoint}", "--data.dataset=sbm", many)
    line = ("predict", *args, "--predictions.path=disk/y.npy")
    outcome = pygdist(*line, folder=folder)
    assert_mistake(outcome, "disk/.y.npy.", "No space left on device; make room there")
    assert not list(small_disk.iterdir())
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert pygdist(*line, folder=folder).code == 0
    assert np.load(small_disk / "y.npy").shape == (20_000,)
