"""The table of a run's epochs, ``metrics.csv``: rows are on disk before their checkpoint; resumed runs add to it."""

from __future__ import annotations

import csv
import os
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

    _written = ""  # the row that was written before Lightning logs it

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
        written, self._written = self._written, ""
        if written != _text(metrics, step):
            super().log_metrics(metrics, step)

    def write_now(self, trainer: pl.Trainer, metrics: dict[str, Any]) -> None:
        """Write the row of an epoch that ends, before Lightning does, and wait until all rows are on disk."""
        step = trainer.fit_loop.epoch_loop._batches_that_stepped - 1
        metrics = {**metrics, "epoch": trainer.current_epoch}
        if len(metrics) > 1:
            self.log_metrics(metrics, step)
            self._written = _text(metrics, step)
        self.save()
        self.experiment.flush()

    def go_on(self, epochs: int, steps: int) -> None:
        """Drop the rows after a checkpoint from which the run goes on.

        The checkpoint was made after ``epochs`` whole ones, and ``steps`` of the run if the next epoch had begun.
        """
        self.experiment.keep(lambda epoch, step: epoch < epochs or (epoch == epochs and step < steps))


def _text(metrics: dict[str, Any], step: int | None) -> str:
    return repr((sorted(metrics.items()), step))


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
