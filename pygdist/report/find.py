"""What lies in a folder of results: descriptions, their tables, loads and traces, and tables that nobody described.

A table lies beside its description, or in a folder ``results`` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pygdist.errors import InputError
from pygdist.report.description import Experiment, is_description, read_description
from pygdist.report.values import Row, read_csv

__all__ = ["Found", "Results", "find_results"]

_RANKS = ".ranks.csv"
_LEFT = ".files"  # what else a script left beside its table


@dataclass(frozen=True, kw_only=True)
class Found:
    """An experiment and what its runs left.

    Attributes:
        experiment: Its description.
        table: Where its table is, or would be.
        columns: The table's columns.
        rows: The table's rows; ``None`` if there is no table, because it did not run.
        ranks: A row for each setting, epoch and rank.
        traces: Timelines, in order of their names.
    """

    experiment: Experiment
    table: Path
    columns: list[str]
    rows: list[Row] | None
    ranks: list[Row]
    traces: list[Path]


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that was found.

    Attributes:
        folder: Where.
        experiments: With a description, in order of their paths.
        others: Tables without one: path, columns, rows.
    """

    folder: Path
    experiments: list[Found]
    others: list[tuple[Path, list[str], list[Row]]]


def find_results(folder: Path) -> Results:
    """Read every description and every table below a folder; ``.*`` and folders ``*.files`` are left out.

    Raises:
        InputError: If there is nothing, or something cannot be read; names the file.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    tables = list(_below(folder, "*.csv"))
    experiments = [
        _found(path)
        for path in _below(folder, "*.yaml")
        # others are settings of runs
        if _table_of(path).is_file() or is_description(path)
    ]
    taken = {found.table for found in experiments} | {_ranks_of(found.table) for found in experiments}
    others = [(path, *read_csv(path)) for path in tables if path not in taken]
    if not experiments and not others:
        raise InputError(f"{folder}: there are neither descriptions (NAME.yaml) nor tables (NAME.csv)")
    return Results(folder=folder, experiments=experiments, others=others)


def _below(folder: Path, pattern: str) -> Iterator[Path]:
    for path in sorted(folder.rglob(pattern)):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part.endswith(_LEFT) for part in parts):
            yield path


def _table_of(path: Path) -> Path:
    """The table of a description: beside it, or in the folder ``results`` there."""
    table = path.with_suffix(".csv")
    apart = path.parent / "results" / table.name
    return apart if apart.is_file() and not table.is_file() else table


def _ranks_of(table: Path) -> Path:
    return table.with_suffix(_RANKS)


def _found(path: Path) -> Found:
    experiment = read_description(path)
    table = _table_of(path)
    ranks, traces = _ranks_of(table), table.with_suffix(".traces")
    columns, rows = read_csv(table) if table.is_file() else ([], None)
    if rows is not None:
        _check(experiment, table, columns)
    return Found(
        experiment=experiment,
        table=table,
        columns=columns,
        rows=rows,
        ranks=read_csv(ranks)[1] if ranks.is_file() else [],
        traces=sorted(traces.glob("*.json")) if traces.is_dir() else [],
    )


def _check(experiment: Experiment, table: Path, columns: list[str]) -> None:
    """Everything that the description names is in the table."""
    wanted = {
        "table": experiment.table,
        "mean": (*experiment.mean.over, *experiment.mean.of) if experiment.mean else (),
    }
    wanted |= {f"plots[{number}]": plot.columns for number, plot in enumerate(experiment.plots)}
    for key, names in wanted.items():
        for name in names:
            if name not in columns:
                raise InputError(
                    f"{experiment.path}: {key}: there is no column '{name}' in {table.name}; "
                    f"its columns are {', '.join(columns)}"
                )
