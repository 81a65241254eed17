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

_RANKS = ".ranks.csv"
_OTHER_FILES = ".files"  # ending of folders for other files of a script


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An experiment with its results."""

    experiment: Experiment
    table: Path  # it may not exist
    columns: list[str]
    rows: list[Row] | None  # None: there is no table, because the experiment did not run
    ranks: list[Row]  # load per rank: a row for each setting, epoch and rank
    traces: list[Path]  # timelines, sorted


@dataclass(frozen=True, kw_only=True)
class Results:
    """The content of a folder of results."""

    folder: Path
    experiments: list[Outcome]  # those with a description, sorted by path
    others: list[tuple[Path, list[str], list[Row]]]  # tables without one: path, columns, rows


def find_results(folder: Path) -> Results:
    """Read all descriptions and tables below a folder, except in ``.*`` and in folders ``*.files``.

    Raises:
        InputError: If there are none, or one cannot be read; names the file.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    tables = list(_below(folder, "*.csv"))
    descriptions = _below(folder, "*.yaml")  # other YAML files are settings of runs
    experiments = [_outcome(path) for path in descriptions if _table_of(path).is_file() or is_description(path)]
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
    experiment, table = read_description(path), _table_of(path)
    columns, rows = read_csv(table) if table.is_file() else ([], None)
    if rows is not None:
        _check_columns(experiment, table, columns)
    loads = table.with_suffix(_RANKS)
    ranks = read_csv(loads)[1] if loads.is_file() else []
    traces = sorted(table.with_suffix(".traces").glob("*.json"))
    return Outcome(experiment=experiment, table=table, columns=columns, rows=rows, ranks=ranks, traces=traces)


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
