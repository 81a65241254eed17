"""Runs that go on: the newest whole checkpoint of a run, and a callback with which all ranks take up the same one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pygdist import checkpoints
from pygdist.checkpoints import TRAINING_PARTS
from pygdist.errors import InputError
from pygdist.lightning.strategies import GraphDDPStrategy
from pygdist.lightning.table import EpochLogger, done_in
from pygdist.lightning.to_rank_zero import from_rank_zero

_VERSION = re.compile(r"version_(\d+)")
Counts = Callable[[Mapping[str, Any]], bool]
"""Tells from the content of a checkpoint if it counts."""


def newest_checkpoint(folder: str | Path, counts: Counts | None = None) -> Path | None:
    """Return the checkpoint in a folder, or below it, from which training goes on; ``None`` if there is none.

    The checkpoint is the file with the most steps in the last of the folders ``version_0``, ``version_1``, ... that has
    a checkpoint. A file that is damaged, or from which training cannot go on, is passed over with a warning.

    Args:
        folder: The folder.
        counts: Tells from the content of a checkpoint if it is the run's, where several runs share a folder.

    Example:
        >>> trainer.fit(module, datamodule=data, ckpt_path=newest_checkpoint("lightning_logs"))
    """
    for path in _newest_first(Path(folder), counts):
        try:
            checkpoints.read(path, needs=TRAINING_PARTS, **_lazily(path))
        except (InputError, OSError) as error:
            rank_zero_warn(f"{error} (passed over: training does not go on from it)")
        else:
            return path
    return None


def _newest_first(folder: Path, counts: Counts | None) -> Iterator[Path]:
    by_version: dict[int, list[Path]] = {}
    for path in folder.rglob("*.ckpt"):
        if not path.name.startswith("."):
            versions = [match for part in path.parts if (match := _VERSION.fullmatch(part))]
            by_version.setdefault(int(versions[-1][1]) if versions else -1, []).append(path)
    for _, paths in sorted(by_version.items(), reverse=True):
        steps = [(_steps(path, counts), path) for path in paths]
        counted = [(reached, path) for reached, path in steps if reached is not None]
        yield from (path for _, path in sorted(counted, key=lambda one: one[0], reverse=True))


def _steps(path: Path, counts: Counts | None) -> tuple[float, float] | None:
    """Return a file's number of steps and its time; ``None`` if it does not count. Unreadable files are the newest."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, **_lazily(path))
        steps = float(content["global_step"]), path.stat().st_mtime
    except Exception:  # torch.load raises nearly any for a damaged file, which read() then names
        return float("inf"), 0.0
    return steps if counts is None or counts(content) else None


def _lazily(path: Path) -> dict[str, Any]:
    """Return options of ``torch.load`` with which tensors stay in the file; one by old versions of torch cannot."""
    try:
        with path.open("rb") as file:
            return {"mmap": file.read(2) == b"PK"}
    except OSError:
        return {}


class Resume(pl.Callback):
    """Resumes a run from its newest intact checkpoint; without a checkpoint the run begins.

    Rank 0 looks for the checkpoint, and all ranks read this file, so the machines must share the folder. If the saved
    run had finished, the log says so and nothing is trained. A ``ckpt_path`` of ``trainer.fit`` counts only if the
    folder has no checkpoint.

    Args:
        folder: Folder of the run's checkpoints, or of the run's versions (``lightning_logs``); ``None`` never resumes.
        counts: As for :func:`newest_checkpoint`.

    Raises:
        InputError: When training starts, on all ranks: if a rank cannot read the file, reads a file with other content,
            or finds a checkpoint where rank 0 finds none; or if the saved run has trained more epochs than
            ``max_epochs``.

    Example:
        >>> trainer = pl.Trainer(strategy="graph_ddp", devices=4, callbacks=[Resume("lightning_logs")])
        >>> trainer.fit(module, datamodule=data)
    """

    def __init__(self, folder: str | Path | None, counts: Counts | None = None) -> None:
        self.folder, self._counts = folder, counts

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        path = self._agreed(trainer)
        if not path:
            return
        rank_zero_info(f"the run goes on from {path}")
        connector = trainer._checkpoint_connector
        connector._restore_modules_and_callbacks(path)  # as Lightning does here for strategies that restore late
        whole, steps = done_in(connector._loaded_checkpoint["loops"]["fit_loop"])
        if trainer.max_epochs not in (None, -1) and whole > trainer.max_epochs:
            raise InputError(
                f"{path}: the run has trained {whole} epochs, more than max_epochs={trainer.max_epochs}; raise "
                "--trainer.max_epochs, or begin a new run with --resume=false"
            )
        if trainer.max_epochs not in (None, -1) and whole == trainer.max_epochs:
            rank_zero_info(f"the run had ended by itself after {whole} epochs (max_epochs={trainer.max_epochs})")
        stopping = [one for one in trainer.callbacks if isinstance(one, EarlyStopping)]  # type: ignore[attr-defined]
        if any(one.stopped_epoch and one.stopped_epoch + 1 == whole for one in stopping):
            rank_zero_info(f"the run had ended by itself after {whole} epochs (EarlyStopping)")
            trainer.should_stop = True
        for logger in trainer.loggers if trainer.is_global_zero else ():
            if isinstance(logger, EpochLogger):
                logger.go_on(whole, steps)

    def _agreed(self, trainer: pl.Trainer) -> str:
        path = None if self.folder is None else newest_checkpoint(self.folder, self._counts)
        found, strategy = "" if path is None else str(path), trainer.strategy
        agreed = from_rank_zero(found, strategy)
        missed = (
            f"{found}: rank {trainer.global_rank} would go on from it, but rank 0 has no checkpoint of this run; let "
            "the machines share the folder, give torchrun an --rdzv-id, or begin a run of its own with --resume=false"
        )
        if isinstance(strategy, GraphDDPStrategy):  # the ranks of others share nothing, and are refused
            strategy.communicator.agree(missed if found and not agreed else None)
        return agreed
