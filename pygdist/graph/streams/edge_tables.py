"""The files that hold the edges of a graph: one, those of a folder, or those that match a pattern; opened by type."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from pygdist.errors import InputError
from pygdist.graph.streams.columns import Wanted
from pygdist.graph.streams.edge_parquet import open_parquet
from pygdist.graph.streams.edge_text import PACKED, open_text
from pygdist.graph.streams.progress import Progress
from pygdist.graph.streams.tables import EdgeTable

_TEXT = (".txt", ".csv", ".tsv", ".tab", ".dat", ".edges", ".edgelist", ".el")
_PARQUET = (".parquet", ".pq")
_NO_DATA = (".", "_")  # of names of files that Spark and file systems put beside the data


def edge_paths(edges: Path) -> list[Path]:
    """Return the files of edges: the one, those in a folder and its folders, or those that match, ordered by path.

    Raises:
        InputError: If there is none.
    """
    if edges.is_dir():
        inside = [path for path in edges.rglob("*") if path.is_file()]
        paths = sorted(p for p in inside if not any(part.startswith(_NO_DATA) for part in p.relative_to(edges).parts))
    elif edges.is_file() or not glob.has_magic(str(edges)):
        paths = [edges]
    else:
        paths = sorted(path for one in glob.glob(str(edges), recursive=True) if (path := Path(one)).is_file())
    if not paths:
        raise InputError(f"{edges}: {'holds no file' if edges.is_dir() else 'no file matches'}")
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        if not os.access(path, os.R_OK):
            raise InputError(f"{path}: cannot be read; its permissions forbid it")
        if len(paths) > 1 and kind_of(path) == "npy":
            raise InputError(f"{path}: one of several files, which may be text or Parquet; pass one .npy file alone")
    return paths


def kind_of(path: Path) -> str:
    """Return the type of a file of edges by its name: ``npy``, ``parquet``, ``matrix`` or ``text``.

    Raises:
        InputError: If the name tells no type.
    """
    packed = path.suffix.lower() in PACKED
    name = path.stem if packed else path.name
    suffix = Path(name).suffix.lower()
    if suffix == ".npy" and not packed:
        return "npy"
    if suffix in _PARQUET and not packed:
        return "parquet"
    if suffix == ".mtx":
        return "matrix"
    if suffix in (*_TEXT, "") or name.startswith("out."):  # as KONECT names its files
        return "text"
    suffixes = ", ".join((".npy", ".parquet", ".mtx", *_TEXT))
    raise InputError(f"{path}: unknown type of file; expected {suffixes}, or text with {', '.join(PACKED)}")


def open_tables(
    paths: Sequence[Path], *, wanted: Wanted, named: bool | None, notes: list[str], progress: Progress | None
) -> list[tuple[Path, EdgeTable]]:
    """Read the first lines of all files, and find the columns to read; files without any line are left out.

    Raises:
        InputError: If a file cannot be read, its columns cannot be found, or they are not those of the first file.
    """
    tables: list[tuple[Path, EdgeTable]] = []
    for path in paths:
        kind = kind_of(path)
        table: EdgeTable | None
        if kind == "parquet":
            table = open_parquet(path, wanted=wanted, named=named, progress=progress)
        else:
            matrix = kind == "matrix"
            table = open_text(path, wanted=wanted, named=named, matrix=matrix, notes=notes, progress=progress)
        if table is None:
            continue
        if tables:
            _compare(*tables[0], path, table)
        else:
            named = table.named  # of later files likewise
        tables.append((path, table))
    return tables


def _compare(first: Path, wanted: EdgeTable, path: Path, table: EdgeTable) -> None:
    """Refuse a file whose columns are not those of the first."""
    if table.columns != wanted.columns:
        columns, others = (", ".join(one.columns.names) for one in (table, wanted))
        raise InputError(f"{path}: its columns are {columns}, but those of {first} are {others}; expected the same")
    for place, kind, other in zip(table.columns.values, table.kinds, wanted.kinds, strict=False):
        if kind != other:
            name = table.columns.names[place]
            raise InputError(
                f"{path}: column {name} holds {kind}, but in {first} it holds {other}; convert one of them"
            )
    if (table.named, table.num_nodes, table.first_id) != (wanted.named, wanted.num_nodes, wanted.first_id):
        raise InputError(f"{path}: its ids are not of the kind of those of {first}; convert one of the files")
