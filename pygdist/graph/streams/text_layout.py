"""The layout of a text file of edges, told from its first lines: comments, names of columns, separator, kind of ids.

Three formats say more in their first lines: KONECT (``% sym weighted``), MatrixMarket (``%%MatrixMarket matrix ...``)
and SNAP (``# Nodes: 10 Edges: 20``). Ids of the first two start at 1, by definition.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pygdist.errors import InputError
from pygdist.graph.streams.columns import Columns, Wanted, choose

COMMENT = re.compile(r"[ \t]*(?:#|%|//)")
COMMENT_AMONG_NAMES = re.compile(COMMENT.pattern + r"(?:[ \t]|$)")
_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|")
_KONECT = re.compile(r"%\s*(sym|asym|bip)\s+(\w+)")
_KONECT_SIZE = re.compile(r"%\s*([0-9]+)(\s+[0-9]+){1,2}\s*")
_SNAP_SIZE = re.compile(r"\bEdges:\s*([0-9]+)\b", re.IGNORECASE)
_SAMPLE_LINES = 1000


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """The layout of a text file.

    Attributes:
        columns: The columns to read.
        separator: ``,``, ``;``, ``|``, a tab, or a blank for any number of blanks and tabs.
        first: Number of lines before the first edge: comments, names of columns.
        named: Ids are names, not numbers. Then only the first lines are comments.
        decimal: Decimal point of numbers.
        first_id: Id of the first node, if the format says so.
        mirrored: As in :class:`~pygdist.graph.streams.tables.EdgeTable`.
        num_nodes: Number of nodes, if the file says so.
        num_lines: Number of edges that the file says it holds.
        exact: A file with another number of edges is damaged.
        size: The number in the last cell of the first edge, if the line may be the size of the graph instead.
        notes: What to tell about the first lines.
    """

    columns: Columns
    separator: str
    first: int
    named: bool = False
    decimal: str = "."
    first_id: int | None = None
    mirrored: int = 0
    num_nodes: int | None = None
    num_lines: int | None = None
    exact: bool = False
    size: str = ""
    notes: tuple[str, ...] = ()

    @property
    def comment(self) -> re.Pattern[str]:
        """Matches a line that is a comment; among names only if a blank follows the mark."""
        return COMMENT_AMONG_NAMES if self.named else COMMENT

    @property
    def needs_pyarrow(self) -> str:
        """The reason why the native parser cannot read the file; empty if it can."""
        if self.named:
            return "names as ids"
        if self.columns.values:
            return "weights and attributes"
        if self.columns.ends not in ((0, 1), (1, 0)):
            return "columns other than the first two"
        return f"the separator {self.separator}" if self.separator in ";|" else ""


def text_layout(
    path: Path, lines: Sequence[str], wanted: Wanted, named: bool | None, *, before: int = 0
) -> TextLayout | None:
    """Tell the layout of a text from its first lines; ``None`` if all of them are empty or comments.

    ``before`` is the number of lines before these, all of them comments.

    Raises:
        InputError: If a line has a single cell, a first line names columns but does not tell which are the ends of
            edges, or a column that the user names is not there.
    """
    rows = [number for number, line in enumerate(lines) if line.strip() and not COMMENT.match(line)]
    if not rows:
        return None
    comments = [line for line in lines[: rows[0]] if line.strip()]
    sample = [_without_note(lines[number]) for number in rows[: _SAMPLE_LINES + 1]]
    separator = _separator(sample)
    names = cells_of(sample[0], separator)
    if len(names) < 2:
        raise InputError(f"{path}: line {before + rows[0] + 1} is {shown(sample[0])}, expected two ids, as columns")
    first, has_names = rows[0], _names_columns(names, wanted, path, sample, separator)
    if has_names:
        first += 1
    elif commented := _names_in_comment(comments, len(names), separator, wanted):
        names, has_names = commented, True
    else:
        names = [str(number) for number in range(1, len(names) + 1)]
    columns = choose(str(path), names, wanted, named=has_names)
    if columns is None:
        raise _unknown_ends(path, lines[rows[0]])
    below = (line for line in lines[first:] if line.strip() and not COMMENT_AMONG_NAMES.match(line))
    cells = [cells_of(_without_note(line), separator) for line in itertools.islice(below, _SAMPLE_LINES)]
    are_names = named if named is not None else _are_names(cells, columns)
    if are_names and first > rows[0] and not wanted.get("source"):
        ids = {cell for row in cells for place, cell in enumerate(row) if place in columns.ends}
        if any(names[place] in ids for place in columns.ends):  # an edge of nodes a and b, say
            raise _unknown_ends(path, lines[rows[0]])
    layout = TextLayout(
        columns=columns,
        separator=separator,
        first=first,
        named=are_names,
        decimal="," if separator == ";" and _has_commas(cells, columns) else ".",
        num_lines=next((int(size[1]) for line in comments if (size := _SNAP_SIZE.search(line))), None),
    )
    layout = _konect(path, layout, comments, wanted) if comments and comments[0].startswith("%") else layout
    is_header, told = first > rows[0], [] if has_names else comments
    numbers = cells_of(sample[0], separator)
    if not has_names and len(numbers) <= 3 and all(map(is_whole, numbers)):
        layout = replace(layout, size=numbers[-1])
    return replace(layout, notes=_notes(path, layout, lines[rows[0]], is_header, told, wanted))


def cells_of(line: str, separator: str) -> list[str]:
    """Return the cells of a line, without quotes and the blanks around them."""
    if separator == " ":
        line = " ".join(line.split())
    try:
        cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:  # a line break inside of a line
        cells = line.split(separator)
    return [cell.strip() for cell in cells]


def is_whole(cell: str) -> bool:
    """Tell if a cell holds a whole number."""
    return _WHOLE.fullmatch(cell) is not None


def is_word(cell: str) -> bool:
    """Tell if a cell holds neither a number nor nothing."""
    return _NUMBER.fullmatch(cell) is None


def matrix_layout(path: Path, lines: Sequence[str], wanted: Wanted) -> TextLayout:
    """Read the header of a MatrixMarket file; entry ``(i, j)`` is the edge from i to j, its value the weight.

    Raises:
        InputError: If the header is none, or the matrix is dense, complex or not square.
    """
    header = lines[0].lower().split() if lines else []
    if len(header) != 5 or header[0] != "%%matrixmarket":
        raise InputError(f"{path}: line 1 is not the header of MatrixMarket, such as %%MatrixMarket matrix coordinate")
    _, kind, form, field, symmetry = header
    if kind != "matrix" or form != "coordinate" or field not in ("pattern", "real", "integer", "double"):
        raise InputError(f"{path}: holds a {kind} {form} {field}, expected a matrix coordinate of real numbers")
    mirrored = {"general": 0, "symmetric": 1, "skew-symmetric": -1}.get(symmetry)
    if mirrored is None:
        raise InputError(f"{path}: the matrix is {symmetry}, expected general, symmetric or skew-symmetric")
    place = next((number for number, line in enumerate(lines) if line.strip() and line[0] != "%"), None)
    size = lines[place].split() if place is not None else []
    if place is None or len(size) != 3 or not all(map(is_whole, size)):
        raise InputError(f"{path}: line {1 + (place or 0)} has no size, expected rows, columns and number of entries")
    if size[0] != size[1]:
        raise InputError(f"{path}: the matrix is {size[0]} x {size[1]}, expected a square one, a row for each node")
    names = ["1", "2"] if field == "pattern" else ["1", "2", "3"]
    values = {} if field == "pattern" else {"weight": ["3"]}
    columns = choose(str(path), names, {**values, **wanted}, named=False)
    assert columns is not None, "columns without names have places"
    return TextLayout(
        columns=columns, separator=" ", first=place + 1, first_id=1, mirrored=mirrored,
        num_nodes=int(size[0]), num_lines=int(size[2]), exact=True,
    )  # fmt: skip


def _separator(sample: Sequence[str]) -> str:
    """Tell the separator from the first lines; blanks if there is no other."""
    line, other = sample[0], sample[min(1, len(sample) - 1)]
    for separator in ";|":
        if separator in line and line.count(separator) == other.count(separator):
            return separator
    tabs = line.count("\t")
    alike = 2 * sum(other.count("\t") == tabs for other in sample) > len(sample)
    if tabs and alike and all(cell.strip(" ,") for cell in line.strip().split("\t")) and ",\t" not in line:
        return "\t"
    return "," if "," in line else " "


def _names_columns(cells: list[str], wanted: Wanted, path: Path, sample: Sequence[str], separator: str) -> bool:
    """Tell if the first line that is no comment names columns; refuse it if that cannot be told."""
    if all(map(is_whole, cells[:2])) or all(map(_NUMBER.fullmatch, cells)):
        return False
    if any(not is_whole(name) for names in wanted.values() for name in names):
        return True
    if wanted.get("source"):  # by number: names stand over numbers, or nothing tells, and the line is an edge
        below = [cells_of(line, separator) for line in sample[1:]]
        below = [row for row in below if len(row) == len(cells)]
        return bool(below) and any(
            is_word(cell) and not any(is_word(row[place]) for row in below) for place, cell in enumerate(cells)
        )
    if choose(str(path), cells, {}, named=True) is None:
        raise _unknown_ends(path, sample[0])
    return True


def _without_note(line: str) -> str:
    """Cut a comment at the end of a line that begins with a number."""
    return line.partition("#")[0] if line.lstrip()[:1].isdigit() else line


def _unknown_ends(path: Path, line: str) -> InputError:
    text = shown(line)
    return InputError(
        f"{path}: the first line {text} seems to name columns: which are the sources and the targets of edges? Say so "
        "with columns source=NAME,target=NAME, or by their numbers, source=1,target=2, if the line is an edge"
    )


def shown(line: str) -> str:
    """Return a line for a message: quoted, and cut if it is long."""
    text = line.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _names_in_comment(comments: Sequence[str], count: int, separator: str, wanted: Wanted) -> list[str] | None:
    """Return the names in the last comment, if these are as many as there are columns and tell the ends."""
    line = COMMENT.sub("", comments[-1], count=1) if comments else ""
    names = cells_of(line, separator)
    told = any(name in names for name in wanted.get("source", [])) or choose("", names, {}, named=True) is not None
    return names if told and len(names) == count and not any(map(is_whole, names)) else None


def _are_names(cells: Sequence[list[str]], columns: Columns) -> bool:
    """Tell if ids are names: more than half of the rows have one that is no number; fewer are mistakes."""
    rows = [[row[place] for place in columns.ends] for row in cells if len(row) == len(columns.names)]
    return 2 * sum(any(map(is_word, row)) for row in rows) > len(rows)


def _notes(
    path: Path, layout: TextLayout, line: str, is_header: bool, comments: Sequence[str], wanted: Wanted
) -> tuple[str, ...]:
    """Return what to tell about the first line and the comments where both might be edges."""
    notes = []
    by_number = all(map(is_whole, wanted.get("source", "x")))
    if is_header and (by_number or layout.named):
        notes.append(f"{path}: the first line, {shown(line)}, names columns")
    elif by_number and layout.named:
        notes.append(f"{path}: the first line, {shown(line)}, is an edge")
    elif layout.separator == "," and cells_of(line, ",") == [*map(str, range(len(layout.columns.names)))]:  # as pandas
        notes.append(
            f"{path}: the first line, {shown(line)}, was read as an edge, but may be a header; remove it if so"
        )
    if layout.named and not is_header:
        for comment in comments:
            cells = cells_of(comment, layout.separator)
            if not COMMENT_AMONG_NAMES.match(comment) and len(cells) == len(layout.columns.names):
                notes.append(f"{path}: {shown(comment)} is a comment, no edge")
    return tuple(notes)


def _has_commas(cells: Sequence[list[str]], columns: Columns) -> bool:
    values = itertools.chain.from_iterable(
        (row[place] for place in columns.values if place < len(row)) for row in cells
    )
    return any("," in value for value in values)


def _konect(path: Path, layout: TextLayout, comments: Sequence[str], wanted: Wanted) -> TextLayout:
    """Add what the first lines of a KONECT file say."""
    format_line = _KONECT.match(comments[0])
    if format_line is None:
        return layout
    kind, weights = format_line[1], format_line[2]
    if kind == "bip":
        raise InputError(
            f"{path}: is bipartite, with two kinds of nodes that are both numbered from 1; give each an id of its own"
        )
    columns = layout.columns
    if len(columns.names) > 2 and "weight" not in wanted and weights != "unweighted":
        columns = choose(str(path), columns.names, {**wanted, "weight": ["3"]}, named=False) or columns
    size = _KONECT_SIZE.fullmatch(comments[1].strip()) if len(comments) > 1 else None
    return replace(
        layout, columns=columns, first_id=1, mirrored=int(kind == "sym"), num_lines=int(size[1]) if size else None
    )
