"""Edges from text files, such as SNAP's: ``.txt``, ``.csv``, ``.tsv``, also compressed with gzip.

Each line is an edge: the ids of source and target, separated by blanks or a comma. ``#`` begins a comment, and empty
lines are skipped. A first line that begins with a letter names the columns. More columns (weights, times) may follow,
the same number in all lines; they are not read.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.streams.progress import Progress, watched
from pygdist.native import NativeText, Status, require

log = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".csv", ".tsv", ".edges", ".el")
_BLOCK_BYTES = 1 << 24
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which some programs write


def read_text(
    path: Path, *, num_nodes: int | None = None, block_bytes: int = _BLOCK_BYTES, progress: Progress | None = None
) -> Iterator[NDArray[np.int64]]:
    """Read a text file once, ``block_bytes`` of text at a time; no line may be longer.

    Yields:
        Chunks of edges, int64 of shape ``(2, k)``, each valid until the next one is read.

    Raises:
        InputError: If a line is not an edge or has not as many columns as the first one, an id is negative or not below
            ``num_nodes``, the file cannot be read, or there is no native library.
    """
    native = require(f"{path}: reading text", ", or pass the edges as .npy")
    state = NativeText(max_id=(1 << 63) - 1 if num_nodes is None else num_nodes - 1, may_have_header=1)
    edge = np.empty((block_bytes // 3 + 1, 2), dtype=np.int64)
    for block in _blocks(path, block_bytes, progress):
        before = state.line
        status = native.pygdist_parse_edges(block, len(block), ctypes.byref(state), edge.ctypes.data)
        if status == Status.BAD_LINE:
            line = _shown(block.split(b"\n")[state.line - before - 1])
            columns = f" in {state.columns} columns" if state.columns else ""
            raise InputError(f"{path}: line {state.line} is {line}, expected two ids (whole numbers){columns}")
        if status == Status.BAD_ID:
            allowed = "ids start at 0" if num_nodes is None else f"but the graph has nodes 0 to {num_nodes - 1}"
            raise InputError(f"{path}: line {state.line} has id {state.id}, {allowed}")
        yield edge[: state.count].T
    if state.header_line:
        log.info("%s: line %d names the columns", path, state.header_line)
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


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
