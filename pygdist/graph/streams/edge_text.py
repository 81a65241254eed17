"""Edges from text files, such as SNAP's: ``.txt``, ``.csv``, ``.tsv``, also compressed with gzip.

Each line is an edge: the ids of source and target, separated by blanks or a comma. ``#`` begins a comment, and empty
lines are skipped. A first line that is no edge names the columns, and these names say which are sources and targets
(:mod:`pygdist.graph.streams.columns`). Other columns (weights, times) are not read; all lines have as many columns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.columns import ends_of
from pygdist.graph.streams.progress import Progress, watched
from pygdist.native import NativeText, Status, require

log = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".csv", ".tsv", ".edges", ".el")
_BLOCK_BYTES = 1 << 24
_NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?|")
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which some programs write


def read_text(
    path: Path, *, num_nodes: int | None = None, block_bytes: int = _BLOCK_BYTES, progress: Progress | None = None
) -> Iterator[NDArray[np.int64]]:
    """Read a text file once, ``block_bytes`` of text at a time; no line may be longer.

    Yields:
        Chunks of edges, int64 of shape ``(2, k)``, each valid until the next one is read.

    Raises:
        InputError: If a line is not an edge or has not as many columns as the first one, names of columns tell no ends,
            an id is negative or not below ``num_nodes``, the file cannot be read, or there is no native library.
    """
    native = require(f"{path}: reading text", ", or pass the edges as .npy")
    state = NativeText(max_id=(1 << 63) - 1 if num_nodes is None else num_nodes - 1)
    edge = np.empty((block_bytes // 3 + 1, 2), dtype=np.int64)
    places: tuple[int, int] | None = None
    num_columns = 0  # of the line that names them
    for whole in _blocks(path, block_bytes, progress):
        block = whole
        if places is None:
            block, places, num_columns = _without_names(path, whole)
        if places not in (None, (0, 1), (1, 0)):
            block = _of_columns(block, places, num_columns)
        before = state.line
        status = native.pygdist_parse_edges(block, len(block), ctypes.byref(state), edge.ctypes.data)
        if status == Status.BAD_LINE:
            line = _shown(whole.split(b"\n")[state.line - before - 1])
            columns = f" in {state.columns} columns" if state.columns else ""
            raise InputError(f"{path}: line {state.line} is {line}, expected two ids (whole numbers){columns}")
        if status == Status.BAD_ID:
            allowed = "ids start at 0" if num_nodes is None else f"but the graph has nodes 0 to {num_nodes - 1}"
            raise InputError(f"{path}: line {state.line} has id {state.id}, {allowed}")
        chunk = edge[: state.count].T
        yield chunk[::-1] if places == (1, 0) else chunk
    if state.columns > 2:
        log.info("%s: the first 2 of %d columns are read as edges, the others are ignored", path, state.columns)


def _blocks(path: Path, block_bytes: int, progress: Progress | None) -> Iterator[bytes]:
    """Yield whole lines, a bounded number of bytes at a time."""
    rest, done = b"", 0
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            advance = stack.enter_context(watched(progress, path.stat().st_size, "bytes"))
            file = cast("IO[bytes]", stack.enter_context(gzip.open(raw)) if path.suffix.lower() == ".gz" else raw)
            while block := file.read(block_bytes - len(rest)):
                text = rest + block
                if done == 0:
                    text = text.removeprefix(_MARK)
                end = text.rfind(b"\n") + 1
                if end == 0 and len(text) >= block_bytes:
                    raise InputError(
                        f"{path}: a line is longer than {block_bytes} bytes, so this is not a list of edges"
                    )
                rest = text[end:]
                if end:
                    yield text[:end]
                advance(raw.tell() - done)
                done = raw.tell()
            if rest:
                yield rest
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: could not be read ({error})") from error


def _without_names(path: Path, block: bytes) -> tuple[bytes, tuple[int, int] | None, int]:
    """Make a comment of a first line that names the columns, and return the places of sources and targets.

    Returns:
        The block, the places (the first two columns if no line names any; ``None`` if all lines are comments), and the
        number of columns that are named.
    """
    start = 0
    while start < len(block):
        end = block.find(b"\n", start)
        line = block[start : end if end >= 0 else len(block)]
        if line.strip() and not line.lstrip().startswith(b"#"):
            names = _columns(line.partition(b"#")[0].decode(errors="replace"))
            if all(_NUMBER.fullmatch(name) for name in names) or len(names) < 2:
                return block, (0, 1), 0
            places = ends_of(names)
            if places is None:
                raise InputError(
                    f"{path}: the first line {_shown(line)} names columns: which are the sources and the targets of "
                    "edges? Name these source and target, or remove the line"
                )
            log.info("%s: edges go from column %s to column %s", path, names[places[0]], names[places[1]])
            return block[:start] + b"#" + block[start + 1 :], places, len(names)
        start = end + 1 if end >= 0 else len(block)
    return block, None, 0


def _columns(line: str) -> list[str]:
    columns = line.split(",") if "," in line else line.split()
    return [one.strip().strip("\"'") for one in columns]


def _of_columns(block: bytes, places: tuple[int, int], num_columns: int) -> bytes:
    """Cut each line to two of its columns; a line with another number of columns becomes one that is no edge."""
    source, target = places
    lines = block.split(b"\n")
    for number, line in enumerate(lines):
        text = line.partition(b"#")[0]
        if text.strip():
            columns = text.split(b",") if b"," in text else text.split()
            whole = len(columns) == num_columns
            lines[number] = columns[source] + b" " + columns[target] if whole else b"?"
    return b"\n".join(lines)


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
