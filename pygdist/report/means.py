"""Means and standard deviations over repeated runs."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from pygdist.errors import InputError
from pygdist.report.description import Mean
from pygdist.report.values import Row, number

RUNS = "runs"  # column with the number of runs that a row is the mean of


def averaged(mean: Mean, table: Path, rows: Sequence[Row], apart: Collection[str]) -> tuple[list[Row], list[Row]]:
    """Average the runs of each measurement. A run without any measured value does not count.

    Besides ``mean.over``, the columns ``apart`` may differ between the runs of one measurement.

    Returns:
        A row for each measurement: means of the measured columns, the number of runs (:data:`RUNS`), and the values of
        the other columns, empty if they differ between runs. And for each such row, the standard deviations of the
        measured columns, empty for a single run.

    Raises:
        InputError: If a measured cell is no number; names the table.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(cell for name, cell in row.items() if name not in {*mean.over, *mean.of, *apart})
        groups.setdefault(key, []).append(row)
    measurements = [_average(mean, table, runs) for runs in groups.values()]
    return [row for row, _ in measurements], [spread for _, spread in measurements]


def _average(mean: Mean, table: Path, runs: Sequence[Row]) -> tuple[Row, Row]:
    measured = [run for run in runs if any(run[name] for name in mean.of)]
    row = {name: cell if all(run[name] == cell for run in runs) else "" for name, cell in runs[0].items()}
    spread = {}
    for name in mean.of:
        values = [_number(table, name, run[name]) for run in measured if run[name]]
        row[name] = repr(statistics.fmean(values)) if values else ""
        spread[name] = repr(statistics.stdev(values)) if len(values) > 1 else ""
    return {**row, RUNS: str(len(measured))}, spread


def _number(table: Path, column: str, cell: str) -> float:
    value = number(cell)
    if value is None:
        raise InputError(f"{table}: column '{column}' is averaged, but holds {cell!r}, which is no number")
    return value
