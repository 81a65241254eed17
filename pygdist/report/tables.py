"""Tables of the page: main columns; constant columns are listed once, all others with their row."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter

from pygdist.errors import InputError
from pygdist.report.description import Experiment
from pygdist.report.values import Row, number, shown, spoken

KEPT_APART = {"commit", "date", "json", "note", "timeline"}  # never results; they are shown with the settings
#: Columns that describe the machine: no results, even in a table of one row.
MACHINE = {
    "cores", "cpu", "gpu", "host", "l2", "l3", "lightning", "machine", "pyg", "python", "threads", "torch",
    "torch_sparse",
}  # fmt: skip
_WORDS = {"commit", "date"}  # columns of text, even if all cells are digits


@dataclass(frozen=True)
class Column:
    """A column: its name in the file and for people; ``numeric`` if all cells are numbers."""

    name: str
    text: str
    numeric: bool


@dataclass(frozen=True)
class Cell:
    """A cell: the text that is shown, and the full value, by which the page sorts."""

    text: str
    full: str


@dataclass(frozen=True)
class Line:
    """A row: its cells, its other settings, the command that reruns it, and the reason if it did not run."""

    cells: list[Cell]
    settings: list[tuple[str, str]]
    again: str
    note: str


@dataclass(frozen=True)
class Table:
    """A table; ``settings`` are the columns that have the same value in all rows."""

    columns: list[Column]
    lines: list[Line]
    settings: list[tuple[str, str]]

    @property
    def unfolds(self) -> bool:
        """True if some row has more to show than its cells."""
        return any(line.settings or line.again for line in self.lines)


def make_table(
    columns: Sequence[str],
    rows: Sequence[Row],
    experiment: Experiment | None = None,
    *,
    whole: bool = False,
    spreads: Sequence[Row] = (),
) -> Table:
    """Arrange a table for the page: all its columns if ``whole``, else the main ones.

    ``spreads`` holds for each row the standard deviations of some of its cells.
    """
    main = list(columns) if whole else main_columns(columns, rows, experiment)
    if "failed" in columns and "failed" not in main and any(row["failed"] for row in rows):
        main.append("failed")  # a row over some seeds must not look like a row over all
    rest = [name for name in columns if name not in main and name != "note"]
    same = [name for name in rest if len({row[name] for row in rows}) == 1]
    lines = []
    for row, spread in zip(rows, spreads or [{}] * len(rows), strict=True):
        cells = [_cell(row[name], name, spread.get(name, "")) for name in main]
        varying = [(spoken(name), row[name]) for name in rest if name not in same and row[name]]
        again = rerun_command(experiment, row) if experiment else ""
        lines.append(Line(cells, varying, again, row.get("note", "")))
    settings = [(spoken(name), rows[0][name]) for name in same if rows[0][name]]
    return Table([_column(name, rows) for name in main], lines, settings)


def main_columns(columns: Sequence[str], rows: Sequence[Row], experiment: Experiment | None = None) -> list[str]:
    """Return the columns of the main table: those that the description names, or all that vary."""
    if experiment and experiment.table:
        return list(experiment.table)
    candidates = [name for name in columns if name not in KEPT_APART]
    if len(rows) < 2:
        return [name for name in candidates if name not in MACHINE and any(row[name] for row in rows)] or candidates
    return [name for name in candidates if len({row[name] for row in rows}) > 1] or candidates


def rerun_command(experiment: Experiment, row: Row) -> str:
    """Return the command that reruns a row, made from :attr:`Experiment.again`; empty if that is empty.

    Raises:
        InputError: If it names a column that does not exist, or is no format string.
    """
    try:
        pieces = list(Formatter().parse(experiment.again))
    except ValueError as error:
        raise InputError(f"{experiment.path}: again: {error}") from error
    words = quote = ""
    for literal, name, _, conversion in pieces:
        words, quote = words + literal, _open_quote(quote, literal)
        if name is None:
            continue
        if name not in row:
            raise InputError(f"{experiment.path}: again: there is no column '{name}'; the columns are {', '.join(row)}")
        plain = conversion == "s" or quote or experiment.again == f"{{{name}}}"
        words += row[name] if plain else shlex.quote(_whole(row[name]))
    return words


def _open_quote(quote: str, text: str) -> str:
    """Return the quotation mark that is open after ``text``, if ``quote`` is before it."""
    for mark in re.findall("['\"]", text):
        quote = mark if not quote else "" if mark == quote else quote
    return quote


def _whole(text: str) -> str:
    """Format whole numbers without a decimal point, as command lines take them."""
    value = number(text)
    return text if value is None or not value.is_integer() else str(int(value))


def _column(name: str, rows: Sequence[Row]) -> Column:
    cells = [row[name] for row in rows if row[name]]
    numeric = name not in _WORDS and bool(cells) and all(number(cell) is not None for cell in cells)
    return Column(name, spoken(name), numeric)


def _cell(text: str, name: str, spread: str = "") -> Cell:
    words = text if name in _WORDS else shown(text)
    return Cell(f"{words} ± {float(spread):.2g}" if spread else words, text)
