"""What an experiment's table means: ``NAME.yaml`` beside ``NAME.csv``, read and checked.

The scripts write figures; what they are compared with, and how they are drawn, is said once, here. A mistake is told
with the file and the key, before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pygdist.errors import InputError

__all__ = ["Experiment", "Kind", "Mean", "Plot", "Published", "is_description", "read_description"]

Kind = Literal["bar", "line", "scatter"]
Axis = Literal["x", "y"]
_KINDS: tuple[Kind, ...] = ("bar", "line", "scatter")
_AXES: tuple[Axis, ...] = ("x", "y")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of a table's columns.

    Attributes:
        title: Its heading.
        kind: ``bar``, ``line`` or ``scatter``.
        x: Column along the horizontal axis, numbers or words; of several columns, each combination of values.
        y: Columns of numbers along the vertical axis.
        colour: Columns of which each combination of values is one trace.
        where: Rows that are drawn: those with one of the values in each of these columns.
        log: Axes that are logarithmic.
        x_title: What the horizontal axis says; the column's name by default.
        y_title: What the vertical axis says; the column's name by default.
        error: Columns of the lower and the upper bound of the one ``y``.
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
        """Every column that it needs."""
        return (*self.x, *self.y, *self.colour, *self.where, *(self.error or ()))


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Rows that are runs of one measurement: shown and drawn as their mean and standard deviation.

    Attributes:
        over: Columns that tell the runs of one measurement apart, such as ``seed``.
        of: Columns that were measured.
    """

    over: tuple[str, ...]
    of: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """Numbers that others published, in the columns of our table.

    Attributes:
        source: Where they stand.
        rows: Column by value, as text.
    """

    source: str
    rows: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A description.

    Attributes:
        path: The file.
        title: Heading.
        paper: The heading under which it stands: a paper, or a part of the project.
        figure: Which figure or table of the paper.
        claim: What the paper, or the design, claims.
        differs: Where ours differs.
        table: Columns of the main table; all that vary from row to row if empty.
        mean: Which rows are runs of one measurement, if each row is one run.
        plots: What is drawn.
        published: The paper's numbers.
        again: The command that reruns a row, with the row's columns in braces. Values are quoted for the shell where
            they need it, unless they stand in quotes already, are the whole command, or ``{column!s}`` is written.
        run: How the experiment is run, for those who run it; not looked at here.
    """

    path: Path
    title: str
    paper: str
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
    """Read a description.

    Args:
        path: A YAML file.

    Raises:
        InputError: If it cannot be read, or a key is unknown, missing, or of another type; names the file and the key.
    """
    known: dict[str, Callable[[Any, str], Any]] = {
        **dict.fromkeys(("title", "paper", "figure", "claim", "differs", "again"), _text),
        "table": _texts,
        "mean": lambda value, place: Mean(
            **_fields(value, place, {"over": _texts, "of": _texts}, required=("over", "of"))
        ),
        "plots": lambda value, place: tuple(_plot(one, f"{place}[{i}]") for i, one in enumerate(_list(value, place))),
        "published": _published,
        "run": lambda value, _: value,
    }
    return Experiment(path=path, **_fields(_load(path), f"{path}", known, required=("title", "paper")))


def is_description(path: Path) -> bool:
    """Whether a YAML file without a table beside it is a description: it has a title or a paper.

    Raises:
        InputError: If it is no YAML.
    """
    found = _load(path)
    return isinstance(found, dict) and bool({"title", "paper"} & found.keys())


def _load(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{path}{place}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as YAML: {error}") from error


def _fields(
    value: Any, place: str, known: Mapping[str, Callable[[Any, str], Any]], *, required: tuple[str, ...]
) -> dict[str, Any]:
    """The keys that are there, each through its reader."""
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected keys and values, got {_named(value)}")
    for key in value:
        if key not in known:
            raise InputError(f"{place}: unknown key '{key}'; known are {', '.join(known)}")
    for key in required:
        if value.get(key) in (None, ""):
            raise InputError(f"{place}: '{key}' is missing")
    return {key: known[key](one, f"{place}: {key}") for key, one in value.items() if one is not None or key == "run"}


def _plot(value: Any, place: str) -> Plot:
    known: dict[str, Callable[[Any, str], Any]] = {
        **dict.fromkeys(("title", "x_title", "y_title"), _text),
        **dict.fromkeys(("x", "y", "colour", "error"), _texts),
        "kind": lambda one, at: _one_of(one, at, _KINDS),
        "log": lambda one, at: tuple(_one_of(axis, at, _AXES) for axis in _texts(one, at)),
        "where": _where,
    }
    fields = {"where": {}, **_fields(value, place, known, required=("title", "kind", "x", "y"))}
    if "error" in fields and (len(fields["error"]) != 2 or len(fields["y"]) != 1):
        raise InputError(f"{place}: error: expected the columns of the lower and the upper bound of one y")
    return Plot(**fields)


def _where(value: Any, place: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise InputError(f"{place}: expected columns and their values, got {_named(value)}")
    return {
        _text(column, place): tuple(_value(one, f"{place}.{column}") for one in _one_or_more(wanted))
        for column, wanted in value.items()
    }


def _published(value: Any, place: str) -> Published:
    fields = _fields(value, place, {"source": _text, "rows": _published_rows}, required=("source", "rows"))
    return Published(**fields)


def _published_rows(value: Any, place: str) -> tuple[dict[str, str], ...]:
    rows = _list(value, place)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"{place}[{number}]: expected columns and values, got {_named(row)}")
    return tuple(
        {_text(column, place): _value(one, f"{place}[{number}].{column}") for column, one in row.items()}
        for number, row in enumerate(rows)
    )


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place}: expected text, got {_named(value)}")
    return value


def _texts(value: Any, place: str) -> tuple[str, ...]:
    return tuple(_text(one, place) for one in _one_or_more(value))


def _value(value: Any, place: str) -> str:
    """A cell, as a table has it: text, with nothing for what is missing."""
    if isinstance(value, (dict, list)):
        raise InputError(f"{place}: expected a number or text, got {_named(value)}")
    return "" if value is None else str(value)


def _one_of(value: Any, place: str, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise InputError(f"{place}: expected {' or '.join(choices)}, got {value!r}")
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
