"""The files in a folder of results: descriptions with their tables, loads and traces, and tables without description.

A table is beside its description, or in a folder ``results`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pygdist.errors import InputError
from pygdist.report.description import Experiment, is_description, read_description
from pygdist.report.values import Row, read_csv

__all__ = ["Outcome", "Results", "find_results"]

_RANKS = ".ranks.csv"
_OTHER_FILES = ".files"  # ending of folders for other files of a script


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An experiment with its results.

    Attributes:
        experiment: The description.
        table: Path of the table, which may not exist.
        columns: Columns of the table.
        rows: Rows of the table; ``None`` if there is no table because the experiment did not run.
        ranks: Load per rank: a row for each setting, epoch and rank.
        traces: Paths of the timelines, sorted.
    """

    experiment: Experiment
    table: Path
    columns: list[str]
    rows: list[Row] | None
    ranks: list[Row]
    traces: list[Path]


@dataclass(frozen=True, kw_only=True)
class Results:
    """The content of a folder of results.

    Attributes:
        folder: The folder.
        experiments: Experiments with a description, sorted by path.
        others: Tables without a description: path, columns, rows.
    """

    folder: Path
    experiments: list[Outcome]
    others: list[tuple[Path, list[str], list[Row]]]


def find_results(folder: Path) -> Results:
    """Read all descriptions and tables below a folder, except in ``.*`` and in folders ``*.files``.

    Raises:
        InputError: If there are none, or one cannot be read; names the file.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    tables = list(_below(folder, "*.csv"))
    experiments = [
        _outcome(path)
        for path in _below(folder, "*.yaml")
        # other YAML files are settings of runs
        if _table_of(path).is_file() or is_description(path)
    ]
    described = {path for one in experiments for path in (one.table, one.table.with_suffix(_RANKS))}
    others = [(path, *read_csv(path)) for path in tables if path not in described]
    if not experiments and not others:
        raise InputError(f"{folder}: there are neither descriptions (NAME.yaml) nor tables (NAME.csv) in it")
    return Results(folder=folder, experiments=experiments, others=others)


def _below(folder: Path, pattern: str) -> Iterator[Path]:
    for path in sorted(folder.rglob(pattern)):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part.endswith(_OTHER_FILES) for part in parts):
            yield path


def _table_of(path: Path) -> Path:
    """Return the path of a description's table: beside it, or in the folder ``results`` beside it."""
    table = path.with_suffix(".csv")
    in_results = path.parent / "results" / table.name
    return in_results if in_results.is_file() and not table.is_file() else table


def _outcome(path: Path) -> Outcome:
    experiment = read_description(path)
    table = _table_of(path)
    ranks, traces = table.with_suffix(_RANKS), table.with_suffix(".traces")
    columns, rows = read_csv(table) if table.is_file() else ([], None)
    if rows is not None:
        _check_columns(experiment, table, columns)
    return Outcome(
        experiment=experiment,
        table=table,
        columns=columns,
        rows=rows,
        ranks=read_csv(ranks)[1] if ranks.is_file() else [],
        traces=sorted(traces.glob("*.json")) if traces.is_dir() else [],
    )


def _check_columns(experiment: Experiment, table: Path, columns: list[str]) -> None:
    """Refuse a description that names columns that are not in the table."""
    named = {"table": experiment.table, "mean": (*experiment.mean.over, *experiment.mean.of) if experiment.mean else ()}
    named |= {f"plots[{number}]": plot.columns for number, plot in enumerate(experiment.plots)}
    for key, names in named.items():
        for name in names:
            if name not in columns:
                raise InputError(
                    f"{experiment.path}: {key}: there is no column '{name}' in {table.name}; "
                    f"its columns are {', '.join(columns)}"
                )
