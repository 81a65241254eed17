"""Runs that are one measurement: a row of means for them, and one of their standard deviations."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from pygdist.errors import InputError
from pygdist.report.description import Mean
from pygdist.report.values import Row, number

__all__ = ["RUNS", "averaged"]

#: The column that says of how many runs a row is the mean.
RUNS = "runs"


def averaged(mean: Mean, table: Path, rows: Sequence[Row], apart: Collection[str]) -> tuple[list[Row], list[Row]]:
    """Take the mean over runs.

    Args:
        mean: What is one measurement, and what was measured.
        table: Where the rows are from, for complaints.
        rows: A row for each run. Those without a number in any measured column count for nothing.
        apart: Columns that may differ between runs of one measurement without making them two.

    Returns:
        One row for each measurement: the mean of what was measured, what is the same in all of its runs, nothing where
        they differ, and how many they are (:data:`RUNS`); and beside each the standard deviations, empty for one run.

    Raises:
        InputError: If a cell that is to be averaged is no number.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = tuple(cell for name, cell in row.items() if name not in {*mean.over, *mean.of, *apart})
        groups.setdefault(key, []).append(row)
    found = [_of_runs(mean, table, runs) for runs in groups.values()]
    return [row for row, _ in found], [spread for _, spread in found]


def _of_runs(mean: Mean, table: Path, runs: Sequence[Row]) -> tuple[Row, Row]:
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
        raise InputError(f"{table}: column '{column}' is to be averaged, and has {cell!r}, which is no number")
    return value
