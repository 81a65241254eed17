"""Writes the tables of the experiments' READMEs from the CSVs beside them, and finds numbers that no CSV holds.

    python -m experiments.readmes            # write the tables of all READMEs again
    python -m experiments.readmes --check    # only tell what differs

A comment above a table says how it is made; a comment ``<!-- end -->`` follows it::

    <!-- figures: results/epochs.csv
    rows:
      cd-0: setting == "4 hosts, cd-0"
      cd-5: setting == "4 hosts, cd-5"
    columns:
      seconds per epoch: "{epoch_s:.2f} ({epoch_s_min:.2f} to {epoch_s_max:.2f})"
      MB sent: "{sent_bytes / 1e6:.0f}"
    bold: {lowest: [seconds per epoch]}
    also:
      - "{of('epoch_s', setting='4 hosts, cd-0') / of('epoch_s', setting='4 hosts, cd-5'):.1f}"
    -->

``rows`` chooses rows of the CSV by queries of pandas; with ``rows: [graph, parts]`` each combination of the columns'
values gives one. Cells are f-strings of columns: a column that has one value in the chosen rows is that value, others
are series, which ``mean``, ``median``, ``low``, ``high``, ``total`` and ``std`` make one; ``n`` counts the rows. A
column may choose further, as in ``{where: "parts == 2", cell: "{mean(test_acc):.1f}"}``; where no row is left its cell
is empty. ``here(column, name=value, ...)`` reads from the chosen rows with such values, ``of(column, ...)`` from the
whole CSV, and ``other("results/NAME.csv")(column, ...)`` from another one; ``count(query)`` counts rows of the CSV, and
``ratios(column, query, other query, [columns])`` divides rows that have the same values in the columns.

``bold`` marks the lowest or highest cell of a row or, with ``down: true``, of a column, if the others are 3 % away.
``also`` lists numbers that the text says beside the table, as f-strings, or as they are where they are settings that no
CSV has; a block without ``rows`` makes no table.

Each number in the text with a per cent sign or a unit (``s``, ``times``, ``points``, ``MB``, ...) must be in a table or
in ``also`` of its section, or of any, in a section that has no block. One with a point and no unit may also be a
setting: a part of a text in the CSVs. Code is not looked at, nor are brackets that begin with *the paper*, sentences
that begin with *In the paper* or *The paper*, or name the virtual machine, and numbers of sections, figures, versions.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from pandas.api.types import is_numeric_dtype

HERE = Path(__file__).parent
_BEGIN = re.compile(r"^<!-- figures:", re.MULTILINE)
_BLOCK = re.compile(r"^<!-- figures: (\S+)\n(.*?)^-->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_CLEAR = 0.03  # cells are as good as the best one within this share of it
_FIRST = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")


class FigureError(Exception):
    """A block, or a number, of a README is not as its CSVs say; the message names the README and the place."""


# -- tables ------------------------------------------------------------------------------------------------------------


def written(text: str, folder: Path) -> str:
    """Return a README with the tables of all its blocks made again from the CSVs in ``folder``."""

    def block(found: re.Match[str]) -> str:
        try:
            table = "\n".join(_lines(*_read(found, folder))) + "\n"
        except FigureError:
            raise
        except Exception as error:  # of a query, or of a key that is missing
            raise FigureError(f"{found[1]}: {type(error).__name__}: {error}") from error
        return f"<!-- figures: {found[1]}\n{found[2]}-->\n{table}<!-- end -->"

    if len(_BEGIN.findall(text)) != len(_BLOCK.findall(text)):
        raise FigureError("a comment <!-- figures: ... --> is not closed, or no <!-- end --> follows it")
    return _BLOCK.sub(block, text)


def _read(found: re.Match[str], folder: Path) -> tuple[Mapping[str, Any], pd.DataFrame, Path]:
    try:
        return yaml.safe_load(found[2]), read_table(folder / found[1]), folder
    except (OSError, yaml.YAMLError) as error:
        raise FigureError(f"{found[1]}: {error}") from error


def read_table(path: Path) -> pd.DataFrame:
    """Read a CSV; lists of seeds and commits stay texts."""
    return _read_once(path, path.stat().st_mtime_ns)


@functools.cache
def _read_once(path: Path, _changed: int) -> pd.DataFrame:
    return pd.read_csv(path, dtype={"seeds": str, "commit": str})


def _lines(block: Mapping[str, Any], table: pd.DataFrame, folder: Path) -> list[str]:
    """Return the lines of a block's table, as Markdown with empty lines around it; none without ``rows``."""
    if "rows" not in block:
        return []
    labels, grid = _cells(block, table, folder)
    head = block.get("head", [""] * len(labels[0]))
    lines = [[*map(str, head), *block["columns"]], ["---"] * (len(head) + len(block["columns"]))]
    lines += [[*label, *cells] for label, cells in zip(labels, grid, strict=True)]
    return ["", *(re.sub(r"(?<=\|) +(?=\|)", " ", f"| {' | '.join(line)} |") for line in lines), ""]


def _cells(block: Mapping[str, Any], table: pd.DataFrame, folder: Path) -> tuple[list[Sequence[str]], list[list[str]]]:
    """Return the labels and the cells of each row of a block's table."""
    if "rows" not in block:
        return [], []
    labels, chosen = zip(*_rows(block, table), strict=True)
    columns = block["columns"]
    grid = [[_cell(rows, one, table, folder) for one in columns.values()] for rows in chosen]
    for kind, names in block.get("bold", {}).items():
        if kind != "down":
            places = [list(columns).index(name) for name in names]
            _embolden(grid, places, lowest=kind == "lowest", down=block["bold"].get("down", False))
    return list(labels), grid


def _rows(block: Mapping[str, Any], table: pd.DataFrame) -> Iterator[tuple[Sequence[str], pd.DataFrame]]:
    """Yield the label, in one or more cells, and the CSV's rows of each row."""
    if "where" in block:
        table = table.query(block["where"])
    if isinstance(block["rows"], list):
        for values, rows in table.groupby(block["rows"], sort=False, dropna=False):
            yield [str(value) for value in values], rows
        return
    for label, query in block["rows"].items():
        if (rows := table.query(query)).empty:
            raise FigureError(f"{query}: no row of the CSV")
        yield [str(label)], rows


def _cell(rows: pd.DataFrame, column: Any, table: pd.DataFrame, folder: Path) -> str:
    cell = column
    if isinstance(column, dict):
        rows, cell = rows.query(column["where"]), column["cell"]
    if "{" not in cell:
        raise FigureError(f"{cell}: a cell without an expression in braces")
    return filled(cell, Names(rows, table, folder)) if len(rows) else ""


def filled(cell: str, names: Names) -> str:
    """Return the value of an f-string."""
    return str(expression(f"f'''{cell}'''", names))


def expression(source: str, names: Names) -> Any:
    """Return the value of an expression over the chosen rows; see the module."""
    try:
        return eval(source, names, names)  # generators look names up as if they were global
    except Exception as error:  # whatever an expression raises
        raise FigureError(f"{source}: {error}") from error


class Names(dict[str, Any]):
    """The names that an expression may use: functions, and columns of the chosen rows, looked up when they are used."""

    def __init__(self, rows: pd.DataFrame, table: pd.DataFrame, folder: Path) -> None:
        def of_all(function: str) -> Callable[[Any], Any]:
            def reduce(values: Any) -> Any:
                repeated = np.isscalar(values)  # a column of equal values is one value to expressions
                return getattr(pd.Series(values, range(len(rows)) if repeated else None), function)()

            return reduce

        reductions = {"mean": "mean", "median": "median", "low": "min", "high": "max", "total": "sum", "std": "std"}
        super().__init__({name: of_all(function) for name, function in reductions.items()})
        self |= {"n": len(rows), "abs": abs, "all": all, "any": any, "len": len, "__builtins__": {}}
        self |= {"here": _reader(rows), "of": _reader(table), "count": lambda query: len(table.query(query))}
        self |= {"other": lambda path: _reader(read_table(folder / path)), "ratios": functools.partial(_ratios, table)}
        self._rows = rows
        if clash := self.keys() & set(table.columns):
            raise FigureError(f"columns of the CSV are called as functions are: {', '.join(sorted(clash))}")

    def __missing__(self, name: str) -> Any:
        return _one(self._rows[name])


def _one(values: pd.Series) -> Any:
    """Return the value of a series if it has one, or the series."""
    return values.iloc[0] if values.nunique(dropna=False) == 1 else values


def _reader(table: pd.DataFrame) -> Callable[..., Any]:
    def of(column: str, **equal: Any) -> Any:
        chosen = table
        for name, value in equal.items():
            chosen = chosen[chosen[name] == value]
        if chosen.empty:
            raise KeyError(f"no row has {equal}")
        return _one(chosen[column])

    return of


def _ratios(table: pd.DataFrame, column: str, over: str, under: str, by: Sequence[str]) -> pd.Series:
    """Divide a column of the rows that a query chooses by that of others with the same values in the columns ``by``."""
    one, other = (table.query(query).set_index(list(by))[column] for query in (over, under))
    if not (one.index.is_unique and other.index.is_unique):
        raise ValueError(f"several rows have the same {', '.join(by)}")
    ratios: pd.Series = (one / other).dropna()
    if ratios.empty:
        raise ValueError("there are no two rows to compare")
    return ratios


def _embolden(grid: list[list[str]], places: Sequence[int], *, lowest: bool, down: bool) -> None:
    """Mark the best of some cells in each row, or of each of some columns, if the others are clearly worse."""
    places_of = [[(row, place) for row in range(len(grid))] for place in places]
    for group in places_of if down else [[(row, place) for place in places] for row in range(len(grid))]:
        found = {at: _FIRST.search(grid[at[0]][at[1]]) for at in group}
        values = {at: float(number[0].replace(",", "")) for at, number in found.items() if number}
        if len(values) < 2:
            continue
        best = min(values.values()) if lowest else max(values.values())
        near = [at for at, value in values.items() if abs(value - best) <= _CLEAR * abs(best)]
        for row, place in near if len(near) < len(values) else []:
            grid[row][place] = _FIRST.sub(lambda number: f"**{number[0]}**", grid[row][place], count=1)


# -- numbers of the text -----------------------------------------------------------------------------------------------

_UNITS = r"s|ms|minutes|hours|MB|GB|KB|kB|MiB|GiB|KiB|times|points|nodes/s|edges/s"
_NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?![\d.]*\d)(\s?%|x\b|\s(?:{_UNITS})\b)?")
_IN_TEXT = re.compile(r"\d[\d,]*(?:\.\d+)?")
_OF_PAPERS = re.compile(
    r"\((?:in )?(?:the )?paper\b[^()]*\)|\bthe paper \([^()]*\)|(?:(?<=[.:;]\s)|^)(?:in )?the paper\b.*?(?:[.:;]\s|$)",
    re.MULTILINE | re.IGNORECASE,
)
_MACHINE = re.compile(r"[^.\n]*\bvirtual machine\b.*$", re.MULTILINE)  # which is a column of each CSV
_PLACE = re.compile(
    r"\b(?:Sec\.|Sections?|Figures?|Tables?|Eq\.|torch|PyG|DGL|dgl|Python)\s\d[\d.]*(?:(?:,| and| to)\s\d[\d.]*)*"
)
_REMARKS = ("note", "said", "line", "reason", "wrong", "failed", "commit", "date", "cpu", "python", "torch", "pyg",
            "lightning", "torch_sparse")  # fmt: skip


def strays(text: str, folder: Path) -> list[str]:
    """Return the numbers of a README that neither a table beside them nor a setting of its CSVs holds."""
    text = re.sub(r"^```.*?^```[ \t]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    sections = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    known_of = [[_known(block, folder) for block in _BLOCK.finditer(section)] for section in sections]
    if not any(known_of):
        return []  # nothing has been measured yet
    found = []
    for section, known in zip(sections, known_of, strict=True):
        figures, settings = (
            set[str]().union(*sets) for sets in zip(*(known or itertools.chain(*known_of)), strict=True)
        )
        for number, said, measured in _said(section):
            if number not in figures and (measured or number not in settings):
                found.append(f"{section.partition(chr(10))[0].strip('# ')}: {said}")
    return found


def _known(block: re.Match[str], folder: Path) -> tuple[set[str], set[str]]:
    """Return the numbers in a block's cells and its list ``also``, and those in its labels and in texts of its CSV."""
    read, table, _ = _read(block, folder)
    names = Names(table, table, folder)
    labels, grid = _cells(read, table, folder)
    said = [*itertools.chain(*grid), *(filled(one, names) for one in read.get("also", []))]
    texts = [name for name in table.columns if name not in _REMARKS and not is_numeric_dtype(table[name])]
    settings = (str(value) for name in texts for value in table[name].dropna().unique())
    return _numbers_in(said), _numbers_in([*settings, *itertools.chain(*labels)])


def _numbers_in(texts: Iterable[str]) -> set[str]:
    return {number.replace(",", "") for text in texts for number in _IN_TEXT.findall(text)}


def _said(section: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the numbers of a section's text that are figures, each with the words before it, and if it has a unit."""
    text = re.sub(r"<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", "", _BLOCK.sub("", section), flags=re.DOTALL)
    for pattern in (_OF_PAPERS, _MACHINE, _PLACE):
        text = pattern.sub("", text)
    for number in _NUMBER.finditer(text):
        if "." in number[1] or number[2]:
            yield number[1].replace(",", ""), text[max(0, number.start() - 60) : number.end()], bool(number[2])


# -- all READMEs -------------------------------------------------------------------------------------------------------


def readmes() -> list[Path]:
    """Return the READMEs of all experiments."""
    return sorted(HERE.glob("**/README.md"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, and tell of numbers that no CSV holds; the exit code is 1 if there are any."""
    cli = argparse.ArgumentParser(description="Write the tables of the experiments' READMEs from their CSVs.")
    cli.add_argument("--check", action="store_true", help="only tell what differs")
    cli.add_argument("readme", type=Path, nargs="*", help="README files (default: all)")
    options, wrong = cli.parse_args(argv), False
    for path in options.readme or readmes():
        text = path.read_text(encoding="utf-8")
        try:
            made, stray = written(text, path.parent), strays(text, path.parent)
        except FigureError as error:
            print(f"{path}: {error}", file=sys.stderr)
            wrong = True
            continue
        if made != text and options.check:
            print(f"{path}: tables differ from the CSVs: python -m experiments.readmes", file=sys.stderr)
        elif made != text:
            path.write_text(made, encoding="utf-8")
        for one in stray:
            print(f"{path}: no CSV holds: {one}", file=sys.stderr)
        wrong = wrong or bool(stray) or (options.check and made != text)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
