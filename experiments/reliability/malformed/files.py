"""Files of odd encodings, kinds and names: some are sound and must be taken, the others refused."""

from __future__ import annotations

import gzip
import io
import os
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reliability.malformed.case import EITHER, FIT, PARTITION, REFUSED, STORE, TAKEN, Case, writes

_EDGES = "".join(f"{i} {(i * 7 + 1) % 50}\n" for i in range(50))
_TABLE = "source,target\n" + _EDGES.replace(" ", ",")

#: Text files of edges by name: suffix, content, and how they must end.
TEXTS: dict[str, tuple[str, bytes, str]] = {
    "a byte-order mark": (".txt", b"\xef\xbb\xbf" + _EDGES.encode(), TAKEN),
    "a byte-order mark before a header": (".csv", b"\xef\xbb\xbf" + _TABLE.encode(), TAKEN),
    "UTF-16": (".txt", _EDGES.encode("utf-16"), REFUSED),
    "UTF-32": (".txt", _EDGES.encode("utf-32"), REFUSED),
    "carriage returns and line feeds": (".txt", _EDGES.replace("\n", "\r\n").encode(), TAKEN),
    "carriage returns": (".txt", _EDGES.replace("\n", "\r").encode(), EITHER),
    "a NUL in the middle": (".txt", _EDGES.replace("7 0", "7 \0 0").encode(), REFUSED),
    "a NUL in a number": (".txt", _EDGES.encode() + b"1 1\x000\n", REFUSED),
    "NULs at the end": (".txt", _EDGES.encode() + bytes(4096), REFUSED),
    "the end of file of DOS": (".txt", _EDGES.encode() + b"\x1a", REFUSED),
    "spaces that do not break": (".txt", _EDGES.replace(" ", "\u00a0").encode(), REFUSED),
    "digits of another script": (".txt", _EDGES.encode() + "\u0663 \u0664\n".encode(), REFUSED),
    "underscores": (".txt", _EDGES.encode() + b"1_0 2\n", REFUSED),
    "hexadecimal": (".txt", _EDGES.encode() + b"0x10 2\n", REFUSED),
    "2^63": (".txt", _EDGES.encode() + b"9223372036854775808 2\n", REFUSED),
    "2^64": (".txt", _EDGES.encode() + b"18446744073709551616 2\n", REFUSED),
    "a minus before zero": (".txt", _EDGES.encode() + b"-0 2\n", EITHER),
    "a line of ten million digits": (".txt", _EDGES.encode() + b"1" * 10_000_000 + b" 2\n", REFUSED),
    "a line of a million columns": (".txt", _EDGES.encode() + b"1 " * 1_000_000 + b"\n", REFUSED),
    "an unclosed quote": (".csv", _TABLE.encode() + b'"1,2\n' + b"3,4\n" * 9, REFUSED),
    "a header given twice": (".csv", b"source,target,source\n" + b"1,2,3\n" * 20, REFUSED),
    "a header of bytes": (".csv", b"\xff\xfe,\xfa\n" + b"1,2\n" * 20, REFUSED),
    "binary in .txt": (".txt", bytes(range(256)) * 20, REFUSED),
    "text in .npy": (".npy", _EDGES.encode(), REFUSED),
    "text in .parquet": (".parquet", _EDGES.encode(), REFUSED),
    "text in .gz": (".txt.gz", _EDGES.encode(), REFUSED),
    "text in .zst": (".txt.zst", _EDGES.encode(), REFUSED),
    "text in .xz": (".txt.xz", _EDGES.encode(), REFUSED),
    "text in .bz2": (".txt.bz2", _EDGES.encode(), REFUSED),
    "a cut .gz": (".txt.gz", gzip.compress(_EDGES.encode(), mtime=0)[:-9], REFUSED),
    "a .gz with a wrong checksum": (".txt.gz", gzip.compress(_EDGES.encode(), mtime=0)[:-8] + bytes(8), REFUSED),
    "a .gz with rubbish after its end": (".txt.gz", gzip.compress(_EDGES.encode(), mtime=0) + b"rubbish", EITHER),
    "a .gz of zeros": (".txt.gz", gzip.compress(bytes(100_000_000), mtime=0), REFUSED),
    "a matrix of no size": (".mtx", b"%%MatrixMarket matrix coordinate real general\n", REFUSED),
    "a matrix of negative size": (".mtx", b"%%MatrixMarket matrix coordinate real general\n-5 -5 1\n1 1 1\n", REFUSED),
    "a matrix of huge size": (
        ".mtx",
        b"%%MatrixMarket matrix coordinate pattern general\n99999999999999 99999999999999 1\n1 1\n",
        REFUSED,
    ),
    "a matrix with too few entries": (
        ".mtx",
        b"%%MatrixMarket matrix coordinate pattern general\n5 5 9\n1 1\n",
        REFUSED,
    ),
    "an unknown suffix": (".docx", _EDGES.encode(), REFUSED),
}


#: Tables that ``pygdist report`` reads.
RESULTS = [
    ("a byte-order mark", b"\xef\xbb\xbfx,y\n1,2\n", TAKEN),
    ("UTF-16", "x,y\n1,2\n".encode("utf-16"), REFUSED),
    ("not UTF-8", b"x,y\n1,\xff\n", REFUSED),
    ("a NUL", b"x,y\n1,\0\n", EITHER),
    ("binary", bytes(range(256)) * 20, REFUSED),
    ("a column given twice", b"x,x\n1,2\n", REFUSED),
    ("a row too long", b"x,y\n1,2,3\n", REFUSED),
    ("a cell of 20 MB", b"x,y\n1," + b"2" * 20_000_000 + b"\n", REFUSED),
    ("markup", b"x,y\n<script>alert(1)</script>,2\n", TAKEN),
    ("ten thousand columns", b",".join(b"c%d" % i for i in range(10_000)) + b"\n", EITHER),
]


def _parquet(columns: dict[str, Any]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    names, arrays = zip(*columns.items(), strict=True)
    parquet.write_table(
        pyarrow.table([pyarrow.array(one) for one in arrays], names=[name.strip() for name in names]), file
    )
    return file.getvalue()


_IDS = list(range(20))
#: Columns of Parquet files by name; spaces after the name of a column go.
TABLES: dict[str, dict[str, Any]] = {
    "no rows": {"source": np.zeros(0, np.int64), "target": np.zeros(0, np.int64)},
    "one column": {"source": _IDS},
    "a missing id": {"source": [None, *_IDS], "target": [0, *_IDS]},
    "ids that are fractions": {"source": [0.5] * 20, "target": [1.5] * 20},
    "ids that are lists": {"source": [[1, 2]] * 20, "target": [[3]] * 20},
    "ids that are structures": {"source": [{"a": 1}] * 20, "target": [{"a": 1}] * 20},
    "ids that are bool": {"source": [True] * 20, "target": [False] * 20},
    "ids that are dates": {"source": np.arange(20).astype("datetime64[s]"), "target": _IDS},
    "ids that are null": {"source": [None] * 20, "target": [None] * 20},
    "negative ids": {"source": [-1, *_IDS], "target": [0, *_IDS]},
    "ids above int64": {"source": np.full(20, 2**63 + 5, np.uint64), "target": _IDS},
    "a column given twice": {"source": _IDS, "source ": _IDS, "target": _IDS},
    "weights of text": {"source": _IDS, "target": _IDS, "weight": ["heavy"] * 20},
    "weights that are NaN": {"source": _IDS, "target": _IDS, "weight": [float("nan")] * 20},
}


def _archive(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def _npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), **options)
    return file.getvalue()


_PAIRS = np.stack([np.arange(120), (np.arange(120) * 7 + 1) % 120])
#: Contents of ``edge_index.npy``, and how they must end.
ARRAYS: dict[str, tuple[bytes, str]] = {
    "in the order of Fortran": (_npy(np.asfortranarray(_PAIRS)), TAKEN),
    "big-endian": (_npy(_PAIRS.astype(">i8")), TAKEN),
    "with a header of version 3": (_npy(_PAIRS, version=(3, 0)), TAKEN),
    "with a header of version 9": (_npy(_PAIRS).replace(b"NUMPY\x01", b"NUMPY\x09"), REFUSED),
    "of pickled objects": (_npy(_PAIRS.astype(object), allow_pickle=True), REFUSED),
    "of dates": (_npy(_PAIRS.astype("datetime64[s]")), REFUSED),
    "with rubbish after its end": (_npy(_PAIRS) + b"rubbish", EITHER),
    "cut in its last number": (_npy(_PAIRS)[:-3], REFUSED),
    "of an archive": (_archive({"edge_index.npy": _npy(_PAIRS)}), REFUSED),
    "of an archive that leaves its folder": (_archive({"../../x.npy": _npy(_PAIRS)}), REFUSED),
}


def _named(make: Callable[[Path], Any], name: str) -> Callable[[Path], None]:
    """Replace a file, or a folder, by what ``make`` puts at its path."""

    def prepare(folder: Path) -> None:
        path = folder / name
        if path.is_dir():
            path.rename(folder / "away")
        elif path.exists():
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)

    return prepare


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda path: path.mkdir(),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/null": lambda path: path.symlink_to("/dev/null"),
    "/proc/self/mem": lambda path: path.symlink_to("/proc/self/mem"),
    "an empty file": lambda path: path.touch(),
}
#: Files of the template, or new ones, and the commands that read them.
READ: dict[str, tuple[str, ...]] = {
    "run.yaml": FIT,
    "edges.txt": ("partition", "--input=edges.txt", "--out=out"),
    "edges.csv.gz": ("partition", "--input=edges.csv.gz", "--out=out"),
    "edges.parquet": ("partition", "--input=edges.parquet", "--out=out"),
    "graph": FIT,
    "graph/edge_index.npy": FIT,
    "graph/x.npy": FIT,
    "names.txt": ("partition", "--input=edges.txt", "--names=names.txt", "--out=out"),
    "features.npy": ("partition", "--input=edges.txt", "--features=features.npy", "--out=out"),
    "store": STORE,
    "store/meta.json": STORE,
    "store/part_0/x.npy": STORE,
    "last.ckpt": ("test", "--config=run.yaml", "--ckpt_path=last.ckpt"),
    "results/a.csv": ("report", "results", "--out=page.html"),
    "results/a.yaml": ("report", "results", "--out=page.html"),
    "cache": FIT,
    "out": PARTITION,
}
WRITTEN = ("cache", "out")
#: Kinds that are no mistake at some place.
SOUND = {
    ("cache", "a folder"), ("cache", "a link to nothing"), ("out", "a folder"), ("out", "a link to nothing"),
    ("results/a.csv", "a folder"), ("results/a.yaml", "a folder"), ("results/a.csv", "an empty file"),
    ("results/a.yaml", "an empty file"), ("run.yaml", "an empty file"), ("graph/x.npy", "a folder"),
    ("graph/x.npy", "a link to nothing"), ("results/a.yaml", "/dev/null"), ("results/a.csv", "/dev/null"),
    ("run.yaml", "/dev/null"),
}  # fmt: skip

#: Odd names that are no mistake.
GOOD_NAMES = [
    "gr\u00e4ph",
    "\u56fe",
    "a b",
    "a'b",
    "a;b",
    "a$HOME",
    "a=b",
    "[a]",
    "{a}",
    "100%",
    "a#b",
    "x" * 200,
    "\U0001f600",
]
BAD_NAMES = ["a\nb", "a\tb", "a\x1bb", "a\x00b", "x" * 300, "\udcff", "-graph", "--help", " ", "a/../../../nowhere"]


def _moved(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "graph").rename(folder / name) and None  # type: ignore[func-returns-value]


def file_cases() -> Iterator[Case]:
    """Yield files of odd contents, things that are no files in their place, and odd names."""
    for what, (suffix, content, ends) in TEXTS.items():
        command = ("partition", f"--input=odd{suffix}", "--out=out")
        yield Case("odd text", what, command, (f"odd{suffix}",), writes(f"odd{suffix}", content), ends)
    for what, content, ends in RESULTS:
        command = ("report", "results", "--out=page.html")
        yield Case("odd results", what, command, ("a.csv",), writes("results/a.csv", content), ends)
    for what, columns in TABLES.items():
        command = ("partition", "--input=odd.parquet", "--out=out")
        yield Case("odd Parquet", what, command, ("odd.parquet",), _table(columns))
    for what, (content, ends) in ARRAYS.items():
        yield Case("odd array", what, FIT, ("edge_index",), writes("graph/edge_index.npy", content), ends)
    for name, command in READ.items():
        for what, make in KINDS.items():
            if name in WRITTEN and "/" in what:
                continue
            ends = EITHER if (name, what) in SOUND or name == "results/a.yaml" else REFUSED
            words = (name.rpartition("/")[2], "there is no", "has no", "neither", "Input/output error")
            yield Case("no file", f"{name}: {what}", command, words, _named(make, name), ends)
    for name in GOOD_NAMES:
        yield Case("odd name", name, (*FIT, f"--data.dataset=./{name}"), (), _moved(name), TAKEN)
        yield Case("odd name", f"out: {name}", ("partition", "--dataset=graph", f"--out={name}"), ends=TAKEN)
    for name in BAD_NAMES:
        yield Case("odd name", name, (*FIT, f"--data.dataset={name}"))


def _table(columns: dict[str, Any]) -> Callable[[Path], None]:
    return lambda folder: writes("odd.parquet", _parquet(columns))(folder)
