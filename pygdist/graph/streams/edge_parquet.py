"""Edges from Parquet (extra ``parquet``): the columns that are named as the ends of edges, weights, attributes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pygdist.errors import InputError
from pygdist.graph.streams.columns import Columns, Wanted, choose
from pygdist.graph.streams.progress import Progress, watched
from pygdist.graph.streams.tables import EdgeRows, EdgeTable, Names, numbered, require_pyarrow, valued

_BATCH_EDGES = 1 << 20


def open_parquet(
    path: Path, *, wanted: Wanted, named: bool | None = None, progress: Progress | None = None
) -> EdgeTable:
    """Read the names and types of the columns, and find those to read (:mod:`pygdist.graph.streams.columns`).

    Args:
        path: The file.
        wanted: Names of columns from the user.
        named: Ids are names, also where they are numbers; by default they are names if they are strings.
        progress: Shows the pass over the rows.

    Raises:
        InputError: If pyarrow is not installed, the file cannot be read, no columns are named as ends of edges, or a
            column does not hold what is expected.
    """
    require_pyarrow(f"{path}: reading Parquet")
    import pyarrow
    from pyarrow import parquet

    try:
        schema = parquet.read_schema(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{path}: several columns have the same name")
    if len(schema.names) < 2:
        raise InputError(f"{path}: {len(schema.names)} columns, expected two of ids")
    columns = choose(str(path), schema.names, wanted, named=True)
    if columns is None:
        raise InputError(
            f"{path}: columns {', '.join(schema.names[:6])}: which are the sources and the targets of edges? Say so "
            "with columns source=NAME,target=NAME"
        )
    named = _are_names(path, schema, columns, named)
    for place in columns.values:
        kind = _kind(schema.field(place).type)
        types = pyarrow.types
        if not any(test(kind) for test in (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal)):
            advice = "leave it out with columns weight=" if place == columns.weight else "name others"
            raise InputError(f"{path}: column {schema.names[place]} holds {kind}, expected numbers; {advice}")
    kinds = tuple(str(_kind(schema.field(place).type)) for place in columns.values)
    return EdgeTable(columns=columns, named=named, read=partial(_rows, path, columns, progress), kinds=kinds)


def _kind(kind: Any) -> Any:
    """Return the type of a column's values, which may be in a dictionary."""
    import pyarrow

    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def _are_names(path: Path, schema: Any, columns: Columns, named: bool | None) -> bool:
    """Tell if the ids are names; refuse ends of two kinds, and ids that are neither integers nor strings."""
    import pyarrow

    are = []
    for place in columns.ends:
        kind = _kind(schema.field(place).type)
        is_name = str(kind) in ("string", "large_string", "string_view")
        if not is_name and not pyarrow.types.is_integer(kind):
            raise InputError(f"{path}: column {schema.names[place]} holds {kind}, expected ids: integers or strings")
        are.append(is_name)
    if named is False and any(are):
        name = columns.names[columns.ends[are.index(True)]]
        raise InputError(f"{path}: column {name} holds string, expected whole numbers as ids")
    if are[0] != are[1] and not named:
        kinds = " and ".join(f"column {schema.names[place]} holds {schema.field(place).type}" for place in columns.ends)
        raise InputError(f"{path}: {kinds}, expected ids of one kind; set string_ids to take both as names")
    return bool(named) or are[0]


def _rows(
    path: Path, columns: Columns, progress: Progress | None, names: Names | None, ids: range
) -> Iterator[EdgeRows]:
    import pyarrow
    from pyarrow import parquet

    read = [columns.names[place] for place in (*columns.ends, *columns.values)]
    done = 0

    def refuse(row: int, problem: str) -> InputError:
        return InputError(f"{path}: row {done + row} {problem}")

    try:
        with parquet.ParquetFile(path) as file, watched(progress, file.metadata.num_rows) as advance:
            for batch in file.iter_batches(batch_size=_BATCH_EDGES, columns=read):
                # by name: batches keep the order of the file
                arrays = [batch.column(batch.schema.get_field_index(name)) for name in read]
                ends = [_plain(array, pyarrow.string() if names is not None else None) for array in arrays[:2]]
                values = [_plain(array, None) for array in arrays[2:]]
                yield EdgeRows(numbered(ends, names, ids, refuse), valued(columns, values, refuse))
                done += batch.num_rows
                advance(batch.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _plain(array: Any, kind: Any) -> Any:
    """Return an array in a type of NumPy's, or in the given one."""
    import pyarrow

    kind = kind or _kind(array.type)
    if pyarrow.types.is_decimal(kind):
        kind = pyarrow.int64() if kind.scale == 0 else pyarrow.float64()
    return array.cast(kind)


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: could not be read as Parquet ({error})")
