"""The structure of a store: what ``meta.json`` and the arrays must hold, so that those who use them may trust them.

Checksums tell damage by accident. Whoever writes a file with a right checksum, by a program with a mistake or on
purpose, could make native code read outside of arrays, or ranks wait for rows that never come.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pygdist.comm.slices import columns_of
from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS, MASKS, check_fields
from pygdist.graph.sources.whole import OF_NODES
from pygdist.graph.store.part_files import PLACEMENTS
from pygdist.graph.streams.arrays import forget_pages

Check = Callable[[Any], bool]

_AGAIN = "; partition the graph again"
_SUMS = {"num_nodes": "num_owned", "num_edges": "num_edges"}  # of the parts
_LARGEST = 1 << 62  # sums of a few such numbers fit int64
_LONGEST = 5000  # characters; notes list names
_BLOCK = 1 << 22
_NUMBERS = "bool uint8 int8 int16 int32 int64 float32 float64"
_REQUIRED = ("n_id", "indptr", "src", "e_id", "send_index", "send_counts", "recv_counts", *MASKS)
_READ = ("n_id", "indptr", "src", "e_id", "send_index", "edge_type")  # those of edges
_OPTIONAL = ("x", "columns", "y", *EDGE_FIELDS, "in_degree")
_OF_CLONES = ("has_in", "has_out", "send_has_in", "send_has_out")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _mapping_to(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_masks(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_count(value.get(name)) for name in MASKS)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) < _LONGEST


_META: dict[str, tuple[Check, str]] = {
    "num_parts": (lambda value: _is_count(value) and value > 0, "a number above 0"),
    "num_hops": (lambda value: _is_count(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("num_nodes", "num_edges", "num_features", "num_classes"), (_is_count, "a number from 0")),
    "multi_label": (lambda value: isinstance(value, bool), "true or false"),
    "placement": (lambda value: _is_text(value) and value in PLACEMENTS, " or ".join(PLACEMENTS)),
    "method": (_is_text, "a text"),
    "preprocessing": (_list_of(_is_text), "a list of texts"),
    "dtypes": (_mapping_to(_is_text), "the type of each field"),
    "counts": (_is_masks, "a number for each mask"),
    "parts": (_list_of(lambda value: isinstance(value, dict)), "a list of parts"),
}
_FIGURES = (
    "edge_cut", "replication_factor", "replication_factor_full", "rows_per_hop", "bytes_per_layer", "seconds",
    "edges_per_second", "peak_rss_bytes", "num_clusters", "num_merged_clusters",
)  # fmt: skip
_PART: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("num_owned", "num_halo", "num_edges"), (_is_count, "a number from 0")),
    "counts": (_is_masks, "a number for each mask"),
    "recv_counts": (_is_counts, "a list of numbers"),
    "files": (_mapping_to(lambda value: isinstance(value, dict)), "the size, checksum, type and shape of each array"),
}
_SPLIT: dict[str, tuple[Check, str]] = {
    "num_split": (_is_count, "a number from 0"),
    **dict.fromkeys(("up_counts", "down_counts"), (_is_counts, "a list of numbers")),
}
_TEXT: dict[str, tuple[Check, str]] = {"bytes": (_is_count, "a number from 0"), "crc32": (_is_text, "a text")}
_FILE: dict[str, tuple[Check, str]] = {
    **_TEXT,
    "dtype": (_is_text, "a text"),
    "shape": (_is_counts, "a list of numbers"),
}


def check_meta(meta: Mapping[str, Any], path: Path) -> None:
    """Raise if an entry of ``meta.json`` is missing, of a wrong type, out of range, or does not fit the others.

    Names of arrays are those of the format, so that no file outside of the store is read.

    Raises:
        InputError: Names the file and the entry.
    """
    _check_entries(meta, _META, path, "")
    if "targets" in meta and not (_is_counts(meta["targets"]) and meta["targets"]):
        _refuse(path, "targets", meta["targets"], "a list of sizes")
    if "left_out" in meta and not _list_of(_is_text)(meta["left_out"]):
        _refuse(path, "left_out", meta["left_out"], "a list of names")
    if "files" in meta:
        files = meta["files"]
        if not _mapping_to(lambda one: isinstance(one, dict))(files) or files.keys() != {"ids"}:
            _refuse(path, "files", files, "the size and checksum of the nodes' ids")
        are_names = "dtype" not in files["ids"]
        _check_entries(files["ids"], _TEXT if are_names else _FILE, path, "files.ids.")
        if not are_names and files["ids"]["shape"] != [meta["num_nodes"]]:
            _refuse(path, "files.ids.shape", files["ids"]["shape"], "the number of nodes")
    for name in _FIGURES:
        if name in meta and not _is_number(meta[name]):
            _refuse(path, name, meta[name], "a finite number from 0")
    parts = meta["parts"]
    if len(parts) != meta["num_parts"]:
        raise InputError(f"{path}: parts: {len(parts)} entries, but num_parts is {meta['num_parts']}{_AGAIN}")
    for number, part in enumerate(parts):
        inside = f"parts[{number}]."
        _check_entries(part, _PART, path, inside)
        for name in ("recv_counts", "up_counts", "down_counts"):
            if name in part and (not _is_counts(part[name]) or len(part[name]) != len(parts)):
                raise InputError(f"{path}: {inside}{name}: expected one number for each part{_AGAIN}")
        if "halo_per_hop" in part and not (
            _is_counts(part["halo_per_hop"]) and len(part["halo_per_hop"]) == meta["num_hops"]
        ):
            _refuse(path, f"{inside}halo_per_hop", part["halo_per_hop"], "a number for each hop")
        placement = PLACEMENTS[meta["placement"]]
        if placement.splits_nodes:
            _check_entries(part, _SPLIT, path, inside)
        fields = ("columns" if name == "x" and placement.splits_features else name for name in meta["dtypes"])
        needed = (
            *_REQUIRED,
            *fields,
            *(["in_degree"] if placement.has_surroundings else []),
            *(_OF_CLONES if placement.splits_nodes else []),
        )
        for name in needed:
            if name not in part["files"]:
                raise InputError(f"{path}: {inside}files: '{name}' is missing{_AGAIN}")
        for name, file in part["files"].items():
            further = name in meta["dtypes"] and name.startswith(OF_NODES) and name.isidentifier()
            if not further and name not in (*_REQUIRED, *_OPTIONAL, *_OF_CLONES):
                raise InputError(f"{path}: {inside}files: '{name[:100]}' is no array of a store{_AGAIN}")
            _check_entries(file, _FILE, path, f"{inside}files.{name}.")
    sums = {name: (meta[name], sum(part[key] for part in parts)) for name, key in _SUMS.items()}
    sums |= {f"counts.{name}": (meta["counts"][name], sum(one["counts"][name] for one in parts)) for name in MASKS}
    for name, (stated, summed) in sums.items():
        if stated != summed:
            raise InputError(f"{path}: {name} is {stated}, but the parts have {summed}{_AGAIN}")


def _check_entries(entries: Mapping[str, Any], checks: Mapping[str, tuple[Check, str]], path: Path, where: str) -> None:
    for name, (check, expected) in checks.items():
        if name not in entries:
            raise InputError(f"{path}: '{where}{name}' is missing{_AGAIN}")
        if not check(entries[name]):
            _refuse(path, f"{where}{name}", entries[name], expected)


def _refuse(path: Path, name: str, value: Any, expected: str) -> None:
    shown = "keys and values" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)[:40]
    raise InputError(f"{path}: {name} is {shown}, expected {expected}{_AGAIN}")


def check_arrays(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], part: int, folder: Path) -> None:
    """Raise if the arrays of a part do not fit each other or ``meta.json``, or an index is out of range.

    The arrays of edges and of nodes, but not features, are read once; memory for a block of them is all that it takes.

    Args:
        arrays: The arrays of the part by name.
        meta: ``meta.json``, after :func:`check_meta`.
        part: Number of the part.
        folder: Folder of the part, for messages.

    Raises:
        InputError: Names the file, and says what is wrong.
    """
    # read through other maps, whose pages can be released
    read = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _READ if name in arrays
    }
    for name, problem in _problems({**arrays, **read}, meta, part):
        raise InputError(f"{folder / name}.npy: {problem}{_AGAIN}")
    for array in read.values():
        forget_pages(array)


def check_values(meta: Mapping[str, Any], part: int, folder: Path, *, largest: float = math.inf) -> None:
    """Raise if features, values of edges or labels of a part are not finite, overflow float32, or are no labels.

    Reads all of them in blocks, and releases the memory of each block. The rest of the part is checked already. Values
    beyond ``largest`` are refused as well.

    Raises:
        InputError: Names the file, and the first wrong entry.
    """
    classes = not (meta["multi_label"] or "targets" in meta)  # they belong to the structure
    fields = ("x", "columns", *EDGE_FIELDS, *([] if classes else ["y"]))
    names = [name for name in fields if name in meta["parts"][part]["files"]]
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
    edges = next((len(arrays[name]) for name in EDGE_FIELDS if name in arrays), 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    try:
        check_fields(
            tensors, meta["parts"][part]["num_owned"], edges,
            num_classes=meta["num_classes"] if meta["multi_label"] else None,
            after_block=lambda name: forget_pages(arrays[name]),
        )  # fmt: skip
    except InputError as error:
        name, _, problem = str(error).partition(":")
        raise InputError(f"{folder / name}.npy:{problem}") from error
    for name, array in arrays.items() if largest < math.inf else ():
        step = max(1, _BLOCK // max(1, array[:1].size))
        for start in range(0, len(array), step):
            if (high := np.abs(array[start : start + step]).max(initial=0)) > largest:
                raise InputError(f"{folder / name}.npy: holds {high:g}, which overflows in products; scale the values")
            forget_pages(array)


def _problems(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], part: int) -> Iterator[tuple[str, str]]:
    """Yield names of arrays and what is wrong with them; later checks rely on earlier ones."""
    yield from _wrong_forms(arrays, meta, part)
    num_owned, num_rows = meta["parts"][part]["num_owned"], len(arrays["n_id"])
    for name in ("send_counts", "recv_counts"):
        counts = arrays[name].reshape(-1, meta["num_parts"])
        if counts.size and (counts.min() < 0 or counts.max() >= _LARGEST):
            yield name, "holds a number below 0, or one that is too large"
        if counts[:, part].any():
            yield name, "counts rows that the part exchanges with itself"
    # what each part receives is in meta.json, so the plans of all parts fit each other
    expected = {
        "send_counts": [other["recv_counts"][part] for other in meta["parts"]],
        "recv_counts": meta["parts"][part]["recv_counts"],
    }
    for name, counts in expected.items():
        if arrays[name].reshape(-1, meta["num_parts"])[0].tolist() != counts:
            yield name, "differs from recv_counts of the parts in meta.json"
    received, sent = (sum(arrays[name].ravel().tolist()) for name in ("recv_counts", "send_counts"))
    if received != num_rows - num_owned:
        yield "recv_counts", f"counts {received} rows of other parts, but n_id has {num_rows - num_owned}"
    if sent != len(arrays["send_index"]):
        yield "send_counts", f"counts {sent} rows, but send_index has {len(arrays['send_index'])}"
    ranges = {"n_id": meta["num_nodes"], "src": num_rows, "e_id": _LARGEST, "send_index": num_owned}
    for name, end in {**ranges, "edge_type": _LARGEST}.items():
        if name in arrays and arrays[name].size and (low := arrays[name].min()) < 0:
            yield name, f"holds {low}, expected numbers from 0"
        if name in arrays and arrays[name].size and (high := arrays[name].max()) >= end:
            yield name, f"holds {high}, expected numbers below {end}"
    if (row := _first_descent(arrays["n_id"][:num_owned], strictly=True)) is not None:
        yield "n_id", f"does not ascend at row {row}"
    indptr, num_edges = arrays["indptr"], len(arrays["src"])
    if indptr[0] != 0 or indptr[-1] != num_edges:
        yield "indptr", f"goes from {indptr[0]} to {indptr[-1]}, expected 0 to {num_edges} (the length of src)"
    if (row := _first_descent(indptr)) is not None:
        yield "indptr", f"descends at row {row}"
    yield from _far_sources(arrays, num_owned)
    yield from _wrong_clones(arrays, meta, part)
    yield from _wrong_labels(arrays, meta, part)


def _wrong_forms(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], part: int) -> Iterator[tuple[str, str]]:
    """Yield arrays whose type or shape is not that of the format."""
    around = PLACEMENTS[meta["placement"]].has_surroundings
    num_owned, num_parts = meta["parts"][part]["num_owned"], meta["num_parts"]
    num_rows, num_edges = len(np.atleast_1d(arrays["n_id"])), meta["parts"][part]["num_edges"]
    num_edges = len(np.atleast_1d(arrays["src"])) if around else num_edges  # those of owned rows are counted
    num_targets = num_rows if around else num_owned
    plan = (meta["num_hops"], num_parts) if around else (num_parts,)
    weighted, columns = "edge_weight" in arrays, columns_of(meta["num_features"], part, num_parts)
    width = [meta["num_classes"]] if meta["multi_label"] else meta.get("targets", [])
    floats = "float32 float64" if meta["multi_label"] else "float32 float64 int64"
    forms: dict[str, tuple[str, tuple[int | None, ...]]] = {
        "n_id": ("int64", (None,)),
        "indptr": ("int64", (num_targets + 1,)),
        "src": ("int32 int64", (num_edges,)),
        "e_id": ("int64", (num_edges,)),
        "send_index": ("int64", (None,)),
        "send_counts": ("int64", plan),
        "recv_counts": ("int64", plan),
        "x": (_NUMBERS, (num_targets, meta["num_features"])),
        "columns": (f"float16 {_NUMBERS}", (meta["num_nodes"], columns.stop - columns.start)),
        "y": (floats if width else "int64", (num_owned, *width)),
        **dict.fromkeys(MASKS, ("bool", (num_owned,))),
        "edge_weight": ("float32 float64", (num_edges,)),
        "edge_attr": (_NUMBERS, (num_edges,)),
        "edge_type": ("int64", (num_edges,)),
        "in_degree": ("float64", (num_rows, 5 if weighted else 2)),
        **dict.fromkeys(("has_in", "has_out"), ("bool", (num_rows - num_owned,))),
        **dict.fromkeys(("send_has_in", "send_has_out"), ("bool", (len(np.atleast_1d(arrays["send_index"])),))),
    }
    rows_alone = {"edge_attr", *(name for name in arrays if name.startswith(OF_NODES))}
    for name, array in arrays.items():
        dtypes, shape = forms.get(name, (_NUMBERS, (num_owned,)))
        if str(array.dtype) not in dtypes.split():
            yield name, f"is of type {str(array.dtype)[:60]}, expected {dtypes.replace(' ', ' or ')}"
        sizes = array.shape[:1] if name in rows_alone else array.shape
        if len(sizes) != len(shape) or any(
            wanted not in (None, size) for size, wanted in zip(sizes, shape, strict=True)
        ):
            expected = ", ".join("*" if size is None else str(size) for size in shape)
            yield name, f"has shape {array.shape}, expected ({expected})"


def _far_sources(arrays: Mapping[str, NDArray[Any]], num_owned: int) -> Iterator[tuple[str, str]]:
    """Yield ``src`` if a row within k hops has a source that is further than k + 1 hops away."""
    indptr, src = arrays["indptr"], arrays["src"]
    per_hop = np.atleast_2d(arrays["recv_counts"]).sum(axis=1)
    ends = np.cumsum([num_owned, *per_hop]).tolist()
    begin = 0
    for end, limit in zip(ends, [*ends[1:], ends[-1]], strict=True):
        if end < len(indptr):
            inside = src[indptr[begin] : indptr[end]]
            if inside.size and (high := inside.max()) >= limit:
                yield "src", f"holds {high} at a row below {end}, expected numbers below {limit}"
        begin = end


def _wrong_clones(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], part: int) -> Iterator[tuple[str, str]]:
    """Yield marks of leaves that differ from the counts in ``meta.json``: ranks would wait for rows that never come."""
    if not PLACEMENTS[meta["placement"]].splits_nodes:
        return
    for name, key in (("has_in", "up_counts"), ("has_out", "down_counts")):
        stated = {name: meta["parts"][part][key], f"send_{name}": [other[key][part] for other in meta["parts"]]}
        for array, lengths in ((name, arrays["recv_counts"][0]), (f"send_{name}", arrays["send_counts"][0])):
            if arrays[array].size and arrays[array].view(np.uint8).max() > 1:
                yield array, "holds bytes other than 0 and 1"
            pieces = np.split(arrays[array], np.cumsum(lengths)[:-1])
            if [int(np.count_nonzero(piece)) for piece in pieces] != stated[array]:
                yield array, f"differs from {key} of the parts in meta.json"


def _wrong_labels(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], part: int) -> Iterator[tuple[str, str]]:
    y, num_classes = arrays.get("y"), meta["num_classes"]
    if y is not None and y.ndim == 1 and y.size:
        wrong = [int(label) for label in (y.min(), y.max()) if not -1 <= label < num_classes]
        if wrong and wrong != [-1]:
            yield "y", f"holds {wrong[0]}, expected -1 (unlabelled) to {num_classes - 1}"
    for name in MASKS:
        stated, counted = meta["parts"][part]["counts"][name], int(np.count_nonzero(arrays[name]))
        if counted != stated:
            yield name, f"has {counted} nodes, but meta.json says {stated}"
        if arrays[name].size and arrays[name].view(np.uint8).max() > 1:
            yield name, "holds bytes other than 0 and 1"


def _first_descent(array: NDArray[Any], *, strictly: bool = False) -> int | None:
    """Return the first position whose number is below the one before it, or, ``strictly``, not above it."""
    for start in range(0, len(array), _BLOCK):
        block = array[start : start + _BLOCK + 1]
        wrong = np.flatnonzero(block[1:] <= block[:-1] if strictly else block[1:] < block[:-1])
        if len(wrong):
            return start + int(wrong[0]) + 1
    return None
