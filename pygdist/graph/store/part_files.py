"""The files of a store's parts: written part by part, opened with a check that they are what was written.

:mod:`pygdist.graph.store.partitioned` describes the layout and decides when; this module knows the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.store.nodes import NodeParts, Topology
from pygdist.graph.store.replicas import write_in_degrees, write_surroundings
from pygdist.graph.streams.folder import checksum, forget_pages, write_rows
from pygdist.graph.streams.progress import enter_stage, watched
from pygdist.graph.streams.spill import Spill

__all__ = ["open_array", "stored_type", "write_parts"]

_NODE_FIELDS = ("x", "y", *MASKS)


def write_parts(
    graph: WholeGraph,
    part: NDArray[np.int32],
    folder: Path,
    num_parts: int,
    *,
    num_hops: int = 1,
    placement: Literal["nodes", "replicas"] = "nodes",
) -> dict[str, Any]:
    """Write ``part_0``, ``part_1``, ... into a folder, one after the other.

    Args:
        graph: The graph.
        part: Owner of each node, of shape ``(N,)``.
        folder: An empty folder.
        num_parts: Number of parts.
        num_hops: How far halos reach; 1 for the placement *nodes*.
        placement: What the parts hold; see :mod:`pygdist.graph.store.partitioned`.

    Returns:
        The entries of ``meta.json`` that follow from the parts: types, counts, metrics, and each part's counts and
        files.
    """
    parts = NodeParts(part, num_parts)
    places = [folder / f"part_{p}" for p in range(num_parts)]
    described = _write_topologies(graph, parts, places)
    if placement == "replicas":
        _extend(graph, parts, places, described, num_hops)
    fields = _fields(graph)
    for p, (place, one) in enumerate(zip(places, described, strict=True)):
        _write_fields(parts.owned(p), place, one, fields, placement)
    _write_plans(parts, places, described)
    written = {
        "num_edges": sum(one["num_edges"] for one in described),
        "num_hops": num_hops,
        "placement": placement,
        "dtypes": {name: str(stored_type(name, value)) for name, value in fields.items() if name not in MASKS},
        "counts": {name: sum(one["counts"][name] for one in described) for name in MASKS},
        "replication_factor_full": 1 + sum(one["num_halo"] for one in described) / max(len(part), 1),
        "edge_cut": sum(one["num_cut"] for one in described),
        "parts": described,
    }
    if graph.ids is not None:
        written["files"] = {"ids": write_rows(folder / "ids.npy", graph.ids)}
    return written


def open_array(path: Path, expected: Mapping[str, Any], *, verify: bool) -> NDArray[Any]:
    """Map one array copy-on-write, after comparing it with what ``meta.json`` says.

    Args:
        path: The file.
        expected: ``bytes``, ``crc32``, ``dtype`` and ``shape`` as they were when it was written.
        verify: Read the whole file to compare its checksum.

    Raises:
        InputError: If the file is missing or differs.
    """
    again = "; partition the graph again"
    if not path.is_file():
        raise InputError(f"{path}: is missing{again}")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise InputError(f"{path}: is damaged, it has {size} bytes in place of {expected['bytes']}{again}")
    if verify and checksum(path) != expected["crc32"]:
        raise InputError(f"{path}: is damaged, its checksum is not the one in meta.json{again}")
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path}: is damaged ({error}){again}") from error
    if str(array.dtype) != expected["dtype"] or list(array.shape) != expected["shape"]:
        raise InputError(
            f"{path}: holds {array.dtype} of shape {array.shape}, but meta.json says {expected['dtype']} of shape "
            f"{tuple(expected['shape'])}{again}"
        )
    return array


def _write_topologies(graph: WholeGraph, parts: NodeParts, places: Sequence[Path]) -> list[dict[str, Any]]:
    """Write the edges of each part; its entry in ``meta.json`` begins."""
    described = []
    edges = graph.edges
    enter_stage(edges.progress, "sorting edges by part")
    with Spill(places[0].parent / "edges.tmp", edges, parts.owner, parts.num_parts) as spill:
        enter_stage(edges.progress, "writing parts")
        with watched(edges.progress, edges.num_edges) as advance:
            for p, place in enumerate(places):
                place.mkdir()
                one = _write_topology(parts.topology(p, partial(spill.edges_of, p), merge=graph.merge), place)
                described.append(one)
                advance(spill.num_edges_of(p))
    return described


def _write_topology(topology: Topology, place: Path) -> dict[str, Any]:
    num_owned = len(topology.indptr) - 1
    files = {
        name: write_rows(place / f"{name}.npy", getattr(topology, name)) for name in ("n_id", "indptr", "recv_counts")
    }
    for name in ("src", "e_id"):
        files[name] = write_rows(place / f"{name}.npy", getattr(topology, name), topology.order)
    return {
        "num_owned": num_owned,
        "num_halo": len(topology.n_id) - num_owned,
        "halo_per_hop": [len(topology.n_id) - num_owned],
        "num_edges": len(topology.src),
        "num_cut": int(np.count_nonzero(topology.src >= num_owned)),
        "recv_counts": topology.recv_counts.tolist(),
        "files": files,
    }


def _extend(
    graph: WholeGraph, parts: NodeParts, places: Sequence[Path], described: list[dict[str, Any]], num_hops: int
) -> None:
    """Replace the topology of each part by that of replicas; until all are done the others need the first."""
    weight, scratch = graph.fields.get("edge_weight"), places[0].parent / "in_degree.tmp"
    dtype = np.dtype(np.float64) if weight is None else stored_type("edge_weight", weight)
    in_degree = write_in_degrees(parts, places, scratch, weight=weight, dtype=dtype)
    for p, one in enumerate(described):
        one["files"], counts = write_surroundings(parts, p, places, num_hops, in_degree=in_degree, suffix=".extended")
        one["halo_per_hop"] = counts.sum(axis=1).tolist()
    scratch.unlink()
    for place in places:
        for path in place.glob("*.extended"):
            path.rename(path.with_suffix(".npy"))


def _fields(graph: WholeGraph) -> dict[str, NDArray[Any]]:
    """The arrays to cut. Masks that are absent are empty, so that a reader finds all three."""
    empty = {name: np.zeros(graph.edges.num_nodes, dtype=bool) for name in MASKS if name not in graph.fields}
    return {**graph.fields, **empty}


def stored_type(name: str, value: NDArray[Any]) -> np.dtype[Any]:
    """The type that a field has in a store, as :func:`pygdist.graph.prepare` has it; a file may hold other numbers."""
    if name == "edge_type":
        return np.dtype(np.int64)
    floats = name in ("x", "edge_weight", "edge_attr")
    return np.dtype(np.float32) if floats and value.dtype not in (np.float32, np.float64) else value.dtype


def _write_fields(
    owned: NDArray[Any], place: Path, one: dict[str, Any], fields: Mapping[str, NDArray[Any]], placement: str
) -> None:
    """Write what belongs to the nodes and edges of a part. Replicas come with their features."""
    n_id, e_id = (np.load(place / f"{name}.npy", mmap_mode="r") for name in ("n_id", "e_id"))
    rows = {name: n_id if name == "x" and placement == "replicas" else owned for name in _NODE_FIELDS}
    rows |= dict.fromkeys(EDGE_FIELDS, e_id)
    for name in (name for name in rows if name in fields):
        dtype = stored_type(name, fields[name])
        one["files"][name] = write_rows(place / f"{name}.npy", fields[name], rows[name], dtype=dtype)
    one["counts"] = {name: int(np.count_nonzero(fields[name][owned])) for name in MASKS}


def _write_plans(parts: NodeParts, places: Sequence[Path], described: list[dict[str, Any]]) -> None:
    """Write what each part sends: the rows that every other part lists, in the order in which it lists them.

    The lists are read back from disk, so that memory holds one part's plan at a time.
    """
    n_ids = [np.load(place / "n_id.npy", mmap_mode="r") for place in places]
    # (receiver, hop, sender), and where each block begins in the receiver's list
    received = [np.load(place / "recv_counts.npy") for place in places]
    counts = np.stack([one.reshape(-1, parts.num_parts) for one in received])
    flat = counts.reshape(len(places), -1)
    first = np.array([[one["num_owned"]] for one in described]) + np.cumsum(flat, axis=1) - flat
    first = first.reshape(counts.shape)
    for sender, (place, one) in enumerate(zip(places, described, strict=True)):
        wanted = [
            n_id[first[receiver, hop, sender] :][: counts[receiver, hop, sender]]
            for hop in range(counts.shape[1])
            for receiver, n_id in enumerate(n_ids)
        ]
        plan = {
            "send_index": parts.owned_rows(np.concatenate(wanted)),
            "send_counts": np.ascontiguousarray(counts[:, :, sender].T).reshape(received[sender].shape),
        }
        for n_id in n_ids:
            forget_pages(n_id)
        for name, value in plan.items():
            one["files"][name] = write_rows(place / f"{name}.npy", value)
