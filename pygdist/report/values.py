"""Cells of tables: read from CSV as text, recognised as numbers, and formatted for people."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from pygdist.errors import InputError

Row = dict[str, str]
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_WHOLE = re.compile(r"[+-]?\d{1,15}")
_UNITS = {
    "gbit_s": "Gbit/s", "gbs": "GB/s", "s": "s", "ms": "ms", "mb": "MB", "gb": "GB", "mib": "MiB", "gib": "GiB",
}  # fmt: skip
_MOST_CHARACTERS = 1 << 24  # of a cell: some hold the figures of partitions as JSON


def read_csv(path: Path) -> tuple[list[str], list[Row]]:
    """Return the columns and rows of a CSV file; cells are text.

    Raises:
        InputError: If it cannot be read, has no columns, two columns of the same name, or a row of another length.
    """
    csv.field_size_limit(_MOST_CHARACTERS)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *lines = [line for line in csv.reader(file) if line] or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV: {error}") from error
    if not header:
        raise InputError(f"{path}: is empty; its first line must name the columns")
    if len(set(header)) < len(header):
        repeated = next(name for name in header if header.count(name) > 1)
        raise InputError(f"{path}: two columns are called '{repeated}'; rename one")
    for position, line in enumerate(lines, start=1):
        if len(line) != len(header):
            place = f"data row {position} (without the header and empty lines)"
            raise InputError(f"{path}: {place} has {len(line)} cells, expected {len(header)}")
    return header, [dict(zip(header, (cell.strip() for cell in line), strict=True)) for line in lines]


def number(text: str) -> float | None:
    """Return the number in a cell; ``None`` if it holds words, nothing, or a number that is not finite."""
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def measured(row: Row, column: str, path: Path) -> float | None:
    """Return the number in a cell; ``None`` if the cell is missing, empty, or not finite.

    Raises:
        InputError: If the cell holds a word; names the file and the column.
    """
    text = row.get(column, "")
    if not _NUMBER.fullmatch(text) and text.lower().lstrip("+-") not in ("", "nan", "inf", "infinity"):
        remedy = "write a number or nan, or leave the cell empty"
        raise InputError(f"{path}: column '{column}' holds {text!r}, which is no number; {remedy}")
    return number(text)


def is_same(text: str, other: str) -> bool:
    """Tell if two cells hold the same text or the same number."""
    return text == other or (number(text) is not None and number(text) == number(other))


def shown(text: str, *, group: bool = True) -> str:
    """Format a cell for people: numbers with four significant digits, whole numbers in full.

    ``group`` separates thousands.

    Example:
        >>> shown("33177248.75"), shown("0.0301411"), shown("50000"), shown("Cora")
        ('33,180,000', '0.03014', '50,000', 'Cora')
    """
    value = number(text)
    if value is None:
        return text
    if _WHOLE.fullmatch(text):
        return f"{int(text):,}" if group else str(int(text))
    rounded = float(f"{value:.4g}")
    if 1000 <= abs(rounded) < 1e15:
        return f"{rounded:,.0f}" if group else f"{rounded:.0f}"
    return f"{value:.4g}"


def spoken(column: str) -> str:
    """Format the name of a column for people: words, and the unit behind a comma.

    Example:
        >>> spoken("peak_gib"), spoken("edge_cut")
        ('peak, GiB', 'edge cut')
    """
    for ending, unit in _UNITS.items():
        if column == ending:
            return unit
        if column.endswith(f"_{ending}"):
            return f"{column.removesuffix(f'_{ending}').replace('_', ' ')}, {unit}"
    return column.replace("_", " ").strip() or column


def together(row: Row, columns: Sequence[str], *, named: Collection[str] = ()) -> str:
    """Join the cells of several columns, but empty ones; put the column's name before cells of ``named`` columns."""
    parts = ((column, shown(row.get(column, ""), group=False)) for column in columns)
    return ", ".join(f"{spoken(column)} {text}" if column in named else text for column, text in parts if text)
