"""Edges from text files, one a line: lists such as SNAP's, tables with names of columns, MatrixMarket, KONECT.

Commas, semicolons, bars, tabs or blanks separate cells. Lines that begin with ``#``, ``%`` or ``//`` are comments;
after the first edge between names, only if a blank follows. A first line that is no edge, or the last comment before,
names the columns (:mod:`pygdist.graph.streams.columns`); all lines have as many. The native parser reads lists of whole
numbers, pyarrow (extra ``parquet``) all else. Files may be compressed.
"""

from __future__ import annotations

import bz2
import contextlib
import ctypes
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph.streams.columns import Wanted
from pygdist.graph.streams.progress import Progress, watched
from pygdist.graph.streams.tables import (
    ANY_ID,
    LARGEST_EXACT,
    EdgeRows,
    EdgeTable,
    Names,
    expected_ids,
    has_pyarrow,
    numbered,
    require_pyarrow,
    rounded_in_column,
    valued,
)
from pygdist.graph.streams.text_layout import (
    TextLayout,
    cells_of,
    is_whole,
    is_word,
    matrix_layout,
    shown,
    text_layout,
)
from pygdist.native import NativeText, Status, require

_BLOCK_BYTES = 1 << 24
_HEAD_BYTES = 1 << 16
_MARK = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which some programs write
_OTHER_COMMENTS = re.compile(rb"^([ \t]*)(?:%|//)", re.MULTILINE)
_LATE_COMMENT = re.compile(rb" #.*$", re.MULTILINE)
_BLANKS = re.compile(rb"[ \t]+")
_OUTER_BLANKS = re.compile(rb"^[ \t]+|[ \t]+$", re.MULTILINE)
_ONLY_BLANKS = re.compile(rb"^[ \t]+$", re.MULTILINE)
_PYTHONS: dict[str, Callable[[IO[bytes]], object]] = {
    ".gz": gzip.open,
    ".bz2": lambda file: io.BufferedReader(_Streams(file, bz2.BZ2Decompressor)),
    ".xz": lambda file: io.BufferedReader(_Streams(file, lzma.LZMADecompressor)),
}
_PYARROWS = {".zst": "zstd", ".lz4": "lz4"}
PACKED = (*_PYTHONS, *_PYARROWS)
"""Suffixes of compressed text."""


def open_text(
    path: Path,
    *,
    wanted: Wanted,
    named: bool | None = None,
    matrix: bool = False,
    block_bytes: int = _BLOCK_BYTES,
    notes: list[str] | None = None,
    progress: Progress | None = None,
) -> EdgeTable | None:
    """Read the first lines of a text file, and find the columns to read.

    Args:
        path: The file.
        wanted: Names of columns from the user.
        named: Ids are names; by default they are if most in the first lines are no numbers.
        matrix: The file is in the format MatrixMarket.
        block_bytes: The text is read in blocks of this size; no line may be longer.
        notes: Notes on the rows are appended while they are read.
        progress: Shows the pass over the rows.

    Returns:
        The table; ``None`` if the file has no lines but comments.

    Raises:
        InputError: If the file cannot be read, or the columns cannot be found.
    """
    layout, before = None, 0
    with contextlib.closing(_heads(path, block_bytes)) as heads:
        for head in heads:
            if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
                raise InputError(f"{path}: holds zero bytes, as text in UTF-16 does; convert it to UTF-8")
            lines = head.decode(errors="replace").replace("\r\n", "\n").split("\n")
            matrix = matrix or lines[0].lower().startswith("%%matrixmarket")
            if matrix and named:
                raise InputError(f"{path}: nodes of a matrix have numbers, not names; leave string_ids and names out")
            if matrix:
                layout = matrix_layout(path, lines, wanted)
            else:
                layout = text_layout(path, lines, wanted, named, before=before)
            if layout is not None:
                break
            before += head.count(b"\n")
    if layout is None:
        return None
    notes = [] if notes is None else notes
    notes += layout.notes
    text = _Text(path, layout, before + layout.first, block_bytes, notes, progress)
    return EdgeTable(
        columns=layout.columns, named=layout.named, read=text.rows, first_id=layout.first_id, mirrored=layout.mirrored,
        num_nodes=layout.num_nodes,
    )  # fmt: skip


@dataclass(frozen=True)
class _Text:
    """A text file of known layout, and the number of its lines before the first edge."""

    path: Path
    layout: TextLayout
    skip: int
    block_bytes: int
    notes: list[str]
    progress: Progress | None

    def rows(self, names: Names | None, ids: range) -> Iterator[EdgeRows]:
        """Read the edges once, some at a time."""
        reason = self.layout.needs_pyarrow
        parse = self._with_pyarrow(reason, names, ids) if reason else self._natively(ids)
        count = line = 0
        block = b"\n"
        for block in _blocks(self.path, self.block_bytes, self.progress):
            start = 0
            for _ in range(min(self.skip - line, block.count(b"\n"))):
                start = block.index(b"\n", start) + 1
            num_lines = block.count(b"\n")
            if line + num_lines >= self.skip and (rows := parse(block[start:], max(line, self.skip))):
                count += rows.ends.shape[1]
                yield rows
            line += num_lines
        self._compare(count)
        last = block[block.rfind(b"\n") + 1 :].decode(errors="replace")
        if count and last.strip() and not self.layout.comment.match(last) and self.path.suffix.lower() not in PACKED:
            raise InputError(  # compressed text that is cut cannot be read
                f"{self.path}: the last line, {shown(last)}, has no end (newline), so its last cell may be cut; if the "
                "file is whole, end the line"
            )

    def _compare(self, count: int) -> None:
        """Compare the number of edges with what the file says."""
        expected, size = self.layout.num_lines, self.layout.size
        if size and int(size) == count - 1:
            self.notes.append(
                f"{self.path}: the first line, which ends with {size}, was read as an edge, but may be a count, as "
                f"{size} edges follow; remove it if so"
            )
        if expected is None or count == expected:
            return
        text = f"{self.path}: holds {count} edges, but its first lines say {expected}"
        if self.layout.exact:
            raise InputError(f"{text}; the file is cut or damaged")
        if count < expected:
            self.notes.append(f"{text}: is the file whole?")

    def _natively(self, ids: range) -> Callable[[bytes, int], EdgeRows]:
        native = require(f"{self.path}: reading text", ", or pass the edges as .npy")
        state = NativeText(max_id=ids.stop - 1 if ids.stop < ANY_ID.stop else ANY_ID.stop)
        edge = np.empty((self.block_bytes // 3 + 1, 2), dtype=np.int64)
        columns = self.layout.columns

        def parse(block: bytes, line: int) -> EdgeRows:
            text = _OTHER_COMMENTS.sub(rb"\1#", block) if b"%" in block or b"//" in block else block
            state.line, state.columns = line, len(columns.names)
            status = native.pygdist_parse_edges(text, len(text), ctypes.byref(state), edge.ctypes.data)
            if status == Status.BAD_LINE and has_pyarrow() and (len(columns.names) > 2 or b'"' in text):
                # other columns may have blanks or quotes, which the native parser does not know
                return self._with_pyarrow("quoted cells", None, ids)(block, line) or EdgeRows(edge[:0].T, {})
            if status == Status.BAD_LINE:
                raise self._no_edge(block, line, state.line - line - 1)
            if status == Status.BAD_ID:
                raise InputError(f"{self.path}: line {state.line} has id {state.id}, {expected_ids(state.id, ids)}")
            chunk = edge[: state.count].T
            return EdgeRows(chunk if columns.ends == (0, 1) else chunk[::-1], {})

        return parse

    def _with_pyarrow(self, reason: str, names: Names | None, ids: range) -> Callable[[bytes, int], EdgeRows | None]:
        require_pyarrow(f"{self.path}: {reason}")
        import pyarrow
        from pyarrow import csv

        columns = self.layout.columns
        places = [str(place) for place in range(len(columns.names))]
        of_ids = pyarrow.int64() if names is None else pyarrow.string()
        kinds = {str(place): of_ids for place in columns.ends} | {str(one): pyarrow.float64() for one in columns.values}
        parsing = csv.ParseOptions(delimiter=self.layout.separator, ignore_empty_lines=True)
        # attributes are integers up to the first block in which one is none
        attempts = [dict.fromkeys(map(str, columns.attributes), pyarrow.int64())] if columns.attributes else []

        def parse(block: bytes, line: int) -> EdgeRows | None:
            text = self._one_blank(block)
            at = _lines_with_text(text)
            if not len(at):
                return None
            reading = csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=places)
            table = None
            while table is None:
                converting = csv.ConvertOptions(
                    column_types=kinds | (attempts[0] if attempts else {}), include_columns=list(kinds),
                    null_values=[""], strings_can_be_null=False, decimal_point=self.layout.decimal,
                )  # fmt: skip
                try:
                    table = csv.read_csv(pyarrow.BufferReader(text), reading, parsing, converting)
                except pyarrow.ArrowInvalid as error:
                    if not attempts:
                        raise self._mistake(text, at, line, str(error)) from error
                    attempts.clear()
            if table.num_rows != len(at) or b"\r" in text:
                raise self._mistake(text, at, line, "a cell holds the end of a line")
            arrays = [table.column(name).combine_chunks() for name in kinds]

            def refuse(row: int, problem: str) -> InputError:
                return InputError(f"{self.path}: line {line + 1 + int(at[row])} {problem}")

            ends, values = numbered(arrays[:2], names, ids, refuse), valued(columns, arrays[2:], refuse)
            self._refuse_rounded(text, at, arrays[2:], refuse)
            return EdgeRows(ends, values)

        return parse

    def _refuse_rounded(
        self, text: bytes, at: NDArray[np.int64], values: Sequence[Any], refuse: Callable[[int, str], InputError]
    ) -> None:
        """Refuse whole numbers that were read as float64, and are others there."""
        columns = self.layout.columns
        for place, array in zip(columns.values, values, strict=True):
            numbers = array.to_numpy(zero_copy_only=False)
            if numbers.dtype.kind != "f":
                continue
            large = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) >= LARGEST_EXACT))
            lines = text.split(b"\n") if len(large) else []
            for row in large.tolist():
                cell = cells_of(lines[int(at[row])].decode(errors="replace"), self.layout.separator)[place]
                if is_whole(cell) and int(cell) != int(numbers[row]):
                    raise refuse(row, rounded_in_column(cell, columns.names[place]))

    def _one_blank(self, block: bytes) -> bytes:
        """Make a block of text one that pyarrow reads, with as many lines."""
        comments = re.compile(b"^" + self.layout.comment.pattern.encode() + b".*$", re.MULTILINE)
        text = comments.sub(b"", block.replace(b"\r\n", b"\n"))
        if self.layout.separator != " ":
            return _ONLY_BLANKS.sub(b"", text)
        text = _BLANKS.sub(b" ", text)
        text = text if self.layout.named else _LATE_COMMENT.sub(b"", text)
        return _OUTER_BLANKS.sub(b"", text)

    def _mistake(self, text: bytes, at: NDArray[np.int64], line: int, problem: str) -> InputError:
        """Return the error of the first line that is wrong, found by reading the lines one by one."""
        columns, lines = self.layout.columns, text.split(b"\n")
        for place in at.tolist():
            where = f"{self.path}: line {line + 1 + place}"
            try:
                cells = cells_of(lines[place].decode(), self.layout.separator)
            except UnicodeDecodeError:
                return InputError(f"{where} is not text in UTF-8; convert the file to UTF-8")
            if len(cells) != len(columns.names) or b"\r" in lines[place] or lines[place].count(b'"') % 2:
                return self._no_edge(text, line, place)
            if not self.layout.named and not all(
                is_whole(cells[end]) and abs(int(cells[end])) < 1 << 63 for end in columns.ends
            ):
                return self._no_edge(text, line, place)
            for value in columns.values:
                try:
                    float(cells[value].replace(self.layout.decimal, "."))
                except ValueError:
                    name = columns.names[value]
                    return InputError(f"{where} has {cells[value]!r} in column {name}, expected a number")
        return InputError(f"{self.path}: could not be read ({problem}, in lines {line + 1} to {line + len(lines)})")

    def _no_edge(self, block: bytes, line: int, place: int) -> InputError:
        """Return the error of a line that is no edge; ``place`` is its number in the block, from 0."""
        lines, columns = block.split(b"\n"), self.layout.columns
        text = lines[place].decode(errors="replace")
        ids = "two ids" if self.layout.named else "two ids (whole numbers)"
        where, count = f"{self.path}: line {line + 1 + place}", len(columns.names)
        message = f"{where} is {shown(text)}, expected {ids} in {count} columns"
        cells = cells_of(text, self.layout.separator)
        if place == len(lines) - 1:
            message += "; this last line has no end (newline): is the file whole?"
        elif len(cells) == count and any(is_word(cells[end]) for end in columns.ends):
            message += "; set string_ids if ids are names"
        return InputError(message)


def _lines_with_text(text: bytes) -> NDArray[np.int64]:
    """Return the numbers of the lines that are not empty, from 0."""
    ends = np.flatnonzero(np.frombuffer(text if text.endswith(b"\n") else text + b"\n", dtype=np.uint8) == ord("\n"))
    return np.flatnonzero(np.diff(ends, prepend=-1) > 1)


def _heads(path: Path, block_bytes: int) -> Generator[bytes, None, None]:
    """Yield the text in pieces of whole lines that are long enough to tell the layout."""
    head = b""
    for block in _blocks(path, block_bytes, None):
        head += block
        if len(head) >= _HEAD_BYTES:
            yield head
            head = b""
    if head:
        yield head


def _blocks(path: Path, block_bytes: int, progress: Progress | None) -> Generator[bytes, None, None]:
    """Yield whole lines, a bounded number of bytes at a time; the last line may have no end."""
    rest, done = b"", 0
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            advance = stack.enter_context(watched(progress, path.stat().st_size, "bytes"))
            file = stack.enter_context(_unpacked(path, raw))
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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{path}: could not be read ({error})") from error


class _Streams(io.RawIOBase):
    """All compressed streams of a file. Python's own readers leave out a damaged one and all after it in silence."""

    def __init__(self, file: IO[bytes], new: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self._file, self._new, self._now = file, new, new()

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, into: Any) -> int:
        data = b""
        while not data:
            block = b""
            if self._now.eof:
                block = self._now.unused_data.lstrip(b"\0")  # zeros fill up .xz
                while not block:
                    if not (more := self._file.read(_HEAD_BYTES)):
                        return 0
                    block = more.lstrip(b"\0")
                self._now = self._new()
            elif self._now.needs_input and not (block := self._file.read(_HEAD_BYTES)):
                raise EOFError("it ends within a compressed stream")
            data = self._now.decompress(block, len(into))
        into[: len(data)] = data
        return len(data)


def _unpacked(path: Path, raw: IO[bytes]) -> IO[bytes]:
    """Return the text of a file that may be compressed."""
    suffix = path.suffix.lower()
    if suffix in _PYTHONS:
        return cast("IO[bytes]", _PYTHONS[suffix](raw))
    if suffix not in _PYARROWS:
        return raw
    require_pyarrow(f"{path}: reading {suffix}")
    import pyarrow

    return cast("IO[bytes]", pyarrow.CompressedInputStream(raw, _PYARROWS[suffix]))
