"""Stores whose ``meta.json`` or arrays were forged, with every checksum right, and files that are damaged."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reliability.malformed.case import FIT, STORE, Case, at, writes

HUGE_NUMBER = 10**30
#: Values that replace an entry of ``meta.json``, whatever it holds.
WRONG: list[Any] = ["text", [1], {"a": 1}, None, -1, 1.5, float("nan"), float("inf"), HUGE_NUMBER, True, "9" * 10_000]
#: Entries on which a run relies.
ENTRIES = (
    "num_parts", "num_nodes", "num_classes", "multi_label", "counts", "counts.train_mask", "dtypes", "placement",
    "num_hops", "parts", "parts.0", "parts.0.files", "parts.0.num_owned", "parts.0.counts", "parts.0.counts.train_mask",
    "parts.0.files.x", "parts.0.files.x.bytes", "parts.0.files.x.crc32", "parts.0.files.x.dtype",
    "parts.0.files.x.shape", "parts.0.files.indptr", "num_edges", "num_features", "preprocessing", "method",
)  # fmt: skip
FITTING = {"preprocessing": [[1], None], "method": ["text"], "num_parts": [True], "multi_label": [True]}
NAMES = ["../x", "/etc/passwd", "..", "", "a/b", "x\0y", "x" * 5000, "unknown", "../../store/part_0/x"]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], *, checksum: bool = True) -> None:
    """Change ``meta.json`` of a store, and make its checksum right."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    changed = change(meta)
    meta = meta if changed is None else changed
    if isinstance(meta, dict) and checksum:
        rest = {name: value for name, value in meta.items() if name != "crc32"}
        meta["crc32"] = f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"
    path.write_text(json.dumps(meta))


def forge(folder: Path, name: str, array: Any, part: int = 0) -> None:
    """Replace an array of a store, with size, type, shape and checksums right."""
    path = folder / f"part_{part}" / f"{name}.npy"
    np.save(path, array)

    def describe(meta: dict[str, Any]) -> None:
        array_ = np.load(path)
        meta["parts"][part]["files"][name] = {
            "bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}",
            "dtype": str(array_.dtype), "shape": list(array_.shape),
        }  # fmt: skip

    rewrite(folder, describe)


def _put(meta: Any, entry: str, value: Any) -> None:
    *path, last = [int(key) if key.isdigit() else key for key in entry.split(".")]
    for key in path:
        meta = meta[key]
    meta[last] = value


def meta_cases() -> Iterator[Case]:
    """Yield stores whose ``meta.json`` is malformed, with its checksum right."""

    def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
        return lambda folder: rewrite(folder / "store", change)

    for entry in ENTRIES:
        for value in WRONG:
            if value in FITTING.get(entry, []) and isinstance(value, bool) in (False, entry == "multi_label"):
                continue
            yield Case(
                "meta.json", f"{entry} = {str(value)[:20]}", STORE, ("meta.json",),
                changed(lambda meta, entry=entry, value=value: _put(meta, entry, value)),
            )  # fmt: skip
    for entry in ENTRIES:

        def remove(meta: dict[str, Any], entry: str = entry) -> None:
            *path, last = [int(key) if key.isdigit() else key for key in entry.split(".")]
            inner: Any = meta
            for key in path:
                inner = inner[key]
            del inner[last]

        yield Case("meta.json", f"{entry} missing", STORE, ("meta.json",), changed(remove))
    for name in NAMES:

        def rename(meta: dict[str, Any], name: str = name) -> None:
            files = meta["parts"][0]["files"]
            files[name] = files["x"]

        yield Case("meta.json", f"array {name[:20]!r}", STORE, ("meta.json",), changed(rename))
    texts = {
        "empty": "", "deep": "[" * 100_000, "deep and closed": "[" * 100_000 + "]" * 100_000, "list": "[]",
        "deep inside": '{"format_version": 3, "a": ' + "[" * 50_000 + "]" * 50_000 + "}", "words": "hello",
        "number": "3",
        "half": '{"format_version": 3, "parts', "huge version": '{"format_version": ' + "9" * 5000 + "}",
        "no checksum": '{"format_version": 3}', "infinite version": '{"format_version": Infinity}',
    }  # fmt: skip
    for name, text in texts.items():
        yield Case(
            "meta.json", name, STORE, ("meta.json",),
            writes("store/meta.json", text.encode()),
        )  # fmt: skip
    for name, text in (("bytes", b"\xff\xfe\x00"), ("an array", b"\x93NUMPY\x01\x00v\x00")):
        yield Case(
            "meta.json", name, STORE, ("meta.json",),
            writes("store/meta.json", text),
        )  # fmt: skip


#: Changes of the arrays of a store: ``NAME`` and what becomes of it.
FORGERIES: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("indptr", "starts at 1", at(0, 1)),
    ("indptr", "starts below 0", at(0, -5)),
    ("indptr", "ends early", at(-1, 3)),
    ("indptr", "ends late", at(-1, 10**6)),
    ("indptr", "ends at the largest number", at(-1, 2**63 - 1)),
    ("indptr", "descends", at(5, 10**9)),
    ("indptr", "descends below 0", at(5, -(10**9))),
    ("indptr", "is empty", lambda array: array[:0]),
    ("indptr", "is short", lambda array: np.concatenate([array[:3], array[-1:]])),
    ("indptr", "is a matrix", lambda array: array.reshape(1, -1)),
    ("indptr", "is int32", lambda array: array.astype(np.int32)),
    ("indptr", "is of floats", lambda array: array.astype(np.float64)),
    ("indptr", "is one number", lambda array: np.array(3)),
    ("src", "has a huge id", at(4, 2**31 - 1)),
    ("src", "has the id after the last", lambda array: at(4, 120)(array)),
    ("src", "has a negative id", at(0, -1)),
    ("src", "has a very negative id", at(0, -(2**31))),
    ("src", "is long", lambda array: np.concatenate([array, array])),
    ("src", "is short", lambda array: array[:5]),
    ("src", "is empty", lambda array: array[:0]),
    ("src", "is of floats", lambda array: array.astype(np.float32)),
    ("src", "is of texts", lambda array: array.astype("U8")),
    ("src", "is big-endian", lambda array: array.astype(">i4")),
    ("src", "is int64 and huge", lambda array: at(0, 2**40)(array.astype(np.int64))),
    ("src", "is a matrix", lambda array: np.stack([array, array])),
    ("e_id", "is short", lambda array: array[:5]),
    ("e_id", "is negative", at(0, -4)),
    ("e_id", "is of floats", lambda array: array.astype(np.float64)),
    ("n_id", "is short", lambda array: array[:5]),
    ("n_id", "is long", lambda array: np.concatenate([array, array])),
    ("n_id", "names no node", at(3, 10**9)),
    ("n_id", "is negative", at(0, -1)),
    ("n_id", "names a node twice", at(3, 2)),
    ("n_id", "descends", lambda array: array[::-1].copy()),
    ("n_id", "is of floats", lambda array: array.astype(np.float64)),
    ("x", "is short", lambda array: array[:5]),
    ("x", "is long", lambda array: np.concatenate([array, array])),
    ("x", "is a vector", lambda array: array[:, 0].copy()),
    ("x", "is of texts", lambda array: array.astype("U8")),
    ("x", "is complex", lambda array: array.astype(np.complex64)),
    ("x", "has no columns", lambda array: array[:, :0]),
    ("x", "has other columns", lambda array: array[:, :3].copy()),
    ("x", "is one number", lambda array: np.array(3.0, dtype=np.float32)),
    ("x", "is of records", lambda array: np.zeros(len(array), dtype=[("a", "f4")])),
    ("y", "has a class too many", at(3, 4)),
    ("y", "has a huge class", at(3, 2**40)),
    ("y", "is below -1", at(3, -2)),
    ("y", "is short", lambda array: array[:5]),
    ("y", "is of floats", lambda array: array.astype(np.float32)),
    ("y", "is a matrix", lambda array: np.stack([array, array], axis=1)),
    ("train_mask", "is short", lambda array: array[:5]),
    ("train_mask", "is of integers", lambda array: array.astype(np.int64) * 7),
    ("val_mask", "is a matrix", lambda array: np.stack([array, array], axis=1)),
    ("send_index", "is long", lambda array: np.arange(7)),
    ("send_counts", "is negative", lambda array: array - 1),
    ("send_counts", "is long", lambda array: np.concatenate([array, array])),
    ("send_counts", "is of floats", lambda array: array.astype(np.float64)),
    ("recv_counts", "is negative", lambda array: array - 1),
    ("recv_counts", "counts rows that are not there", lambda array: array + 5),
    ("recv_counts", "is empty", lambda array: array[:0]),
    ("recv_counts", "is huge", lambda array: array + 2**62),
]


_PART = ("part_0/", "meta.json")  # of arrays that do not fit each other, either may be named


def array_cases() -> Iterator[Case]:
    """Yield stores with forged arrays, both placements, and with files that are cut or changed."""

    def forged(place: str, name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
        def prepare(folder: Path) -> None:
            forge(folder / place, name, change(np.load(folder / place / "part_0" / f"{name}.npy")))

        return prepare

    for name, what, change in FORGERIES:
        arguments = STORE
        yield Case("forged array", f"{name} {what}", arguments, _PART, forged("store", name, change))
    replicas = (*FIT, "--data.store=replicas", "--model.backend=replica")
    for name, what, change in FORGERIES:
        if name != "send_index" and "counts" not in name:
            yield Case("forged replicas", f"{name} {what}", replicas, _PART, forged("replicas", name, change))
    for what, change in (
        ("is short", lambda array: array[:5]),
        ("is narrow", lambda array: array[:, :1].copy()),
        ("is of texts", lambda array: array.astype("U8")),
    ):
        yield Case(
            "forged replicas",
            f"in_degree {what}",
            replicas,
            ("in_degree.npy",),
            forged("replicas", "in_degree", change),
        )
    damages: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda raw: raw[: len(raw) // 2],
        "one byte less": lambda raw: raw[:-1],
        "empty": lambda raw: b"",
        "a byte changed": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        "header only": lambda raw: raw[:128],
        "no header": lambda raw: bytes(len(raw)),
    }
    for name in ("indptr", "src", "x", "y"):
        for what, damage in damages.items():

            def prepare(folder: Path, name: str = name, damage: Callable[[bytes], bytes] = damage) -> None:
                path = folder / "store" / "part_0" / f"{name}.npy"
                path.write_bytes(damage(path.read_bytes()))

            yield Case("damaged array", f"{name} {what}", STORE, (f"{name}.npy",), prepare)
    headers = {
        "objects": b"{'descr': '|O', 'fortran_order': False, 'shape': (120,), }",
        "a huge shape": b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",
        "a negative shape": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        "code": b"{'descr': __import__('os').system('touch OWNED'), 'fortran_order': False, 'shape': (1,), }",
        "deep": b"(" * 5000 + b")" * 5000,
    }
    for what, header in headers.items():

        def write(folder: Path, header: bytes = header) -> None:
            header = header.ljust(((len(header) + 75) // 64) * 64 - 10)
            raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(400)
            (folder / "graph" / "x.npy").write_bytes(raw)

        yield Case("graph folder", f"x.npy of {what}", FIT, ("x.npy",), write)
