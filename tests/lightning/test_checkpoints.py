"""A checkpoint resumes bit for bit, on another number of ranks, and without pygdist."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from pygdist import InputError, checkpoints
from pygdist.commands.export import export
from pygdist.lightning import ModelAveragingStrategy, Resume, checkpoint_io, newest_checkpoint
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
@pytest.mark.parametrize("world_size", [2, 3])
def test_resuming_is_going_on(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    whole, parameters = pool.run(_fit, world_size, str(tmp_path / "whole"), 8, None)[0]
    first, _ = pool.run(_fit, world_size, str(tmp_path / "half"), 4, None)[0]
    last = str(tmp_path / "half" / "last.ckpt")
    for losses, state in pool.run(_fit, world_size, str(tmp_path / "again"), 8, last):
        assert first + losses == whole, "bit for bit with the same number of ranks"
        for name, value in parameters.items():
            assert torch.equal(state[name], value), f"{name}: bit for bit with the same number of ranks"
    if world_size != 2:
        return
    for number, backend in ((1, "single"), (1, "comm"), (3, "comm")):
        for losses, state in pool.run(_fit, number, str(tmp_path / f"{backend}-{number}"), 8, last, backend):
            assert len(losses) == 4, "it goes on at the epoch where it stopped"
            for name, value in parameters.items():
                assert torch.allclose(state[name], value, rtol=0, atol=1e-5), (name, number, backend)


@pytest.mark.slow
def test_a_run_goes_on_with_more_ranks_and_with_fewer(pool: RankPool, tmp_path: Path) -> None:
    whole, parameters = pool.run(_fit, 2, str(tmp_path / "whole"), 6, None)[0]
    losses, resume = list[float](), None
    for epochs, world_size in ((2, 2), (4, 3), (6, 1)):
        folder = tmp_path / str(world_size)
        made, state = pool.run(_fit, world_size, str(folder), epochs, resume)[0]
        losses, resume = losses + made, str(folder / "last.ckpt")
    assert losses == pytest.approx(whole, rel=1e-5)
    for name, value in parameters.items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-5), name


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


def _refused(rank: int, world_size: int, folder: str, fault: str, epochs: int, resume: str | None) -> str:
    """What a fit says; ``fault`` is a function of the system that fails where rank 0 writes a file."""
    error = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, fault, side_effect=error) if fault else mock.patch.dict(os.environ):  # noqa: SIM117
        with pytest.raises(InputError) as said:
            _fit(rank, world_size, folder, epochs, resume)
    return str(said.value)


def test_all_ranks_say_what_cannot_be_saved_or_read(pool: RankPool, tmp_path: Path) -> None:
    _, last = pool.run(_fit, 2, str(tmp_path), 1, None), tmp_path / "last.ckpt"
    whole = last.read_bytes()
    for said in pool.run(_refused, 2, str(tmp_path), "replace", 2, None):
        assert "the checkpoint could not be written (No space left on device)" in said
    assert checkpoints.read(last)
    last.write_bytes(whole[:1000] + b"x" + whole[1001:])
    for said in pool.run(_refused, 2, str(tmp_path), "", 2, str(last)):
        assert "last.ckpt: is damaged, its checksum differs" in said
    last.unlink()
    for said in pool.run(_refused, 2, str(tmp_path), "", 2, str(last)):
        assert "last.ckpt: there is no such checkpoint" in said


def _of_each_rank(rank: int, world_size: int, folder: str, lacking: bool) -> str:
    """What a fit says that resumes from a file of the rank's own; that of rank 1 is older, or not there."""
    path = Path(folder) / ("0.ckpt" if rank == 0 else "none.ckpt" if lacking else "1.ckpt")
    read = checkpoints.read_identified
    with mock.patch.object(checkpoints, "read_identified", lambda _, **options: read(path, **options)):
        return _refused(rank, world_size, folder, "", 9, str(Path(folder) / "last.ckpt"))


@pytest.mark.slow
def test_ranks_that_do_not_share_a_file_are_told(pool: RankPool, tmp_path: Path) -> None:
    for epochs in (1, 2):
        pool.run(_fit, 2, str(tmp_path / str(epochs)), epochs, None)
        (tmp_path / str(epochs) / "last.ckpt").rename(tmp_path / f"{2 - epochs}.ckpt")
    for said in pool.run(_of_each_rank, 2, str(tmp_path), False):
        assert "the ranks read different files under this name: either their machines do not share the" in said
    said, _ = pool.run(_of_each_rank, 2, str(tmp_path), True)
    assert "none.ckpt: there is no such checkpoint (found by rank 1 on " in said


def _change(checkpoint: dict[str, Any], place: str, value: Any) -> None:
    *path, last = place.split("/")
    for key in path:
        checkpoint = checkpoint[int(key) if isinstance(checkpoint, list) or key.isdigit() else key]
    key = int(last) if isinstance(checkpoint, list) or last.isdigit() else last
    if value is None:
        del checkpoint[key]
    else:
        checkpoint[key] = value


# the place of a part, what stands there (nothing if None), and what is said
INNER: dict[str, tuple[Any, str]] = {
    "optimizer_states": ([], "optimizer_states of 0 optimisers, but this run has 1"),
    "optimizer_states/0/state/0/exp_avg": (torch.ones(2, 2), "exp_avg of parameter 0 must be a tensor [8]"),
    "optimizer_states/0/state/0/exp_avg_sq": ("text", "exp_avg_sq of parameter 0 must be a tensor"),
    "optimizer_states/0/state/0/step": ("one", "step of parameter 0 must be a number"),
    "optimizer_states/0/state/99": ({}, "'optimizer_states' must be a list of dictionaries"),
    "optimizer_states/0/state/2/exp_avg": (torch.full((4,), float("nan")), "exp_avg of parameter 2 holds NaN"),
    "optimizer_states/0/state/1": ([], "parameter 1 is none of"),
    "optimizer_states/0/param_groups": ([], "'optimizer_states' must be a list of dictionaries"),
    "optimizer_states/0/param_groups/0/params": (["a", "b", "c", "d"], "'optimizer_states' must be a list of"),
    "optimizer_states/0/param_groups/0/lr": (-1.0, "lr of group 0 is -1.0, expected the like of this run's"),
    "optimizer_states/0/param_groups/0/eps": (None, "eps of group 0 is None, expected the like of"),
    "optimizer_states/0/param_groups/0/betas": ((0.9, float("nan")), "betas of group 0 is (0.9, nan), expected"),
    "state_dict/model.convs.0.bias": (torch.ones(8, dtype=torch.cfloat), "is torch.complex64, but in the model torch."),
    "state_dict/model.convs.1.bias": (
        torch.full((4,), float("inf")),
        "'model.convs.1.bias' in state_dict holds NaN or",
    ),
    "state_dict/model.convs.0.lin.weight": (torch.ones(8, 12).bool(), "is torch.bool, but in the model torch.float"),
    "loops/fit_loop/epoch_progress": (None, "'loops.fit_loop.epoch_progress' must be there"),
    "loops/fit_loop/epoch_progress/current/processed": ("two", "'loops.fit_loop.epoch_progress.current.processed'"),
    "loops/fit_loop/epoch_progress/total/ready": (-1, "'loops.fit_loop.epoch_progress.total.ready'"),
    "loops/fit_loop/epoch_loop.state_dict/_batches_that_stepped": (1.5, "_batches_that_stepped"),
    "loops/fit_loop/epoch_loop.batch_progress/is_last_batch": (3, "is_last_batch"),
    "loops/fit_loop/state_dict": (3, "'loops.fit_loop.state_dict' must hold a list of loaders"),
    "loops/fit_loop/state_dict/combined_loader": ([3], "must hold a list of loaders"),
    "pytorch-lightning_version": (None, "its version in it is not what this run needs"),
}


def _say_of_each(rank: int, world_size: int, folder: str) -> dict[str, str]:
    return {
        place: _refused(rank, world_size, folder, "", 4, f"{folder}/{number}.ckpt")
        for number, place in enumerate(INNER)
    }


@pytest.mark.slow
def test_what_is_wrong_inside_a_part_is_named_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_fit, 2, str(tmp_path), 2, None)
    for number, (place, (value, _)) in enumerate(INNER.items()):
        checkpoint = checkpoints.read(tmp_path / "last.ckpt")
        _change(checkpoint, place, value)
        checkpoints.write(checkpoint, tmp_path / f"{number}.ckpt")
    for said in pool.run(_say_of_each, 2, str(tmp_path)):
        for place, (_, words) in INNER.items():
            assert words in said[place], place
            assert "\n" not in said[place]


def test_the_loop_of_an_evaluation_is_compared_too() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    trainer.strategy.connect(pl.LightningModule())
    trainer.state.fn = TrainerFn.TESTING
    saved: dict[str, Any] = {
        "state_dict": {},
        "pytorch-lightning_version": pl.__version__,
        "loops": {"fit_loop": {}, "test_loop": trainer.test_loop.state_dict()},
    }
    checkpoint_io._check(saved, "a.ckpt", trainer)
    saved["loops"]["test_loop"]["batch_progress"]["total"]["started"] = {}
    with pytest.raises(InputError, match=r"damaged or forged: 'loops.test_loop.batch_progress.total.started'"):
        checkpoint_io._check(saved, "a.ckpt", trainer)


def _go_on(rank: int, world_size: int, folder: str, epochs: int, strategy: str = "graph_ddp") -> tuple[Any, ...]:
    """A fit with the callback, in the folder of those before it: losses, parameters, and where it began."""
    history, averaging = runs.History(), strategy == "model_averaging"
    checkpoint = ModelCheckpoint(dirpath=f"{folder}/saved", save_last=True)
    classifier, data = runs.module(folder, backend="replica" if averaging else "comm")
    options = {"strategy": ModelAveragingStrategy(check_order=True)} if averaging else {}
    trainer = runs.trainer(
        rank, world_size, folder, max_epochs=epochs, callbacks=[Resume(f"{folder}/saved"), history, checkpoint],
        enable_checkpointing=True, **options,
    )  # fmt: skip
    trainer.fit(classifier, datamodule=data)
    state = {name: value.clone() for name, value in classifier.model.state_dict().items()}
    return [epoch["train_loss"] for epoch in history.epochs], state, str(trainer.ckpt_path or "")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["graph_ddp", "model_averaging"])
def test_a_callback_goes_on_from_the_newest_whole_checkpoint(strategy: str, pool: RankPool, tmp_path: Path) -> None:
    whole, parameters, _ = pool.run(_go_on, 3, str(tmp_path / "whole"), 4, strategy)[0]
    folder = str(tmp_path.joinpath(*(["a" * 240] * 5), "parts"))  # longer than a line that ranks gather
    first, _, began = pool.run(_go_on, 3, folder, 2, strategy)[0]
    assert not began, "there was nothing to go on from"
    Path(folder, "saved", "torn.ckpt").write_bytes(b"PK" + bytes(100))
    for losses, state, began in pool.run(_go_on, 3, folder, 4, strategy):
        assert Path(began).name in ("last.ckpt", "epoch=1-step=2.ckpt")
        assert first + losses == whole
        for name, value in parameters.items():
            assert torch.equal(state[name], value), name
    assert all(not losses for losses, *_ in pool.run(_go_on, 3, folder, 4, strategy)), "it had ended"


def _which(rank: int, world_size: int, folder: str, blind: int) -> str:
    """What is said if a rank does not see the file of the others."""
    error = InputError("last.ckpt: there is no such checkpoint")
    missing = (
        mock.patch.object(checkpoints, "read_identified", side_effect=error)
        if rank == blind
        else mock.patch.dict(os.environ)
    )
    with missing, pytest.raises(InputError) as said:
        _go_on(rank, world_size, folder, 9)
    return str(said.value)


def test_a_rank_that_does_not_see_the_file_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_go_on, 2, str(tmp_path), 1)
    said, _ = pool.run(_which, 2, str(tmp_path), 1)
    assert "there is no such checkpoint (found by rank 1 on " in said
    for said in pool.run(_which, 2, str(tmp_path), 0):
        assert re.search(r"ckpt: rank 1 would go on from it, but rank 0 has no checkpoint of this run; let", said)


def test_the_newest_checkpoint_of_the_last_version_counts(tmp_path: Path) -> None:
    parts = {"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {"fit_loop": {}}}
    assert newest_checkpoint(tmp_path / "nothing") is None
    for place, steps in {"version_2/a": 9, "version_10/b": 3, "version_10/c": 5, "version_10/d": 4}.items():
        checkpoints.write({**parts, "global_step": steps}, tmp_path / f"{place}.ckpt")
    (tmp_path / "version_11").mkdir()
    (tmp_path / "version_11" / "torn.ckpt").write_bytes(b"")
    checkpoints.write({"state_dict": {}, "global_step": 99}, tmp_path / "version_10" / "weights.ckpt")
    with pytest.warns(UserWarning, match="passed over") as said:
        assert newest_checkpoint(tmp_path) == tmp_path / "version_10" / "c.ckpt"
    warned = "".join(str(one.message) for one in said)
    assert "torn.ckpt: not a Lightning checkpoint, or a damaged one" in warned
    assert "weights.ckpt: lacks 'optimizer_states'" in warned
