"""Edges from files of any type, as binary files: ends, weights and attributes are converted some at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.arrays import ArrayWriter, forget_pages
from pygdist.graph.streams.columns import wanted_columns
from pygdist.graph.streams.edge_file import EdgeFile, EdgeWriter
from pygdist.graph.streams.edge_tables import kind_of, open_tables
from pygdist.graph.streams.progress import Progress, enter_stage
from pygdist.graph.streams.stream import EdgeStream
from pygdist.graph.streams.tables import ANY_ID, EdgeRows, EdgeTable, Names, first_rounded

_BLOCK_ROWS = 1 << 20
_TABLE_OPTIONS = ("columns", "string_ids", "names")  # of EdgeOptions, for text and Parquet


@dataclass(frozen=True, kw_only=True)
class EdgeOptions:
    """Options of how edges are read and changed; :class:`~pygdist.graph.GraphFiles` describes them."""

    columns: str | Mapping[str, str | Sequence[str]] | None = None
    string_ids: bool | None = None
    names: str | Path | None = None
    first_id: int | None = None
    symmetrize: bool = False
    remove_duplicates: bool = False
    remove_self_loops: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadEdges:
    """Edges in binary files.

    Attributes:
        file: Their ends.
        values: Weights and attributes that were read with them or changed with them, by field; mapped, and what is
            written to them reaches the files.
        num_nodes: Number of nodes, if it is known.
        least: The smallest id, if the ids were looked at and nothing says at which they start.
        largest: The largest number of a node with an edge that was removed, if ids were looked at; else -1.
        first: The id of node 0 in the files, 0 or 1.
        names: A text file with the name of each node, a line each, if ids are names.
    """

    file: EdgeFile
    values: Mapping[str, NDArray[Any]]
    num_nodes: int | None
    least: int | None = None
    largest: int = -1
    first: int = 0
    names: Path | None = None


def read_edges(
    paths: Sequence[Path],
    options: EdgeOptions,
    *,
    num_nodes: int | None,
    values: Mapping[str, NDArray[Any]],
    scratch: Path,
    notes: list[str],
    progress: Progress | None,
) -> ReadEdges:
    """Return the edges of some files: a binary file as it is if nothing changes, else a copy in ``scratch``.

    Args:
        paths: The files, in the order in which they are read.
        options: The options.
        num_nodes: Number of nodes, if it is known.
        values: Values of edges that are in files of their own.
        scratch: A folder for the copy.
        notes: Notes are appended.
        progress: Shows the passes over the files.

    Raises:
        InputError: If a file cannot be read, or an option does not fit it.
    """
    if kind_of(paths[0]) != "npy":
        return _from_tables(paths, options, num_nodes, scratch, notes, progress)
    if useless := [name for name in _TABLE_OPTIONS if getattr(options, name)]:
        raise InputError(f"{paths[0]}: {useless[0]} goes with text and Parquet, not with an array; leave it out")
    file, first = EdgeFile(paths[0]), options.first_id or 0
    merged = options.remove_duplicates and values
    if not (options.symmetrize or options.remove_self_loops or first or merged):
        return ReadEdges(file=file, values={}, num_nodes=num_nodes)
    for name, value in values.items():
        if value.shape[:1] != (file.num_edges,):
            raise InputError(
                f"{paths[0].with_name(name)}.npy: shape {value.shape}, expected one entry for each of "
                f"{file.num_edges} edges"
            )
    last = 1 << 63 if num_nodes is None else num_nodes + first
    rows = _rows_of_stream(EdgeStream(file, num_nodes=last, name=str(paths[0]), progress=progress), values, first)
    return _converted(rows, options, scratch, notes, num_nodes=num_nodes, first=first)


def read_names(path: Path) -> Names:
    """Read the names of all nodes from a text file, a line each.

    Raises:
        InputError: If the file cannot be read, or a name is empty or comes twice.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            names = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: could not be read as text in UTF-8 ({error})") from error
    if not names:
        raise InputError(f"{path}: is empty, expected the name of a node in each line")
    if "" in names:
        raise InputError(f"{path}: line {names.index('') + 1} is empty, expected the name of a node")
    try:
        return Names(names)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _from_tables(
    paths: Sequence[Path],
    options: EdgeOptions,
    num_nodes: int | None,
    scratch: Path,
    notes: list[str],
    progress: Progress | None,
) -> ReadEdges:
    """Convert edges from text or Parquet."""
    late_notes: list[str] = []  # on rows, which are read after notes on columns
    named = True if options.names is not None else options.string_ids
    wanted = wanted_columns(options.columns)
    tables = open_tables(paths, wanted=wanted, named=named, notes=late_notes, progress=progress)
    names, first = None, options.first_id or 0
    if tables:
        path, table = tables[0]
        notes += table.columns.notes(str(path))
        names, num_nodes = _names_and_number(path, table, options, num_nodes)
        if table.first_id and options.first_id is None and names is None:
            first = table.first_id
            notes.append(f"{path}: ids start at {first} in this format, so node 0 is id {first}")
        if table.mirrored:
            notes.append(f"{path}: says that edges have no direction, so the reverse of every edge was added")
    edges = _converted(
        _rows_of_tables(tables, names, num_nodes, first, progress), options, scratch, notes, num_nodes=num_nodes,
        names=names, told=first > 0 or names is not None, first=first,
    )  # fmt: skip
    notes += late_notes
    return edges


def _names_and_number(
    path: Path, table: EdgeTable, options: EdgeOptions, num_nodes: int | None
) -> tuple[Names | None, int | None]:
    """Return names of nodes, ``None`` if ids are numbers, and the number of nodes, ``None`` if it is not known yet."""
    if options.names is not None:
        names = read_names(Path(options.names))
        if num_nodes not in (None, len(names)):
            raise InputError(f"{options.names}: {len(names)} names, expected one for each of {num_nodes} nodes")
        return names, len(names)
    if table.named:
        if options.first_id is not None:
            raise InputError(f"{path}: first_id is for ids that are numbers, but these are names; leave it out")
        if num_nodes is not None:
            raise InputError(
                f"{path}: ids are names, so nothing says which row of features or labels is whose; give --names=FILE "
                "(names=...), with a name a line, in the order of the rows"
            )
        return Names(), None
    if table.num_nodes is not None and num_nodes not in (None, table.num_nodes):
        raise InputError(f"{path}: is a matrix of {table.num_nodes} rows, but the graph has {num_nodes} nodes")
    return None, table.num_nodes if num_nodes is None else num_nodes


def _rows_of_tables(
    tables: Sequence[tuple[Path, EdgeTable]],
    names: Names | None,
    num_nodes: int | None,
    first: int,
    progress: Progress | None,
) -> Iterator[EdgeRows]:
    """Yield the rows of all tables, one after the other; nodes are numbered from 0, where ids start at ``first``."""
    for path, table in tables:
        enter_stage(progress, f"reading {path.name}")
        for rows in table.read(names, range(first, ANY_ID.stop if num_nodes is None else first + num_nodes)):
            moved = _from_zero(rows, first, path)
            yield _mirrored(moved, table.mirrored) if table.mirrored else moved


def _rows_of_stream(edges: EdgeStream, values: Mapping[str, NDArray[Any]], first: int) -> Iterator[EdgeRows]:
    start = 0
    for chunk in edges.chunks():
        block = slice(start, start + chunk.shape[1])
        yield _from_zero(EdgeRows(chunk, {name: value[block] for name, value in values.items()}), first, edges.name)
        start = block.stop


def _from_zero(rows: EdgeRows, first: int, where: Path | str) -> EdgeRows:
    """Number nodes from 0, where ids start at ``first``."""
    if not first or not rows.ends.size:
        return rows
    if int(rows.ends.min()) < first:
        raise InputError(f"{where}: holds id {rows.ends.min()}, but ids start at {first}; see first_id")
    return EdgeRows(rows.ends - first, rows.values)


def _widened(written: ArrayWriter, path: Path, dtype: np.dtype[Any]) -> ArrayWriter:
    """Return a writer of another type, which begins with the rows that were written: integers before fractions."""
    with written:
        pass  # completes the file
    rows = np.load(path, mmap_mode="r" if written.count else None, allow_pickle=False)
    path.unlink()  # the map stays
    out = ArrayWriter(path, dtype, row=rows.shape[1:])
    for start in range(0, len(rows), _BLOCK_ROWS):
        out.append(_as(rows[start : start + _BLOCK_ROWS], dtype, path.stem))
        forget_pages(rows)
    return out


def _as(values: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Return values in a type that may be wider; refuse integers that it rounds."""
    if dtype.kind == "f" and values.dtype.kind in "iu" and (first := first_rounded(values)) is not None:
        raise InputError(
            f"{name}: {values.reshape(-1)[first]} stands among fractions, and float64 rounds it; expected "
            "numbers up to 2^53, or columns that are all integers"
        )
    return values.astype(dtype, copy=False)


def _mirrored(rows: EdgeRows, sign: int) -> EdgeRows:
    """Let each edge but self-loops be followed by its reverse, whose weight has the given sign."""
    times = np.where(rows.ends[0] == rows.ends[1], 1, 2)
    edge = np.repeat(np.arange(rows.ends.shape[1]), times)
    second = np.flatnonzero(np.diff(edge, prepend=-1) == 0)
    ends = rows.ends[:, edge]
    ends[:, second] = ends[::-1, second]
    values = {name: value[edge] for name, value in rows.values.items()}
    for name in ("edge_weight", "edge_attr") if sign < 0 else ():
        if name in values:
            values[name][second] *= -1
    return EdgeRows(ends, values)


def _converted(
    rows: Iterable[EdgeRows],
    options: EdgeOptions,
    scratch: Path,
    notes: list[str],
    *,
    num_nodes: int | None,
    names: Names | None = None,
    told: bool = False,
    first: int = 0,
) -> ReadEdges:
    """Write rows to files in ``scratch``; with ``symmetrize`` the reverse of each edge follows it.

    ``told`` says that the smallest id tells nothing.
    """
    loops, least, largest = 0, None, -1
    narrow = num_nodes is not None and num_nodes <= np.iinfo(np.int32).max
    with contextlib.ExitStack() as stack:
        writers: dict[str, ArrayWriter] = {}
        out = stack.enter_context(EdgeWriter(scratch / "edges.npy", np.int32 if narrow else np.int64))
        for ends, values in rows:
            if not ends.size:
                continue
            least = int(ends.min()) if least is None else min(least, int(ends.min()))
            if options.remove_self_loops:
                keep = ends[0] != ends[1]
                loops += int(np.count_nonzero(~keep))
                largest = max(largest, int(ends.max()))
                ends, values = ends[:, keep], {name: value[keep] for name, value in values.items()}
            if options.symmetrize:  # each edge is followed by its reverse, however the file is read
                ends = np.stack([ends, ends[::-1]], axis=2).reshape(2, -1)
                values = {name: np.repeat(value, 2, axis=0) for name, value in values.items()}
            out.append(ends)
            for name, value in values.items():
                path = scratch / f"{name}.npy"
                if name not in writers:
                    writers[name] = stack.enter_context(ArrayWriter(path, value.dtype, row=value.shape[1:]))
                if (dtype := np.result_type(writers[name].dtype, value.dtype)) != writers[name].dtype:
                    writers[name] = stack.enter_context(_widened(writers[name], path, dtype))
                writers[name].append(_as(value, dtype, name))
    if options.remove_self_loops:
        notes.append(f"removed {loops} self-loops")
    names_file = None
    if names is not None:
        num_nodes, names_file = len(names), scratch / "ids.txt"
        with names_file.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{name}\n" for name in names)
    return ReadEdges(
        file=EdgeFile(scratch / "edges.npy"),
        values={name: np.load(scratch / f"{name}.npy", mmap_mode="r+", allow_pickle=False) for name in writers},
        num_nodes=num_nodes,
        least=None if told else least,
        largest=largest,
        first=first,
        names=names_file,
    )
