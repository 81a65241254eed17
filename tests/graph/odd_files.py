"""Files of edges in odd forms, damaged files, and damaged stores, drawn from a seed; each with its edges.

Odd files either give the edges that they hold or are refused in one line that names the file; plain forms must be read,
and files with a fault must be refused.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.graph.odd_graphs import MASKS, Case, homogeneous

Rng = np.random.Generator
Edges = NDArray[np.int64]


@dataclass
class File:
    """A file of edges.

    Attributes:
        path: The file.
        edges: What it holds.
        must: ``right``, ``refused``, or ``either``.
        how: How it was made, for messages of tests.
        num_nodes: The number that the user states.
    """

    path: Path
    edges: Edges
    must: str
    how: str
    num_nodes: int | None = None


def _edges(rng: Rng) -> Edges:
    """At least three edges: arrays of shape ``(2, 2)`` are ambiguous."""
    scale = int(rng.choice([4, 30, 10**6, 2**40]))
    drawn: Edges = rng.integers(0, scale, (2, int(rng.integers(3, 12))))
    return drawn


# --- text -------------------------------------------------------------------------------------------------------------

#: Names of columns: their line, the places of source, target, and a weight, and whether they must be understood.
HEADERS: list[tuple[list[str], bool]] = [
    (["source", "target"], True),
    (["target", "source"], True),
    (["Source", "Target", "Weight"], True),
    (["weight", "source", "target"], True),
    (["src", "dst"], True),
    (["dst_id", "src_id"], True),
    (["FromNodeId", "ToNodeId"], True),
    (["from", "to"], True),
    (["node_1", "node_2"], True),
    (["id", "Source", "Target"], True),
    (["", "source", "target"], True),
    (["head", "relation", "tail"], False),
    (["x", "y"], False),
    (["person", "friend"], False),
    (["a b", "c"], False),
]
_SOURCES = {"source", "src", "fromnodeid", "from", "node_1", "src_id", "head", "x", "person"}
_TARGETS = {"target", "dst", "tonodeid", "to", "node_2", "dst_id", "tail", "y", "friend"}


def text(seed: int, folder: Path) -> File:
    """Draw a file of text."""
    rng = np.random.default_rng(seed)
    edges = _edges(rng)
    sep = str(rng.choice([" ", "\t", ",", ",", ", ", "   ", " \t", ";", "|", " , "]))
    plain = sep in (" ", "\t", ",")
    how = [f"separated by {sep!r}"]
    names, known = HEADERS[int(rng.integers(len(HEADERS)))] if rng.random() < 0.5 and "," in sep else ([], True)
    rows = [[str(one) for one in edge] for edge in edges.T.tolist()]
    if names:
        plain &= known
        how.append(f"columns {names}")
        rows = [_row(names, *edge) for edge in rows]
    elif rng.random() < 0.2:
        how.append("with weights")
        rows = [[*row, "0.5"] for row in rows]
    lines = [sep.join(row) for row in rows]
    if seed % 3 == 0:
        name = str(rng.choice(list(_FAULTS)))
        lines = _FAULTS[name](lines, sep)
        how.append(f"fault: {name}")
    oddities = rng.permutation(list(_ODDITIES))[: int(rng.integers(0, 3))].tolist()
    for name in ["quotes"] if "quotes" in oddities else oddities:  # what others put into quotes is part of a name
        lines, harmless = _ODDITIES[str(name)](lines, rng, sep)
        plain &= harmless
        how.append(str(name))
    if names:
        lines = [sep.join(names), *lines]
    must = "refused" if seed % 3 == 0 else "right" if plain else "either"
    end = str(rng.choice(["\n", "\n", "\r\n", "\r"]))
    if end == "\r" and must == "right":
        must = "either"
    content = (end.join(lines) + end).encode()
    how.append(f"lines end in {end!r}")
    if rng.random() < 0.1:
        content = b"\xef\xbb\xbf" + content
        how.append("byte order mark")
    suffix = str(rng.choice([".txt", ".csv", ".tsv"] if "," not in sep else [".csv", ".txt"]))
    if rng.random() < 0.2:
        suffix, content = f"{suffix}.gz", gzip.compress(content, mtime=0)
    path = folder / f"edges-{seed}{suffix}"
    path.write_bytes(content)
    return File(path, edges, must, ", ".join(how))


def _row(names: list[str], source: str, target: str) -> list[str]:
    lower = [name.lower() for name in names]
    return [
        source if name in _SOURCES or name == "a b" else target if name in _TARGETS or name == "c" else str(7 + number)
        for number, name in enumerate(lower)
    ]


_ODDITIES: dict[str, Callable[[list[str], Rng, str], tuple[list[str], bool]]] = {
    "comments": lambda lines, rng, sep: (["# made by hand", *lines, "# the end"], True),
    "blank lines": lambda lines, rng, sep: ([one for line in lines for one in (line, "", "  ")], True),
    "blanks after": lambda lines, rng, sep: ([f"{line}  " for line in lines], sep == " "),
    "separators after": lambda lines, rng, sep: ([line + sep for line in lines], False),
    "blanks before": lambda lines, rng, sep: ([f"  {line}" for line in lines], sep == " "),
    "quotes": lambda lines, rng, sep: ([sep.join(f'"{one}"' for one in line.split(sep)) for line in lines], False),
    "leading zeros": lambda lines, rng, sep: ([f"00{line.lstrip()}" for line in lines], False),
    "plus signs": lambda lines, rng, sep: ([f"+{line.lstrip()}" for line in lines], False),
    "percent comments": lambda lines, rng, sep: (["% made by hand", *lines], False),
    "comments behind": lambda lines, rng, sep: ([f"{line} # see above" for line in lines], False),
}

_FAULTS: dict[str, Callable[[list[str], str], list[str]]] = {
    "nothing": lambda lines, sep: [],
    "comments alone": lambda lines, sep: ["# none", "# yet"],
    "cut line": lambda lines, sep: [*lines, "3"],
    "cut line between": lambda lines, sep: [lines[0], f"3{sep}", *lines[1:]],
    "negative id": lambda lines, sep: [*lines, sep.join(["-3", *lines[-1].split(sep)[1:]])],
    "id beyond int64": lambda lines, sep: [*lines, sep.join([str(2**63)] * len(lines[-1].split(sep)))],
    "id far beyond int64": lambda lines, sep: [*lines, sep.join(["9" * 40] * len(lines[-1].split(sep)))],
    "fractions": lambda lines, sep: [*lines, sep.join(["1.5"] * len(lines[-1].split(sep)))],
    "missing value": lambda lines, sep: [*lines, sep.join(["nan"] * len(lines[-1].split(sep)))],
    "empty cells": lambda lines, sep: [*lines, sep.join([" "] * len(lines[-1].split(sep))) if "," in sep else "?"],
    "more columns": lambda lines, sep: [*lines, f"{lines[-1]}{sep}8{sep}9"],
    "garbage": lambda lines, sep: [*lines, "\x00\x01\x02"],
    "prose": lambda lines, sep: [*lines, "and so on"],
}  # fmt: skip


# --- binary files -----------------------------------------------------------------------------------------------------


def binary(seed: int, folder: Path) -> File:
    """Draw a ``.npy`` or Parquet file."""
    rng = np.random.default_rng(seed)
    edges = _edges(rng) if seed % 4 else rng.integers(0, 100, (2, 5))
    makers = _ARRAYS if seed % 2 else _TABLES
    name = str(rng.choice(list(makers)))
    suffix = ".npy" if seed % 2 else ".parquet"
    path = folder / f"edges-{seed}{suffix}"
    must = makers[name](path, edges, rng)
    return File(path, edges, must, name)


def _array(make: Callable[[Edges], Any], must: str, **options: Any) -> Callable[..., str]:
    def write(path: Path, edges: Edges, rng: Rng) -> str:
        np.save(path, make(edges), **options)
        return must

    return write


def _bytes(make: Callable[[bytes], bytes]) -> Callable[..., str]:
    """Return a fault of the bytes of a file."""

    def write(path: Path, edges: Edges, rng: Rng) -> str:
        if path.suffix == ".npy":
            np.save(path, edges)
        else:
            _table(path, {"source": edges[0], "target": edges[1]})
        path.write_bytes(make(path.read_bytes()))
        return "refused"

    return write


_ARRAYS: dict[str, Callable[[Path, Edges, Rng], str]] = {
    "rows": _array(lambda edges: edges, "right"),
    "pairs": _array(lambda edges: edges.T.copy(), "right"),
    "columns first": _array(np.asfortranarray, "right"),
    "big endian": _array(lambda edges: edges.astype(">i8"), "right"),
    "unsigned": _array(lambda edges: edges.astype(np.uint64), "right"),
    "flags": _array(lambda edges: edges > 0, "refused"),
    "floats": _array(lambda edges: edges.astype(float), "refused"),
    "three rows": _array(lambda edges: np.zeros((3, 5), dtype=np.int64), "refused"),
    "one dimension": _array(lambda edges: edges.ravel(), "refused"),
    "three dimensions": _array(lambda edges: edges[None], "refused"),
    "negative": _array(lambda edges: edges - edges.max() - 1, "refused"),
    "beyond int64": _array(lambda edges: edges.astype(np.uint64) + np.uint64(2**63), "refused"),
    "objects": _array(lambda edges: edges.astype(object), "refused", allow_pickle=True),
    "text": _array(lambda edges: edges.astype(str), "refused"),
    "no edges": _array(lambda edges: edges[:, :0], "refused"),
    "half": _bytes(lambda content: content[: len(content) - 9]),
    "header alone": _bytes(lambda content: content[:40]),
    "empty": _bytes(lambda content: b""),
    "other magic": _bytes(lambda content: b"X" + content[1:]),
    "other version": _bytes(lambda content: content[:6] + b"\x09" + content[7:]),
    "archive": _bytes(lambda content: b"PK\x03\x04" + content),
    "broken header": _bytes(lambda content: content.replace(b"'shape'", b"'shade'")),
}


def _table(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def _columns(make: Callable[[Edges], dict[str, Any]], must: str) -> Callable[..., str]:
    def write(path: Path, edges: Edges, rng: Rng) -> str:
        _table(path, make(edges))
        return must

    return write


def _beyond(ids: Edges) -> NDArray[np.uint64]:
    beyond: NDArray[np.uint64] = ids.astype(np.uint64) + np.uint64(2**63)
    return beyond


def _with_index(path: Path, edges: Edges, rng: Rng) -> str:
    pandas = __import__("pandas")
    pandas.DataFrame({"target": edges[1], "source": edges[0]}, index=edges[0] + 7).to_parquet(path)
    return "right"


_TABLES: dict[str, Callable[[Path, Edges, Rng], str]] = {
    "two columns": _columns(lambda edges: {"source": edges[0], "target": edges[1]}, "right"),
    "the other way": _columns(lambda edges: {"dst": edges[1], "src": edges[0]}, "right"),
    "weights before": _columns(lambda edges: {"w": edges[0] * 0.5, "from": edges[0], "to": edges[1]}, "right"),
    "ids of edges": _columns(lambda edges: {"edge_id": edges[0] * 0, "src_id": edges[0], "dst_id": edges[1]}, "right"),
    "unsigned": _columns(lambda edges: {"u": edges[0].astype("u8"), "v": edges[1].astype("u8")}, "right"),
    "index of pandas": _with_index,
    "other names": _columns(lambda edges: {"left": edges[0], "right": edges[1]}, "either"),
    "numbers as text": _columns(lambda edges: {"source": edges[0].astype(str), "target": edges[1]}, "either"),
    "floats": _columns(lambda edges: {"source": edges[0] + 0.5, "target": edges[1]}, "refused"),
    "missing": _columns(lambda edges: {"source": [None, *edges[0, 1:].tolist()], "target": edges[1]}, "refused"),
    "one column": _columns(lambda edges: {"source": edges[0]}, "refused"),
    "no rows": _columns(lambda edges: {"source": edges[0, :0], "target": edges[1, :0]}, "refused"),
    "negative": _columns(lambda edges: {"source": -1 - edges[0], "target": edges[1]}, "refused"),
    "beyond int64": _columns(lambda edges: {"source": _beyond(edges[0]), "target": edges[1]}, "refused"),
    "half": _bytes(lambda content: content[: len(content) // 2]),
    "empty": _bytes(lambda content: b""),
    "other magic": _bytes(lambda content: b"X" + content[1:-1] + b"X"),
}  # fmt: skip


def broken(seed: int, folder: Path) -> File:
    """Draw a file of another kind than its name says, or one that ends early."""
    rng = np.random.default_rng(seed)
    edges = _edges(rng)
    lines = "".join(f"{source} {target}\n" for source, target in edges.T.tolist()).encode()
    packed = gzip.compress(lines, mtime=0)
    kind = seed % 10
    names_and_contents: list[tuple[str, bytes, str]] = [
        ("e.txt.gz", lines, "refused"),
        ("e.txt.gz", packed[: len(packed) - 6], "refused"),
        ("e.txt.gz", packed[:4] + bytes(6), "refused"),
        ("e.csv.gz", packed[:-8] + bytes(8), "refused"),
        ("e.txt", packed, "refused"),
        ("e.txt", lines.decode().encode("utf-16"), "either"),
        ("e.bin", lines, "refused"),
        ("e.csv", rng.integers(0, 256, 300, dtype=np.uint8).tobytes(), "refused"),
        ("e.edges", lines, "right"),
        ("e.txt", lines, "right"),
    ]
    name, content, must = names_and_contents[kind]
    path = folder / f"{seed}-{name}"
    path.write_bytes(content)
    num_nodes = None
    if kind == 9:
        num_nodes, must = int(edges.max()), "refused"
    return File(path, edges, must, f"kind {kind}", num_nodes)


# --- stores -----------------------------------------------------------------------------------------------------------


def damage(seed: int, store: Path) -> str:
    """Damage a copy of a store of two parts, and say how; a file that stays as it is does no harm."""
    rng = np.random.default_rng(seed)
    arrays = sorted(store.glob("part_*/*.npy"))
    path = arrays[int(rng.integers(len(arrays)))]
    content, meta = path.read_bytes(), store / "meta.json"
    kind = seed % 12
    if kind == 0:
        path.write_bytes(content[: int(rng.integers(len(content)))])
    elif kind == 1:
        path.unlink()
    elif kind == 2:
        path.write_bytes(_flipped(content, rng))
    elif kind == 3:
        path.write_bytes(content + b"\x00")
    elif kind == 4:
        meta.write_bytes(_flipped(meta.read_bytes(), rng))
        return "a bit of meta.json"
    elif kind == 5:
        meta.write_bytes(meta.read_bytes()[: int(rng.integers(len(meta.read_bytes())))])
        return "half of meta.json"
    elif kind == 6:
        meta.write_text(str(rng.choice(["", "null", "[]", "3", '"text"', "{}", "\x00", '{"format_version": 3}'])))
        return "another meta.json"
    elif kind == 7:
        facts = json.loads(meta.read_text())
        name = str(rng.choice(["num_nodes", "num_parts", "format_version", "placement", "parts", "dtypes"]))
        facts[name] = [None, 7, "text", [], {}][int(rng.integers(5))]
        meta.write_text(json.dumps(facts))
        return f"{name} of meta.json"
    elif kind == 8:
        meta.unlink()
        return "no meta.json"
    elif kind == 9:
        for one in path.parent.iterdir():
            one.unlink()
        path.parent.rmdir()
        return f"no {path.parent.name}"
    elif kind == 10:
        (store / "part_0").rename(store / "other")
        (store / "part_1").rename(store / "part_0")
        (store / "other").rename(store / "part_1")
        return "parts in each other's place"
    else:
        buffer = io.BytesIO()
        np.save(buffer, np.load(path).astype(np.float16))
        path.write_bytes(buffer.getvalue())
    how = {0: "cut", 1: "removed", 2: "a bit of", 3: "longer"}.get(kind, "another type of")
    return f"{how} {path.parent.name}/{path.name}"


def _flipped(content: bytes, rng: Rng) -> bytes:
    at = int(rng.integers(len(content)))
    return content[:at] + bytes([content[at] ^ (1 << int(rng.integers(8)))]) + content[at + 1 :]


# --- folders of arrays ------------------------------------------------------------------------------------------------


def arrays(seed: int, folder: Path) -> Case:
    """Write the fields of a graph as a folder of arrays; one of three has a fault."""
    rng = np.random.default_rng(seed)
    case = homogeneous(3 * seed + 1)
    case.load, case.prepare, case.fault, truth = {}, {}, (), case.truth
    fields = {"edge_index": truth.edges, "x": truth.x, **truth.values, **(truth.masks or {})}
    if truth.y is not None:
        fields["y"] = truth.y
    folder.mkdir()
    for name, value in fields.items():
        swapped = name in ("edge_index", "y", *MASKS)  # others are mapped as they are, so this is refused
        form = str(rng.choice(["plain", "columns first", *["big endian"] * swapped]))
        value = np.asfortranarray(value) if form == "columns first" else value
        np.save(folder / f"{name}.npy", value.astype(value.dtype.newbyteorder(">")) if form == "big endian" else value)
        case.steps.append(f"{name}.npy {value.dtype} {form}")
    if seed % 3 == 0:
        name = str(rng.choice(list(fields)))
        kind = str(
            rng.choice(["cut", "empty", "text", "objects", "other length", "complex", "four dimensions", "too large"])
        )
        path, value = folder / f"{name}.npy", fields[name]
        broken: dict[str, Any] = {
            "text": np.full(value.shape, "a"),
            "objects": np.full(value.shape, None),
            "other length": np.zeros((len(value) + 1, *value.shape[1 + (name == "x") :]), dtype=value.dtype),
            "complex": value.astype(complex),
            "too large": np.full(value.shape, 2**63, dtype=np.uint64) if value.size else np.zeros(3, dtype="U1"),
            # labels of so many dimensions are numbers to predict
            "four dimensions": np.zeros((*value.shape, *[int(name != "y")] * (4 - value.ndim)), dtype=value.dtype),
        }
        if kind in broken:
            np.save(path, broken[kind], allow_pickle=True)
        else:
            path.write_bytes(path.read_bytes()[:50] if kind == "cut" else b"")
        # other fields are compared with the number of nodes that x gives
        case.fault = (f"{name}.npy", name) if name != "x" else ("x.npy", "x", *(f"{one}.npy" for one in fields))
        case.steps.append(f"{name}.npy: {kind}")
    return case
