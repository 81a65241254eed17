"""Runs that go on: ``--resume``, jobs that are started again, and the names of checkpoints."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pygdist import InputError
from pygdist.commands import run_folder
from pygdist.commands.best_checkpoint import BestCheckpoint
from pygdist.commands.run_folder import (
    OwnCheckpoints,
    RunFolder,
    folder_to_go_on,
    named_checkpoint,
    new_folder,
    note_of,
)
from tests.cli.commands import Outcome, assert_mistake, pygdist, slurm, torchrun

FIT = ("fit", "--config=run.yaml")


def _fit(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Outcome:
    outcome = pygdist(*FIT, *args, folder=folder, env=env)
    assert outcome.code == 0, outcome.err
    return outcome


def _last(folder: Path, version: int = 0) -> dict[str, Any]:
    path = folder / "runs" / f"version_{version}" / "checkpoints" / "last.ckpt"
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def _rows(folder: Path, version: int = 0) -> list[dict[str, str]]:
    with (folder / "runs" / f"version_{version}" / "metrics.csv").open() as lines:
        return list(csv.DictReader(lines))


def _losses(folder: Path, version: int = 0) -> dict[int, str]:
    """The training loss of each epoch; each epoch is there once."""
    rows = [(int(row["epoch"]), row["train_loss"]) for row in _rows(folder, version) if row["train_loss"]]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, trained: tuple[Path, Outcome]) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    shutil.copy(trained[0] / "run.yaml", folder)
    _fit(folder, "--trainer.max_epochs=5")
    return folder


@pytest.fixture
def begun(trained: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A folder with a run of three epochs, which may go on."""
    shutil.copytree(trained[0], tmp_path / "begun")
    return tmp_path / "begun"


def _assert_as_unbroken(folder: Path, unbroken: Path) -> None:
    ours, theirs = _last(folder)["state_dict"], _last(unbroken)["state_dict"]
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert _losses(folder) == _losses(unbroken)
    assert [path.name for path in (folder / "runs").iterdir()] == ["version_0"]
    names = [path.name for path in (folder / "runs" / "version_0" / "checkpoints").iterdir()]
    assert sorted(name for name in names if name.startswith((".", "last"))) == ["last.ckpt"]
    assert len(names) == 2, "the best and the last"


def test_a_run_goes_on_in_its_folder(begun: Path, unbroken: Path) -> None:
    outcome = _fit(begun, "--resume", "--trainer.max_epochs=5")
    assert "the run goes on from runs/version_0/checkpoints/last.ckpt" in outcome.err
    _assert_as_unbroken(begun, unbroken)


def test_fewer_epochs_than_the_run_has_are_refused(begun: Path) -> None:
    outcome = pygdist(*FIT, "--resume", "--trainer.max_epochs=2", folder=begun)
    assert_mistake(outcome, "the run has trained 3 epochs, more than max_epochs=2; raise --trainer.max_epochs")


def test_damaged_checkpoints_and_rows_after_the_one_before_are_passed_over(begun: Path, unbroken: Path) -> None:
    run = begun / "runs" / "version_0"
    last = run / "checkpoints" / "last.ckpt"
    (best,) = (path for path in last.parent.iterdir() if path != last)
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    (run / "checkpoints" / ".last.ckpt.0123456789ab.partial").write_bytes(content[:100])
    with (run / "metrics.csv").open("a") as file:
        file.write("9,9,9")  # a row that is cut off
    outcome = _fit(begun, "--resume=true", "--trainer.max_epochs=5")
    assert "last.ckpt: is damaged" in outcome.err
    assert f"the run goes on from runs/version_0/checkpoints/{best.name}" in outcome.err
    _assert_as_unbroken(begun, unbroken)


def test_a_run_that_has_ended_says_so(begun: Path) -> None:
    before = (begun / "runs" / "version_0" / "metrics.csv").read_text()
    outcome = _fit(begun, "--resume")
    assert "the run had ended by itself after 3 epochs (max_epochs=3)" in outcome.err
    assert (begun / "runs" / "version_0" / "metrics.csv").read_text() == before
    assert not list(begun.rglob(".unfinished"))


def test_a_run_that_stopped_early_says_so(folder: Path) -> None:
    (folder / "stop.yaml").write_text(
        "trainer:\n  max_epochs: 50\n  callbacks:\n    - class_path: EarlyStopping\n"
        "      init_args: {monitor: val_loss, patience: 1, min_delta: 10.0}\n"
    )
    _fit(folder, "--config=stop.yaml")
    outcome = _fit(folder, "--config=stop.yaml", "--resume")
    assert "the run had ended by itself after 2 epochs (EarlyStopping)" in outcome.err
    assert _last(folder)["global_step"] == 2


def test_a_run_begins_where_there_is_nothing_of_it(begun: Path) -> None:
    args = ("--resume", "--model.lr=0.5", "--exchange.ranks=ranks.csv", "--checkpoint.save_last=link")
    outcome = _fit(begun, *args, "--trainer.max_epochs=1")
    assert "runs/version_0: is another run's (--model.lr)" in outcome.err
    assert "there is no checkpoint of this run under runs, so it begins" in outcome.err
    assert _last(begun, 1)["epoch"] == 0
    again = _fit(begun, *args, "--trainer.max_epochs=2")
    assert "goes on from runs/version_1/" in again.err
    assert list(_losses(begun, 1)) == [0, 1]
    assert [line.split(",")[0] for line in (begun / "ranks.csv").read_text().splitlines()] == ["epoch", "0", "1"]
    assert (begun / "runs" / "version_1" / "checkpoints" / "last.ckpt").is_symlink()
    assert not list(begun.rglob("*.partial"))


def test_runs_that_save_in_one_folder_are_told_apart(folder: Path) -> None:
    shared, other, ours = "--checkpoint.dirpath=ck", "--model.lr=0.5", "--model.lr=0.25"
    _fit(folder, shared, other, "--trainer.max_epochs=3")
    theirs = (folder / "ck" / "last.ckpt").read_bytes()
    _fit(folder, shared, ours, "--trainer.max_epochs=1")
    outcome = _fit(folder, shared, ours, "--resume", "--trainer.max_epochs=2")
    assert "the run goes on from ck/last-v1.ckpt" in outcome.err
    assert list(_losses(folder, 1)) == [0, 1]
    saved = torch.load(folder / "ck" / "last-v1.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 0.25
    assert (folder / "ck" / "last.ckpt").read_bytes() == theirs
    for option, name in ((other, "last.ckpt"), (ours, "last-v1.ckpt")):
        outcome = pygdist("test", "--config=run.yaml", shared, option, "--ckpt_path=last", folder=folder)
        assert outcome.code == 0, outcome.err
        assert f"--ckpt_path=last: ck/{name}\n" in outcome.err
    outcome = pygdist("test", "--config=run.yaml", shared, "--model.lr=0.125", "--ckpt_path=last", folder=folder)
    assert_mistake(outcome, "no run of this configuration", "ck/last-v1.ckpt is another run's (--model.lr)")


def _begin(root: Path, version: int, saved: Path, **model: float) -> dict[str, Any]:
    """Make the folder of a run that saves elsewhere, and return its configuration."""
    config = {"task": "nodes", "model": dict(model), "checkpoint": {"dirpath": str(saved)}}
    folder = root / f"version_{version}"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return config


def test_checkpoints_that_note_no_run_count_if_only_one_saves_there(tmp_path: Path) -> None:
    root, saved = tmp_path / "runs", tmp_path / "ck"
    saved.mkdir()
    torch.save({"state_dict": {}, "global_step": 1}, saved / "last.ckpt")
    config = _begin(root, 0, saved, lr=0.5)
    _begin(root, 1, tmp_path / "elsewhere", lr=0.25)
    assert OwnCheckpoints.of(root / "version_0", config, root, saved)({})
    assert named_checkpoint("last", root, config, saved) == saved / "last.ckpt"
    _begin(root, 2, saved, lr=0.25)
    assert not OwnCheckpoints.of(root / "version_0", config, root, saved)({})
    with pytest.raises(InputError, match=r"several runs save in .*ck, and last\.ckpt does not say whose it is"):
        named_checkpoint("last", root, config, saved)


def test_a_run_is_told_from_one_of_the_same_configuration(tmp_path: Path) -> None:
    root, saved = tmp_path / "runs", tmp_path / "ck"
    configs = [_begin(root, version, saved, lr=0.5) for version in range(2)]
    first, second = (RunFolder(root / f"version_{version}") for version in range(2))
    own = OwnCheckpoints.of(first.path, configs[0], root, saved)
    assert own({"pygdist": note_of(first, configs[0])})
    assert not own({"pygdist": note_of(second, configs[1])})
    best = BestCheckpoint()
    best.own = own
    saved.mkdir()
    for run, is_own in ((first, True), (second, False)):
        torch.save({"state_dict": {}, "pygdist": note_of(run, configs[0])}, saved / "last.ckpt")
        assert best._last_in(saved, "") == (saved / "last.ckpt" if is_own else None), "another run's is not replaced"
        run.finish()
    again = RunFolder(first.path)
    assert again.run == first.run, "it stays if the run goes on"
    again.finish()


AGAIN = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


def test_a_run_whose_configuration_was_cut_off_is_passed_over(begun: Path, unbroken: Path) -> None:
    cut = begun / "runs" / "version_1"
    cut.mkdir()
    (cut / "config.yaml").write_text("model: {class_path: torch_geo")
    outcome = _fit(begun, "--resume", "--trainer.max_epochs=5")
    assert outcome.code == 0, outcome.err
    assert "runs/version_1: is another run's (runs/version_1/config.yaml" in outcome.err
    shutil.rmtree(cut)
    _assert_as_unbroken(begun, unbroken)


def test_jobs_that_are_started_again_go_on(begun: Path, unbroken: Path) -> None:
    mark = begun / "runs" / "version_0" / ".unfinished"
    mark.write_text("SLURM 7\n")
    _fit(begun, "--trainer.max_epochs=5", env=AGAIN)
    _assert_as_unbroken(begun, unbroken)
    mark.write_text("SLURM 7\n")
    outcome = _fit(begun, "--resume=false", "--trainer.max_epochs=1", env=AGAIN)
    assert "goes on" not in outcome.err
    assert _last(begun, 1)["epoch"] == 0


@pytest.mark.parametrize(
    ("mark", "env", "goes_on"),
    [
        pytest.param("torchrun a", {"TORCHELASTIC_RUN_ID": "a"}, True, id="torchrun-other-machines"),
        pytest.param("torchrun b", {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, False,
                     id="torchrun-another-job"),
        pytest.param(None, {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}, False, id="had-ended"),
        pytest.param("SLURM 7", AGAIN, True, id="slurm-requeue"),
        pytest.param("SLURM 7", {"SLURM_JOB_ID": "7"}, False, id="slurm-next-command"),
        pytest.param("SLURM 8", AGAIN, False, id="slurm-another-job"),
        pytest.param("torchrun a\nSLURM 7", {"TORCHELASTIC_RUN_ID": "b", **AGAIN}, True, id="torchrun-in-slurm"),
    ],
)  # fmt: skip
def test_a_job_goes_on_with_its_own_run(
    begun: Path, mark: str | None, env: dict[str, str], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun / "runs" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    if mark:
        (folder / ".unfinished").write_text(f"{mark}\n")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert folder_to_go_on(begun / "runs", config, None) == (folder if goes_on else None)
    assert folder_to_go_on(begun / "runs", config, True) == folder


UID = "0123abcd-0123-4567-89ab-0123456789ab"
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-x7k2p"}
INDEXED = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "train-3", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("first", "second", "goes_on"),
    [
        pytest.param((POD, UID, "a"), (POD, UID, "b"), True, id="container-again"),
        pytest.param((POD, "", "a"), (POD, "", "b"), True, id="container-again-uid-not-seen"),
        pytest.param((POD, UID, "a"), (POD, UID, "a"), False, id="next-command"),
        pytest.param((POD, UID, "a"), (POD, UID.replace("a", "b"), "b"), False, id="new-pod-of-the-same-name"),
        pytest.param((POD, UID, "a"), ({**POD, "HOSTNAME": "train-q9w3e"}, UID, "b"), False, id="other-pod"),
        pytest.param((INDEXED, UID, "a"), (INDEXED, UID.replace("a", "b"), "b"), True, id="indexed-job-new-pod"),
        pytest.param((INDEXED, UID, "a"), (INDEXED, UID, "a"), False, id="indexed-job-next-command"),
        pytest.param((INDEXED, UID, "a"), ({**INDEXED, "HOSTNAME": "other-3"}, "", "b"), False, id="another-job"),
        pytest.param(({"HOSTNAME": "h"}, "", "a"), ({"HOSTNAME": "h"}, "", "b"), False, id="no-kubernetes"),
    ],
)
def test_kubernetes_starts_a_job_again(
    first: Any, second: Any, goes_on: bool, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun / "runs" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for number, (environment, uid, container) in enumerate((first, second)):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        mounts = begun / "mountinfo"
        mounts.write_text(
            f"612 599 8:1 /var/lib/kubelet/pods/{uid}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw\n"
        )
        monkeypatch.setattr("pygdist.commands.run_folder._MOUNTS", mounts)
        monkeypatch.setattr("pygdist.commands.run_folder._container", lambda name=container: f"container {name}")
        if number == 0:
            RunFolder(folder)._mark.close()  # killed
    assert folder_to_go_on(begun / "runs", config, None) == (folder if goes_on else None)
    (folder / ".unfinished").unlink()
    assert folder_to_go_on(begun / "runs", config, None) is None, "the run had ended"


def test_the_container_is_the_same_for_all_commands() -> None:
    assert run_folder._container() == run_folder._container()
    assert len(run_folder._container().split()) == 3


def test_jobs_without_a_name_are_told_apart_by_their_agents(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun / "runs" / "version_0"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    RunFolder(folder)
    assert folder_to_go_on(begun / "runs", config, None) == folder
    monkeypatch.setenv("PYGDIST_PARENT", "1")
    assert folder_to_go_on(begun / "runs", config, None) is None


@pytest.mark.slow
def test_torchrun_that_starts_ranks_again_goes_on(folder: Path, trained: tuple[Path, Outcome]) -> None:
    """A rank is lost after its third epoch; those that torchrun starts then have the number of its job."""
    shutil.copytree(trained[0] / "runs", folder / "runs")  # another run's, which had ended
    (folder / "lose.py").write_text(
        "import os, lightning.pytorch as pl\n"
        "class Lose(pl.Callback):\n"
        "    def on_train_epoch_start(self, trainer, module):\n"
        "        if trainer.current_epoch == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "            os._exit(9)\n"
    )
    args = (*FIT, "--trainer.max_epochs=5", "--trainer.callbacks+=lose.Lose")
    first = torchrun(*args, folder=folder, env={"TORCHELASTIC_RESTART_COUNT": "0"})
    assert [rank.code for rank in first] == [9, 9]
    assert (folder / "runs" / "version_1" / ".unfinished").read_text().startswith("torchrun test\n")
    again = torchrun(*args, folder=folder, env={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert [rank.code for rank in again] == [0, 0], again[0].err
    assert "the run goes on from runs/version_1/checkpoints/last.ckpt" in again[0].err
    assert list(_losses(folder, 1)) == [0, 1, 2, 3, 4]
    other = torchrun(*args, folder=folder, env={"TORCHELASTIC_RESTART_COUNT": "0"})
    assert "goes on" not in other[0].err, "the job has ended, and this one has its number by chance"
    assert (folder / "runs" / "version_2").is_dir()


@pytest.mark.slow
def test_a_run_that_was_saved_on_a_signal_goes_on(folder: Path, unbroken: Path) -> None:
    (folder / "signal_me.py").write_text(
        "import os, signal, lightning.pytorch as pl\n"
        "class SignalMe(pl.Callback):\n"
        "    def on_train_epoch_start(self, trainer, module):\n"
        "        if trainer.current_epoch == 2 and not os.path.exists('signalled'):\n"
        "            open('signalled', 'w').close()\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    args = ("--trainer.max_epochs=5", "--trainer.callbacks+=signal_me.SignalMe", "--trainer.strategy=graph_ddp")
    args = (*args, "--trainer.strategy.checkpoint_on_signal=true")
    stopped = pygdist(*FIT, *args, folder=folder)
    assert stopped.code == 143
    assert "weights_only" not in stopped.err
    outcome = _fit(folder, *args, "--resume")
    assert "goes on from runs/version_0/checkpoints/on_signal.ckpt" in outcome.err
    (folder / "runs" / "version_0" / "checkpoints" / "on_signal.ckpt").unlink()
    _assert_as_unbroken(folder, unbroken)


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as workers:
        folders = list(workers.map(lambda _: new_folder(tmp_path / "runs").path.name, range(48)))
    assert sorted(folders, key=lambda name: int(name.split("_")[1])) == [f"version_{number}" for number in range(48)]


def test_a_folder_in_use_is_refused(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygdist.commands.run_folder._WAIT_S", 0.3)
    run = RunFolder(begun / "runs" / "version_0")
    with pytest.raises(InputError, match="version_0: another process is still training there"):
        RunFolder(begun / "runs" / "version_0")
    run.finish()
    RunFolder(begun / "runs" / "version_0").finish()


def test_names_of_checkpoints_mean_the_newest_run_of_the_configuration(begun: Path) -> None:
    _fit(begun, "--trainer.max_epochs=1", "--model.lr=0.5")  # version_1
    other = ("--trainer.devices=1", "--trainer.max_epochs=7", "--data.num_workers=0")
    for command, name, version, options in (
        ("test", "last", 1, ("--model.lr=0.5",)),
        ("validate", "best", 1, ("--model.lr=0.5",)),
        ("test", "last", 0, other),
        ("predict", "best", 0, other),
    ):
        outcome = pygdist(command, "--config=run.yaml", f"--ckpt_path={name}", *options, folder=begun)
        assert outcome.code == 0, outcome.err
        begins = f"--ckpt_path={name}: runs/version_{version}/"
        (said,) = (line for line in outcome.err.splitlines() if line.startswith(begins))
        assert Path(said).name == "last.ckpt" if name == "last" else "epoch=" in Path(said).name
    assert "runs/version_1 is another run's (--model.lr), so it does not count" in outcome.err
    outcome = pygdist("test", "--config=run.yaml", "--ckpt_path=last", "--model.lr=0.25", folder=begun)
    words = ("--ckpt_path=last", "no run of this configuration", "another run's (--model.lr)")
    said = assert_mistake(outcome, *words)
    assert "runs/version_1" in said, "the newest"


def test_the_newest_run_is_the_one_that_was_saved_last(begun: Path) -> None:
    first, second = (begun / "runs" / f"version_{number}" for number in (0, 1))
    shutil.copytree(first, second)
    config = yaml.safe_load((first / "config.yaml").read_text())
    for time, path in enumerate((*second.rglob("*.ckpt"), *first.rglob("*.ckpt"))):
        os.utime(path, (time, time))
    os.utime(first / "checkpoints" / "last.ckpt", (50, 50))
    assert named_checkpoint("last", begun / "runs", config).parent.parent == first
    shutil.copy(second / "checkpoints" / "last.ckpt", second / "checkpoints" / "on_signal.ckpt")  # newer than all
    assert named_checkpoint("last", begun / "runs", config) == second / "checkpoints" / "on_signal.ckpt"
    assert named_checkpoint("best", begun / "runs", config).parent.parent == second


_REQUEUE = """
import os
import signal

import lightning.pytorch as pl


class Requeue(pl.Callback):  # SLURM sends SIGUSR1 before the time is up, as the job asked by --signal
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and "REQUEUE" in os.environ:
            os.kill(os.getpid(), signal.SIGUSR1)
"""
_REQUEUED = (
    *FIT, "--trainer.callbacks+=requeue.Requeue", "--trainer.max_epochs=6", "--trainer.num_sanity_val_steps=0",
)  # fmt: skip
_AGAIN = {"SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def requeue(folder: Path, tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Run the command as job 7, which SLURM asks to save after two epochs, and ends."""
    (folder / "requeue.py").write_text(_REQUEUE)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\nkill -TERM $PPID\n')
    scontrol.chmod(0o755)

    def run(*args: str) -> list[Outcome]:
        outcomes = slurm(
            *_REQUEUED, *args, folder=folder, env={"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "REQUEUE": "1"}
        )
        assert outcomes[0].code == 128 + signal.SIGTERM, outcomes[0].err
        assert (folder / "requeued").read_text() == "requeue 7\n"
        return outcomes

    return run


def _goes_on(folder: Path, *args: str, env: Mapping[str, str] = _AGAIN) -> str:
    """Run the job again, to its end, and return the file from which it says that it goes on."""
    outcomes = slurm(*_REQUEUED, *args, folder=folder, env=env)
    assert [rank.code for rank in outcomes] == [0, 0], outcomes[0].err
    said = re.findall(r"(?:the run goes on from|Restoring states from the checkpoint path at) (\S+)", outcomes[0].err)
    return said[0] if said else ""


def test_a_requeued_job_goes_on_with_its_run(folder: Path, requeue: Callable[..., list[Outcome]]) -> None:
    requeue()
    saved = "runs/version_0/checkpoints/hpc_ckpt_1.ckpt"
    assert [str(one.relative_to(folder)) for one in folder.rglob("hpc_ckpt_*")] == [saved]
    assert not _goes_on(folder, "--resume=false")
    assert set(_losses(folder, 1)) == set(range(6))
    assert not _goes_on(folder, "--model.lr=0.5"), "another run"
    assert _goes_on(folder) == saved
    assert _losses(folder) == _losses(folder, 1)


@pytest.mark.parametrize(
    "args",
    [
        ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=mine"),
        ("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"),
        ("--trainer.logger=false",),
        ("--trainer.enable_checkpointing=false",),
    ],
    ids=["two-callbacks", "another-logger", "no-logger", "no-checkpoints"],
)
def test_a_requeued_job_goes_on_wherever_it_was_saved(
    args: tuple[str, ...], folder: Path, requeue: Callable[..., list[Outcome]]
) -> None:
    requeue(*args)
    (saved,) = folder.rglob("hpc_ckpt_*.ckpt")
    assert not _goes_on(folder, *args, "--resume=false")
    assert not _goes_on(folder, *args, env={}), "another job"
    assert not _goes_on(folder, *args, env={**_AGAIN, "SLURM_JOB_ID": "8"}), "another job"
    assert _goes_on(folder, *args).endswith(saved.name)


def test_hpc_checkpoints_are_those_of_the_configuration(begun: Path) -> None:
    config = yaml.safe_load((begun / "runs/version_0/config.yaml").read_text())
    shutil.copytree(begun / "runs/version_0", begun / "runs/version_1")  # newer, but without such a file
    folder = begun / "runs" / "version_0" / "checkpoints"
    for number in (2, 1):  # the second one is newer
        shutil.copy(folder / "last.ckpt", folder / f"hpc_ckpt_{number}.ckpt")
        os.utime(folder / f"hpc_ckpt_{number}.ckpt", (10 - number, 10 - number))
    assert named_checkpoint("hpc", begun / "runs", config) == folder / "hpc_ckpt_1.ckpt"
    config["model"]["lr"] = 0.5
    with pytest.raises(InputError, match=r"no run of this configuration: .*version_0 is another run's \(--model.lr\)"):
        named_checkpoint("hpc", begun / "runs", config)


def test_other_names_than_lightnings_are_not_last(tmp_path: Path) -> None:
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    names = ("last.ckpt", "last-v9.ckpt", "last-v10.ckpt", "last-layer-frozen.ckpt", "last.1.ckpt", "xlast.ckpt")
    for time, name in enumerate(names):
        (folder / name).touch()
        os.utime(folder / name, (time, time))
    assert named_checkpoint("last", tmp_path, {}).name == "last-v10.ckpt"


@pytest.mark.parametrize("name", ["last", "best", "hpc"])
@pytest.mark.parametrize("command", ["fit", "test", "predict"])
def test_names_of_checkpoints_that_are_not_there(folder: Path, command: str, name: str) -> None:
    assert_mistake(pygdist(command, "--config=run.yaml", f"--ckpt_path={name}", folder=folder), f"--ckpt_path={name}")
    assert not (folder / "runs").exists()


STEPS = ("--checkpoint.every_n_train_steps=1",)
TRIGGERS = {
    "epochs": ((), ("train_loss", "val_loss", "epoch_s")),
    "steps": (STEPS, ("train_loss",)),
    "validations": (("--trainer.check_val_every_n_epoch=2",), ("train_loss",)),
    "another-callback": (
        ("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=1"),
        ("train_loss",),
    ),
}


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_an_epoch_is_in_the_table_before_its_checkpoint_is_there(folder: Path, trigger: str) -> None:
    options, wanted = TRIGGERS[trigger]
    (folder / "look.py").write_text(
        "import csv, lightning.pytorch as pl\n"
        "from pygdist import checkpoints\n"
        "class Look(pl.Callback):\n"
        "    write = staticmethod(checkpoints.write)\n"
        "def look(checkpoint, path):\n"
        "    with open('runs/version_0/metrics.csv') as file:\n"
        "        rows = list(csv.DictReader(file))\n"
        f"    epochs = [{{int(row['epoch']) for row in rows if row.get(name)}} for name in {wanted}]\n"
        "    assert all(max(found) == checkpoint['epoch'] for found in epochs), rows\n"
        "    open('looked', 'a').write('x')\n"
        "    Look.write(checkpoint, path)\n"
        "checkpoints.write = look\n"
    )
    _fit(folder, "--trainer.callbacks+=look.Look", *options)
    assert len((folder / "looked").read_text()) >= 3
    assert list(_losses(folder)) == [0, 1, 2]
    assert os.listdir(folder / "runs") == ["version_0"]


@pytest.mark.parametrize(
    ("options", "moment"),
    [
        pytest.param(STEPS, "on_validation_start", id="between-checkpoint-and-validation"),
        pytest.param(STEPS, "on_train_epoch_end", id="after-validation"),
        pytest.param(STEPS, "on_train_batch_start", id="in-the-next-epoch"),
        pytest.param(TRIGGERS["validations"][0], "on_train_epoch_end", id="between-checkpoint-and-end-of-epoch"),
    ],
)
def test_no_epoch_is_missing_after_a_kill(folder: Path, unbroken: Path, options: tuple[str, ...], moment: str) -> None:
    epoch = 4 if moment == "on_train_batch_start" else 3
    (folder / "die.py").write_text(
        "import os, lightning.pytorch as pl\n"
        "class Die(pl.Callback):\n"
        f"    def {moment}(self, trainer, *_):\n"
        f"        if trainer.current_epoch == {epoch} and not os.path.exists('died'):\n"
        "            open('died', 'w').close()\n"
        "            os._exit(9)\n"
    )
    args = (*options, "--trainer.callbacks+=die.Die", "--trainer.max_epochs=5")
    assert pygdist(*FIT, *args, folder=folder).code == 9
    _fit(folder, *args, "--resume")
    assert _losses(folder) == _losses(unbroken)
    seconds = [int(row["epoch"]) for row in _rows(folder) if row["epoch_s"]]
    assert seconds == [0, 1, 2, 4] if epoch == 3 else [0, 1, 2, 3, 4]
