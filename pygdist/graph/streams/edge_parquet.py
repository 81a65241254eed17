"""Edges from Parquet (extra ``parquet``): the columns that are named as the ends of edges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.columns import ends_of
from pygdist.graph.streams.progress import Progress, watched

_BATCH_EDGES = 1 << 20


def read_parquet(
    path: Path, *, num_nodes: int | None = None, progress: Progress | None = None
) -> Iterator[NDArray[np.int64]]:
    """Read the columns of sources and targets, by their names (:mod:`pygdist.graph.streams.columns`), once.

    Yields:
        Chunks of edges, int64 of shape ``(2, k)``.

    Raises:
        InputError: If pyarrow is not installed, the file cannot be read, no columns are named as ends of edges, they do
            not hold integers, or an id is negative or not below ``num_nodes``.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise InputError(f"{path}: reading Parquet needs pyarrow: pip install 'pygdist[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(path, file.schema_arrow)
            done = 0
            with watched(progress, file.metadata.num_rows) as advance:
                for batch in file.iter_batches(batch_size=_BATCH_EDGES, columns=columns):
                    # by name: batches keep the order of the file
                    arrays = [batch.column(batch.schema.get_field_index(name)) for name in columns]
                    if any(array.null_count for array in arrays):
                        raise InputError(f"{path}: column {columns[0]} or {columns[1]} has empty cells")
                    ends = [array.to_numpy(zero_copy_only=False) for array in arrays]
                    last = (1 << 63) - 1 if num_nodes is None else num_nodes - 1
                    wrong = np.flatnonzero((ends[0] < 0) | (ends[1] < 0) | (ends[0] > last) | (ends[1] > last))
                    if len(wrong):
                        edge = tuple(int(end[wrong[0]]) for end in ends)
                        raise InputError(f"{path}: row {done + int(wrong[0])} holds ids {edge}, expected 0 to {last}")
                    yield np.stack([end.astype(np.int64) for end in ends])
                    done += batch.num_rows
                    advance(batch.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: could not be read as Parquet ({error})") from error


def _columns(path: Path, schema: Any) -> list[str]:
    if len(set(schema.names)) < len(schema.names):
        raise InputError(f"{path}: several columns have the same name")
    if len(schema.names) < 2:
        raise InputError(f"{path}: {len(schema.names)} columns, expected two of ids")
    places = ends_of(schema.names)
    if places is None:
        raise InputError(
            f"{path}: columns {', '.join(schema.names[:6])}: which are the sources and the targets of edges? Name "
            "these source and target"
        )
    columns = [schema.names[place] for place in places]
    for name in columns:
        kind = str(schema.field(name).type)
        if not kind.startswith(("int", "uint")):
            raise InputError(f"{path}: column {name} holds {kind}, expected ids as integers")
    return columns
