"""Descriptions of experiments: ``NAME.yaml`` beside the table ``NAME.csv``.

Scripts write the table. The description says how it is drawn and what it is compared with. Every mistake in it is
reported with the file and the key, before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pygdist.bounded_yaml import read_yaml
from pygdist.errors import InputError

Kind = Literal["bar", "line", "scatter"]
Axis = Literal["x", "y"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of a table's columns.

    Attributes:
        x: Column along the horizontal axis, of numbers or words; several columns give combinations of their values.
        y: Columns of numbers along the vertical axis.
        colour: Each combination of values in these columns is one trace.
        where: Only rows with one of the listed values in each of these columns are drawn.
        log: Axes that are logarithmic.
        x_title: Title of the horizontal axis; the column's name by default.
        y_title: Title of the vertical axis; the column's name by default.
        error: Columns of the lower and the upper bound of the single ``y``.
    """

    title: str
    kind: Kind
    x: tuple[str, ...]
    y: tuple[str, ...]
    colour: tuple[str, ...] = ()
    where: Mapping[str, tuple[str, ...]]
    log: tuple[Axis, ...] = ()
    x_title: str = ""
    y_title: str = ""
    error: tuple[str, str] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that the plot needs."""
        return (*self.x, *self.y, *self.colour, *self.where, *(self.error or ()))


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Repeated runs, which are shown and drawn as their mean and standard deviation."""

    over: tuple[str, ...]  # columns in which the runs of one measurement differ, such as seed
    of: tuple[str, ...]  # measured columns


@dataclass(frozen=True, kw_only=True)
class Published:
    """Numbers from a paper: its citation, and rows of text in the columns of our table."""

    source: str
    rows: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The description of an experiment.

    Attributes:
        paper: Section of the page: a paper, or a part of the project.
        first: True if this section opens the page; other sections follow by name.
        figure: Figure or table of the paper.
        claim: Claim of the paper or of the design.
        differs: Differences between the paper's setup and ours.
        table: Columns of the main table; by default all that vary from row to row.
        mean: Set if rows are repeated runs, to be averaged.
        again: Command that reruns a row, with the row's columns in braces. Values are quoted for the shell if they need
            it, but not inside quotes, as the whole command, or written as ``{column!s}``.
        run: Settings for ``experiments/run.py``; not used here.
    """

    path: Path
    title: str
    paper: str
    first: bool = False
    figure: str = ""
    claim: str = ""
    differs: str = ""
    table: tuple[str, ...] = ()
    mean: Mean | None = None
    plots: tuple[Plot, ...] = ()
    published: Published | None = None
    again: str = ""
    run: Any = None


def read_description(path: Path) -> Experiment:
    """Read a description from a YAML file.

    Raises:
        InputError: If the file cannot be read, or a key is unknown, missing or of a wrong type; names file and key.
    """
    readers: dict[str, Callable[[Any, str], Any]] = {
        **dict.fromkeys(("title", "paper", "figure", "claim", "differs", "again"), _text),
        "first": lambda value, place: _one_of(value, place, (True, False)),
        "table": _texts,
        "mean": _mean,
        "plots": lambda value, place: tuple(_plot(one, f"{place}[{i}]") for i, one in enumerate(_list(value, place))),
        "published": _published,
        "run": lambda value, _: value,
    }
    return Experiment(path=path, **_fields(read_yaml(path), f"{path}", readers, required=("title", "paper")))


def is_description(path: Path) -> bool:
    """Tell if a YAML file without a table beside it is a description: it has a title or a paper.

    Raises:
        InputError: If the file is not valid YAML.
    """
    content = read_yaml(path)
    return isinstance(content, dict) and bool({"title", "paper"} & content.keys())


def _fields(
    value: Any, place: str, readers: Mapping[str, Callable[[Any, str], Any]], *, required: tuple[str, ...]
) -> dict[str, Any]:
    """Read each key of a mapping with its reader."""
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected keys and values, got {_named(value)}")
    for key in value:
        if key not in readers:
            raise InputError(f"{place}: unknown key '{key}'; the keys are {', '.join(readers)}")
    for key in required:
        if value.get(key) in (None, ""):
            raise InputError(f"{place}: '{key}' is missing")
    return {key: readers[key](one, f"{place}: {key}") for key, one in value.items() if one is not None or key == "run"}


def _mean(value: Any, place: str) -> Mean:
    return Mean(**_fields(value, place, {"over": _texts, "of": _texts}, required=("over", "of")))


def _plot(value: Any, place: str) -> Plot:
    readers: dict[str, Callable[[Any, str], Any]] = {
        **dict.fromkeys(("title", "x_title", "y_title"), _text),
        **dict.fromkeys(("x", "y", "colour", "error"), _texts),
        "kind": lambda one, at: _one_of(one, at, get_args(Kind)),
        "log": lambda one, at: tuple(_one_of(axis, at, get_args(Axis)) for axis in _texts(one, at)),
        "where": lambda one, at: _columns(one, at, _cells),
    }
    fields = {"where": {}, **_fields(value, place, readers, required=("title", "kind", "x", "y"))}
    if "error" in fields and (len(fields["error"]) != 2 or len(fields["y"]) != 1):
        raise InputError(f"{place}: error: expected two columns, the lower and the upper bound of a single y")
    return Plot(**fields)


def _published(value: Any, place: str) -> Published:
    def rows(value: Any, place: str) -> tuple[dict[str, str], ...]:
        return tuple(_columns(row, f"{place}[{i}]", _cell) for i, row in enumerate(_list(value, place)))

    return Published(**_fields(value, place, {"source": _text, "rows": rows}, required=("source", "rows")))


def _columns(value: Any, place: str, read: Callable[[Any, str], T]) -> dict[str, T]:
    """Read what a mapping says of each column."""
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected columns and their values, got {_named(value)}")
    return {_text(column, place): read(one, f"{place}.{column}") for column, one in value.items()}


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place}: expected text, got {_named(value)}")
    return value


def _texts(value: Any, place: str) -> tuple[str, ...]:
    return tuple(_text(one, place) for one in _one_or_more(value))


def _cell(value: Any, place: str) -> str:
    """Return a value as a cell of a table: text, empty if it is missing."""
    if isinstance(value, (dict, list)):
        raise InputError(f"{place}: expected a number or text, got {_named(value)}")
    return "" if value is None else str(value)


def _cells(value: Any, place: str) -> tuple[str, ...]:
    return tuple(_cell(one, place) for one in _one_or_more(value))


def _one_of(value: Any, place: str, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise InputError(f"{place}: expected {' or '.join(map(str, choices))}, got {value!r}")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{place}: expected a list, got {_named(value)}")
    return value


def _one_or_more(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _named(value: Any) -> str:
    if value is None:
        return "nothing"
    return {"dict": "keys and values", "list": "a list"}.get(type(value).__name__, repr(value))
