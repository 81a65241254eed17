"""The table of a run's epochs, ``metrics.csv``: rows are on disk before their checkpoint; resumed runs add to it."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override


class EpochLogger(CSVLogger):
    """Lightning's CSV logger, which keeps the rows that a folder has already.

    Lightning's own removes them, writes the row of an epoch after its checkpoint, and leaves it to the system when rows
    reach the disk.
    """

    _written: Mapping[str, int] = {}  # the step of each number that was written before Lightning logs it

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file."""
        if self._experiment is None:
            os.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment

    @override
    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        new = {name: value for name, value in metrics.items() if self._written.get(name, -1) != step}
        if new.keys() - {"epoch"}:
            super().log_metrics(new, step)

    def write_now(self, metrics: dict[str, Any], epoch: int, step: int) -> None:
        """Write numbers of an epoch before Lightning does, and wait until all rows are on disk."""
        if metrics:
            self.log_metrics({**metrics, "epoch": epoch}, step)
            self._written = dict.fromkeys(metrics, step)
        self.save()
        self.experiment.flush()

    def go_on(self, epochs: int, steps: int) -> None:
        """Drop the rows after a checkpoint from which the run goes on.

        The checkpoint was made after ``epochs`` trained ones, and ``steps`` of the run if the next epoch had begun.
        """
        self.experiment.keep(lambda epoch, step: epoch < epochs or (epoch == epochs and step < steps))


def write_epoch(trainer: pl.Trainer) -> None:
    """Write the numbers of an epoch in which all batches are trained, if its row is not in the table yet.

    A checkpoint that is made now takes the epoch for done, whether its validation has run or not. All ranks make the
    call, as they compute the numbers together.
    """
    loop, loggers = trainer.fit_loop, [one for one in trainer.loggers if isinstance(one, EpochLogger)]
    if not loggers:
        return
    batches: Any = loop.epoch_loop.batch_progress  # Lightning's types lack some of its attributes
    epochs: Any = loop.epoch_progress
    metrics = dict[str, Any]()
    if batches.is_last_batch and batches.current.processed == batches.current.ready:
        metrics = {name: float(value) for name, value in loop.epoch_loop._results.metrics(on_step=False)["log"].items()}
    # Lightning counts the last step after the validation, and logs the epoch under the number of that step
    step = loop.epoch_loop._batches_that_stepped - (epochs.current.processed > epochs.current.completed)
    for logger in loggers:
        logger.write_now(metrics, trainer.current_epoch, step)


def done_in(fit_loop: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epochs that are not trained again after a checkpoint, given its ``loops.fit_loop``.

    The second number is the steps of the run if the next epoch had begun; see :meth:`EpochLogger.go_on`.
    """
    epochs, batches = (fit_loop[name]["current"] for name in ("epoch_progress", "epoch_loop.batch_progress"))
    if epochs["started"] <= epochs["processed"]:
        return epochs["processed"], 0
    is_trained = batches["processed"] == batches["ready"]  # the last batch that had begun
    if is_trained and fit_loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return epochs["processed"] + 1, 0
    # Lightning has not counted the last step yet
    return epochs["processed"], fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] + is_trained


class _Writer(ExperimentWriter):
    @override
    def _check_log_dir_exists(self) -> None:
        """Take over the columns of a file that is there."""
        path = Path(self.metrics_file_path)
        if path.is_file():
            with path.open(newline="") as file:
                self.metrics_keys = list(csv.DictReader(file).fieldnames or [])

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._replace(self._rows(), fieldnames)

    def keep(self, wanted: Any) -> None:
        """Keep the rows for which a function of epoch and step says so, and none that is cut off."""
        if Path(self.metrics_file_path).is_file():
            self._replace([row for row in self._rows() if wanted(*_place(row))], self.metrics_keys)

    def flush(self) -> None:
        """Wait until the file is on disk."""
        if Path(self.metrics_file_path).is_file():
            with Path(self.metrics_file_path).open("rb") as file:
                os.fsync(file.fileno())

    def _rows(self) -> list[dict[str, str]]:
        with Path(self.metrics_file_path).open(newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values() and None not in row]

    def _replace(self, rows: list[dict[str, str]], fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with temporary.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=fieldnames)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _place(row: dict[str, str]) -> tuple[float, float]:
    """Return epoch and step of a row; one without belongs to all."""
    return float(row.get("epoch") or -1), float(row.get("step") or -1)
