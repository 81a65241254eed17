"""Rows of tables of edges, read with pyarrow (extra ``parquet``): whole numbers or names as ids, numbers as values."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError, needs
from pygdist.graph.streams.columns import Columns

ANY_ID = range((1 << 63) - 1)
"""The range of ids if the number of nodes is not known."""
LARGEST_EXACT = 1 << 53
"""The number from which float64 rounds some integers."""


class EdgeRows(NamedTuple):
    """Some edges and their values: ends ``(2, k)`` int64; by field, ``edge_weight`` ``(k,)``, ``edge_attr`` ``(k, D)``.

    They are valid until the next ones are read.
    """

    ends: NDArray[np.int64]
    values: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class EdgeTable:
    """A file of edges whose columns are known, and whose rows are not read yet.

    Attributes:
        columns: The columns to read.
        named: Ids are names, not numbers.
        read: Called with the names of the nodes (``None`` for whole numbers) and the range of their ids. Yields the
            rows, and raises ``InputError`` at one that cannot be read.
        first_id: Id of the first node, if the format says so: 1 in a matrix.
        mirrored: The format says that the reverse of each edge is meant too: 1, or -1 if with the opposite weight.
        num_nodes: Number of nodes, if the file says so.
        kinds: Types of the values, if the file says so.
    """

    columns: Columns
    named: bool
    read: Callable[[Names | None, range], Iterator[EdgeRows]]
    first_id: int | None = None
    mirrored: int = 0
    num_nodes: int | None = None
    kinds: tuple[str, ...] = ()


class Names:
    """Numbers of nodes whose ids are names, in the order in which they come; memory holds every name.

    Args:
        known: All names in the order of their numbers, if they are known before; then others are refused.

    Attributes:
        fixed: The names were known before.
    """

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self.fixed = known is not None
        self._number: dict[str, int] = {}
        for line, name in enumerate(known or (), start=1):
            if self._number.setdefault(name, len(self._number)) != line - 1:
                raise InputError(f"line {line} is '{name}', as line {self._number[name] + 1}; each node has one name")

    def __len__(self) -> int:
        return len(self._number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def numbers(self, ends: Sequence[Any]) -> NDArray[np.int64]:
        """Return the numbers of two arrays of pyarrow's strings, int64 of shape ``(2, k)``; -1 for an unknown name."""
        import pyarrow

        count = len(ends[0])
        in_turn = np.arange(2 * count).reshape(2, count).T.reshape(-1)  # first come, first numbered, in any chunks
        coded = pyarrow.concat_arrays(ends).take(pyarrow.array(in_turn)).dictionary_encode()
        number = self._number
        if self.fixed:
            of_names = [number.get(name, -1) for name in coded.dictionary.to_pylist()]
        else:
            of_names = [number.setdefault(name, len(number)) for name in coded.dictionary.to_pylist()]
        numbers = np.array(of_names, dtype=np.int64)[coded.indices.to_numpy(zero_copy_only=False)]
        return np.ascontiguousarray(numbers.reshape(count, 2).T)


def numbered(
    ends: Sequence[Any], names: Names | None, ids: range, refuse: Callable[[int, str], InputError]
) -> NDArray[np.int64]:
    """Return the numbers of the nodes at the ends of some rows, int64 of shape ``(2, k)``.

    Args:
        ends: Two arrays of pyarrow's, of integers, or of strings if there are ``names``.
        names: Numbers by name.
        ids: Range of the ids that are numbers.
        refuse: Called with a row and what is wrong with it; returns the error.
    """
    for end in ends:
        if end.null_count:
            raise refuse(int(np.flatnonzero(end.is_null().to_numpy(zero_copy_only=False))[0]), "has an empty id")
    if names is None:
        arrays = [end.to_numpy(zero_copy_only=False) for end in ends]
        wrong = np.flatnonzero(np.any([(array < ids.start) | (array >= ids.stop) for array in arrays], axis=0))
        if len(wrong):
            edge = tuple(int(array[wrong[0]]) for array in arrays)
            raise refuse(int(wrong[0]), f"holds ids {edge}, {expected_ids(max(edge), ids)}")
        return np.stack([array.astype(np.int64) for array in arrays])
    from pyarrow import compute

    ends = [compute.utf8_trim_whitespace(end) for end in ends]
    for end in ends:
        bad = compute.match_substring_regex(end, r"^$|[\r\n]").to_numpy(zero_copy_only=False)
        if bad.any():
            raise refuse(int(bad.argmax()), "has an id that is empty, or holds the end of a line")
    numbers = names.numbers(ends)
    unknown = np.flatnonzero((numbers < 0).any(axis=0))
    if len(unknown):
        row = int(unknown[0])
        name = ends[0 if numbers[0, row] < 0 else 1][row]
        raise refuse(row, f"holds id '{name}', which is none of the {len(names)} known names")
    return numbers


def expected_ids(wrong: int, ids: range) -> str:
    """Tell which ids are expected in place of a wrong one."""
    expected = f"expected ids {ids.start} to {ids.stop - 1}" if ids.stop < ANY_ID.stop else f"ids start at {ids.start}"
    return expected + ("; if ids start at 1, set first_id=1" if wrong == ids.stop and not ids.start else "")


def valued(
    columns: Columns, arrays: Sequence[Any], refuse: Callable[[int, str], InputError]
) -> dict[str, NDArray[Any]]:
    """Return weights and attributes from arrays of pyarrow's numbers, one for each of ``columns.values``.

    Attributes stay integers if all are; other values are float32 where they were, else float64. An integer that these
    cannot hold is refused.
    """
    by_place: dict[int, NDArray[Any]] = {}
    for place, array in zip(columns.values, arrays, strict=True):
        if array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise refuse(row, f"has nothing in column {columns.names[place]}, expected a number")
        by_place[place] = array.to_numpy(zero_copy_only=False)
    are_whole = all(by_place[place].dtype.kind in "biu" for place in columns.attributes)
    for place, values in by_place.items():
        name = columns.names[place]
        if values.dtype.kind in "biu" and not (are_whole and place in columns.attributes):
            by_place[place] = values.astype(np.float64)
            if (rounded := first_rounded(values)) is not None:
                raise refuse(rounded, rounded_in_column(values[rounded], name))
        elif values.dtype.kind == "u" and values.dtype.itemsize > 1:
            for large in np.flatnonzero(values > np.iinfo(np.int64).max)[:1].tolist():
                raise refuse(large, f"has {values[large]} in column {name}, expected numbers below 2^63")
            by_place[place] = values.astype(np.int64)
        elif values.dtype == np.float16:
            by_place[place] = values.astype(np.float64)
    weight = {} if columns.weight is None else {"edge_weight": by_place[columns.weight]}
    attributes = [by_place[place] for place in columns.attributes]
    return weight | ({"edge_attr": np.stack(attributes, axis=1)} if attributes else {})


def first_rounded(values: NDArray[Any]) -> int | None:
    """Return the position of the first of some integers that float64 rounds, counted along all axes; else ``None``."""
    values = values.reshape(-1)
    floats = values.astype(np.float64)
    large = np.flatnonzero(np.abs(floats) >= LARGEST_EXACT)
    return next((row for row in large.tolist() if int(floats[row]) != int(values[row])), None)


def rounded_in_column(value: object, name: str) -> str:
    """Tell that a number of a column is lost."""
    expected = "expected numbers up to 2^53, or attributes that are all integers below 2^63"
    return f"has {value} in column {name}, which float64 rounds; {expected}"


def has_pyarrow() -> bool:
    """Tell if pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def require_pyarrow(reason: str) -> None:
    """Raise ``InputError`` with a reason, such as ``edges.csv: names as ids``, if pyarrow is missing."""
    if not has_pyarrow():
        raise needs(f"{reason}:", "pyarrow", "parquet")
