"""The files of a store's parts: written part by part, and checked against ``meta.json`` when they are opened."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.sources.whole import OF_NODES, WholeGraph
from pygdist.graph.store.columns import COLUMNS
from pygdist.graph.store.nodes import NODES, NodeParts, Placement
from pygdist.graph.store.replicas import REPLICAS
from pygdist.graph.store.vertex_cut import EDGES
from pygdist.graph.streams.arrays import checksum, flush, forget_pages, write_rows
from pygdist.memory.limits import refusal_of

PLACEMENTS = {placement.name: placement for placement in (NODES, REPLICAS, EDGES, COLUMNS)}
"""The contents that parts can have; the first one that reaches far enough is the default."""

_MOST_HOPS = 1000  # no model has so many; each takes a pass over the parts, even when no row is new
_NODE_FIELDS = ("x", "y", *MASKS)


def placement_of(num_hops: int, name: str | None = None) -> Placement:
    """Return the placement of a store's parts; without a name *nodes* for one hop and *replicas* for more.

    Raises:
        InputError: If the name is not known, or the placement does not reach so far.
    """
    if not 1 <= num_hops <= _MOST_HOPS:
        raise InputError(f"num_hops is {num_hops}, expected 1 to {_MOST_HOPS}")
    if name not in (None, *PLACEMENTS):
        raise InputError(f"placement is {name!r}, expected {' or '.join(map(repr, PLACEMENTS))}")
    fitting = [one for one in PLACEMENTS.values() if one.most_hops is None or num_hops <= one.most_hops]
    placement = fitting[0] if name is None else PLACEMENTS[name]
    if placement not in fitting:
        raise InputError(
            f"num_hops is {num_hops}, but placement '{name}' allows num_hops up to {placement.most_hops}; lower it, or "
            f"choose placement {' or '.join(repr(one.name) for one in fitting)}"
        )
    return placement


def write_parts(
    graph: WholeGraph,
    part: NDArray[np.int32],
    folder: Path,
    num_parts: int,
    *,
    num_hops: int,
    placement: Placement,
    edge_part: NDArray[Any] | None = None,
) -> dict[str, Any]:
    """Write ``part_0``, ``part_1``, ... into an empty folder, one after the other.

    ``part`` is the owner of each node, and ``edge_part`` the part of each edge, if the placement splits nodes.

    Returns:
        The entries of ``meta.json`` that follow from the parts: types, counts, metrics, and each part's counts and
        files.
    """
    if graph.merge:  # writes to the values of edges, so these may not be the caller's
        fields = {name: _changeable(name, value, graph.dtypes[name], folder) for name, value in graph.fields.items()}
        graph = dataclasses.replace(graph, fields=fields)
    parts = NodeParts(part, num_parts, edge_part)
    folders = [folder / f"part_{number}" for number in range(num_parts)]
    entries = placement.write(graph, parts, folders, num_hops)
    # masks that are absent are empty, so that a reader finds all three
    fields = {name: np.zeros(graph.edges.num_nodes, dtype=bool) for name in MASKS} | dict(graph.fields)
    for number, (place, entry) in enumerate(zip(folders, entries, strict=True)):
        _write_fields(parts.owned(number), place, entry, fields, graph.dtypes, placement)
    _write_plans(parts, folders, entries)
    meta = {
        "num_edges": sum(entry["num_edges"] for entry in entries),
        "num_hops": num_hops,
        "placement": placement.name,
        "dtypes": {name: str(dtype) for name, dtype in graph.dtypes.items() if name not in MASKS},
        "counts": {name: sum(entry["counts"][name] for entry in entries) for name in MASKS},
        "replication_factor_full": 1 + sum(entry["num_halo"] for entry in entries) / max(len(part), 1),
        "edge_cut": sum(entry["num_cut"] for entry in entries),
        "parts": entries,
    }
    if graph.ids is not None:
        meta["files"] = {"ids": write_rows(folder / "ids.npy", graph.ids)}
    if graph.names is not None:
        ids = folder / "ids.txt"
        shutil.copyfile(graph.names, ids)
        flush(ids)
        meta["files"] = {"ids": {"bytes": ids.stat().st_size, "crc32": checksum(ids)}}
    return meta


def _changeable(name: str, value: NDArray[Any], dtype: np.dtype[Any], folder: Path) -> NDArray[Any]:
    """Return values of edges that may change, in the type of a store: a copy, or a scratch file open for writing."""
    if name not in EDGE_FIELDS:
        return value
    if not isinstance(value, np.memmap) or not value.size:
        return value.astype(dtype)
    if value.dtype == dtype and value.mode == "r+":
        return value
    path = folder / f"{name}.tmp"
    write_rows(path, value, dtype=dtype)
    copy: NDArray[Any] = np.load(path, mmap_mode="r+", allow_pickle=False)
    path.unlink()  # the map stays
    return copy


def open_array(path: Path, expected: Mapping[str, Any], *, verify: bool) -> NDArray[Any]:
    """Map one array copy-on-write, after checking it against ``meta.json``.

    ``expected`` are its ``bytes``, ``crc32``, ``dtype`` and ``shape`` when it was written. ``verify`` reads the whole
    file and compares the checksum.

    Raises:
        InputError: If the file is missing or differs.
    """
    again = _check_bytes(path, expected, verify=verify)
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise refusal_of(error) or InputError(f"{path}: is damaged ({error}){again}") from error
    if str(array.dtype) != expected["dtype"] or list(array.shape) != expected["shape"]:
        raise InputError(
            f"{path}: holds {array.dtype} of shape {array.shape}, but meta.json says {expected['dtype']} of shape "
            f"{tuple(expected['shape'])}{again}"
        )
    return array


def check_ids(folder: Path, meta: Mapping[str, Any]) -> None:
    """Read the file of the nodes' original ids, if the store has one, and check it against ``meta.json``.

    Raises:
        InputError: If the file is missing or differs.
    """
    for name, expected in meta.get("files", {}).items():
        if "dtype" in expected:
            open_array(folder / f"{name}.npy", expected, verify=True)
        else:
            _check_bytes(folder / f"{name}.txt", expected, verify=True)


def _check_bytes(path: Path, expected: Mapping[str, Any], *, verify: bool) -> str:
    """Check the size of a file, and with ``verify`` its checksum; return what an error about the file should advise."""
    again = "; copy the file again if this is a copy, or partition the graph again"
    if not path.is_file():
        raise InputError(f"{path}: is missing{again}")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise InputError(f"{path}: is damaged, it has {size} bytes instead of {expected['bytes']}{again}")
    if verify and checksum(path) != expected["crc32"]:
        raise InputError(f"{path}: is damaged, its checksum differs from the one in meta.json{again}")
    return again


def _write_fields(
    owned: NDArray[Any],
    place: Path,
    entry: dict[str, Any],
    fields: Mapping[str, NDArray[Any]],
    dtypes: Mapping[str, np.dtype[Any]],
    placement: Placement,
) -> None:
    """Write the values of a part's nodes and edges."""
    n_id, e_id = (np.load(place / f"{name}.npy", mmap_mode="r") for name in ("n_id", "e_id"))
    further = [name for name in fields if name.startswith(OF_NODES)]
    rows = dict.fromkeys((*_NODE_FIELDS, *further), owned) | dict.fromkeys(EDGE_FIELDS, e_id)
    if placement.has_surroundings:
        rows["x"] = n_id
    if placement.splits_features:
        del rows["x"]
    for name in (name for name in rows if name in fields):
        path, dtype = place / f"{name}.npy", dtypes.get(name)
        entry["files"][name] = write_rows(path, fields[name], rows[name], dtype=dtype)
    entry["counts"] = {name: int(np.count_nonzero(fields[name][owned])) for name in MASKS}


def _write_plans(parts: NodeParts, places: Sequence[Path], entries: list[dict[str, Any]]) -> None:
    """Write the plan of each part: the rows that every other part lists, in the order in which it lists them.

    The lists are read back from disk, so that memory holds one part's plan at a time.
    """
    n_ids = [np.load(place / "n_id.npy", mmap_mode="r") for place in places]
    # by receiver, hop and sender: the number of rows, and the first of them in the receiver's list
    recv_counts = [np.load(place / "recv_counts.npy") for place in places]
    counts = np.stack([count.reshape(-1, parts.num_parts) for count in recv_counts])
    flat = counts.reshape(len(places), -1)
    first = np.array([[entry["num_owned"]] for entry in entries]) + np.cumsum(flat, axis=1) - flat
    first = first.reshape(counts.shape)
    for sender, (place, entry) in enumerate(zip(places, entries, strict=True)):
        wanted = [
            n_id[first[receiver, hop, sender] :][: counts[receiver, hop, sender]]
            for hop in range(counts.shape[1])
            for receiver, n_id in enumerate(n_ids)
        ]
        plan = {
            "send_index": parts.owned_rows(np.concatenate(wanted)),
            "send_counts": np.ascontiguousarray(counts[:, :, sender].T).reshape(recv_counts[sender].shape),
        }
        for n_id in n_ids:
            forget_pages(n_id)
        for name, value in plan.items():
            entry["files"][name] = write_rows(place / f"{name}.npy", value)
