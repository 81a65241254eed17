"""The columns of a table of edges that are read: ends, weights, attributes, by their names or as the user says."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pygdist.errors import InputError

Wanted = Mapping[str, list[str]]
"""Names of columns for each of ``source``, ``target``, ``weight`` and ``attributes`` that the user has named."""

_ROLES = ("source", "target", "weight", "attributes")
_FORM = "expected source=NAME,target=NAME,weight=NAME,attributes=NAME+NAME, of which any may be left out"
_WEIGHTS = ({"weight"}, {"weights"}, {"w"}, {"wt"}, {"edge", "weight"}, {"edge", "weights"})

# the usual names of ends; those of a row count where no column has those of the rows before
_ENDS = (
    (
        ({"source", "src", "from"}, {"target", "tgt", "dst", "dest", "destination", "to"}),
        ({"head"}, {"tail"}),
        ({"citing"}, {"cited"}),
        ({"follower"}, {"followee", "followed"}),
    ),
    (
        ({"s"}, {"t"}),
        ({"h"}, {"t"}),
        ({"start"}, {"end"}),
        ({"u"}, {"v"}),
        ({"i"}, {"j"}),
        ({"row"}, {"col", "column"}),
    ),
    (({"1", "a"}, {"2", "b"}), ({"0"}, {"1"})),
)
_TIMES = {"from", "to", "start", "end"}
_REST = {
    "id", "ids", "idx", "index", "node", "nodes", "nodeid", "vertex", "vertexid", "user", "userid", "paper", "paperid",
    "person", "page", "account", "entity",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Places of the columns to read, in a table that names its columns or numbers them from 1.

    Attributes:
        names: Names of all columns.
        source: Place of the sources.
        target: Place of the targets.
        weight: Place of the weights, if there are any.
        attributes: Places of the attributes, in the order in which they are stored.
    """

    names: tuple[str, ...]
    source: int
    target: int
    weight: int | None = None
    attributes: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, int]:
        """Places of sources and targets."""
        return self.source, self.target

    @property
    def values(self) -> tuple[int, ...]:
        """Places of the numbers of each edge: of its weight, then of its attributes."""
        return (() if self.weight is None else (self.weight,)) + self.attributes

    def notes(self, where: str) -> list[str]:
        """Return what to tell about columns that were read, and those that were not."""
        notes = []
        if self.weight is not None:
            name = self.names[self.weight]
            notes.append(f"{where}: edge weights are from column {name} (none with columns weight=)")
        others = [name for place, name in enumerate(self.names) if place not in (*self.ends, *self.values) and name]
        if others:
            notes.append(f"{where}: not read: {', '.join(others)} (read with columns weight=NAME,attributes=NAME+NAME)")
        return notes


def wanted_columns(columns: str | Mapping[str, str | Sequence[str]] | None) -> Wanted:
    """Put what the user says of columns into one form.

    Args:
        columns: Text such as ``source=from,target=to,weight=,attributes=a+b``, or a mapping of the same keys; the value
            of ``attributes`` may be a list. An empty ``weight`` means that none is read.

    Raises:
        InputError: If a key is unknown or comes twice, ``source`` or ``target`` is missing or empty, or a role has
            several columns.
    """
    if isinstance(columns, str):
        pairs = [one.partition("=") for one in columns.split(",")]
        if wrong := [key for key, equals, _ in pairs if not equals]:
            raise InputError(f"columns: '{wrong[0]}' has no value, {_FORM}")
        if len({key.strip() for key, *_ in pairs}) < len(pairs):
            raise InputError(f"columns: '{columns}' says one thing twice, {_FORM}")
        columns = {key.strip(): value.split("+") if key.strip() == "attributes" else value for key, _, value in pairs}
    wanted = {}
    for role, value in (columns or {}).items():
        if role not in _ROLES:
            raise InputError(f"columns: '{role}' is unknown, {_FORM}")
        names = [str(value)] if isinstance(value, str | int) else [str(name) for name in value]
        wanted[role] = [name.strip() for name in names if name.strip()]
        if len(wanted[role]) > 1 and role != "attributes":
            raise InputError(f"columns: {role} is one column, not {', '.join(wanted[role])}")
    if bool(wanted.get("source")) != bool(wanted.get("target")):
        raise InputError("columns: name both source and target, or neither")
    return wanted


def choose(where: str, names: Sequence[str], wanted: Wanted, *, named: bool) -> Columns | None:
    """Find the columns to read.

    Args:
        where: The file, for messages.
        names: Names of all columns.
        wanted: The result of :func:`wanted_columns`.
        named: The names are the table's own. Else the columns are numbered from 1, and the first two are the ends.

    Returns:
        The columns; ``None`` if names do not tell which are the ends.

    Raises:
        InputError: If the user names a column that is not there, or there several times, or one column twice.
    """
    roles = {role: [_place(where, names, name) for name in some] for role, some in wanted.items()}
    taken = {place for role in ("weight", "attributes") for place in roles.get(role, [])}
    ends: tuple[int, int] | None = (0, 1)
    if roles.get("source"):
        ends = roles["source"][0], roles["target"][0]
    elif named:
        ends = ends_of(["" if place in taken else name for place, name in enumerate(names)])
    if ends is None:
        return None
    if "weight" not in roles and named:
        usual = [place for place, name in enumerate(names) if _words(name) in _WEIGHTS]
        weights = [place for place in usual if place not in roles.get("attributes", [])]
        roles["weight"] = weights if len(weights) == 1 else []  # of several none: notes() tells of them
    weight = roles["weight"][0] if roles.get("weight") else None
    attributes = tuple(roles.get("attributes", []))
    columns = Columns(names=tuple(names), source=ends[0], target=ends[1], weight=weight, attributes=attributes)
    read = [*columns.ends, *columns.values]
    if len(set(read)) < len(read):
        twice = next(names[place] for place in read if read.count(place) > 1)
        raise InputError(f"{where}: column {twice} is read twice; name each column once")
    return columns


def _place(where: str, names: Sequence[str], name: str) -> int:
    """Return the place of a column by its name, or by its number from 1 if no column has this name."""
    if (count := list(names).count(name)) == 1:
        return list(names).index(name)
    if count:
        raise InputError(f"{where}: {count} columns are called '{name}'; say which by its number, from 1")
    if name.isascii() and name.isdigit() and 1 <= int(name) <= len(names):
        return int(name) - 1
    raise InputError(f"{where}: has no column '{name}'; its columns are {', '.join(names)}")


def ends_of(names: Sequence[str]) -> tuple[int, int] | None:
    """Return the places of the columns of sources and of targets; ``None`` if the names tell none, or several.

    Names are those that people give: ``Source, Target``; ``src_id, dst_id``; ``FromNodeId, ToNodeId``; ``id_1, id_2``;
    ``u, v``; in any order.
    """
    words = [_words(name) for name in names]
    found = [places for usual in _ENDS if (places := _pairs(words, usual))]
    if not found or len(found[0]) > 1:
        return None
    source, target = found[0].pop()
    # "id_1, id_2, start, end": those of a time, most likely
    return None if len(found) > 1 and (words[source] | words[target]) & _TIMES else (source, target)


def _pairs(words: list[frozenset[str]], usual: Iterable[tuple[set[str], set[str]]]) -> set[tuple[int, int]]:
    return {
        (source, target)
        for sources, targets in usual
        for source, first in enumerate(words)
        for target, second in enumerate(words)
        if source != target
        and _is_end(first, sources)
        and _is_end(second, targets)
        and first - sources == second - targets
    }


def _words(name: str) -> frozenset[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z0-9])", " ", name.strip().strip("\"'"))
    return frozenset(re.findall(r"[a-z]+|[0-9]+", spaced.lower()))


def _is_end(words: frozenset[str], ends: set[str]) -> bool:
    """True if one word is an end's, and the others are those of any id."""
    return len(words & ends) == 1 and words - ends <= _REST
