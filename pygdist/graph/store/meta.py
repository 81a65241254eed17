r"""The partitioned graph on disk: ``meta.json`` and a folder of plain ``.npy`` arrays per part.

``part_0/`` holds the arrays of rank 0, for n owned rows, h halo rows, e edges and P parts:

====================  =====================================================================================
``n_id``              ``(n + h,)`` int64, global ids: owned (ascending), then halo grouped by owner, ascending
``indptr``            ``(n + 1,)`` int64, in-edges of owned rows (CSR over targets)
``src``               ``(e,)`` int32 (int64 if needed), sources as positions in ``n_id``, ordered by ``e_id``
``e_id``              ``(e,)`` int64, position of each edge in the whole graph
``edge_weight``       ``(e,)``, ``edge_attr`` ``(e, D)``, ``edge_type`` ``(e,)`` int64, in the order of ``src``; each
                      absent if the graph has none
``x``                 ``(n, F)`` features of owned rows
``y``                 ``(n,)`` int64, -1 = unlabelled; several labels per node: ``(n, C)`` float32; numbers to predict:
                      ``(n, *targets)`` float32, float64 or int64. Absent if the graph has no labels
``train_mask``        ``(n,)`` bool, and ``val_mask``, ``test_mask``
``node_NAME``         ``(n, ...)`` rows of further tensors of nodes that models take by NAME, such as ``node_pos``
``send_index``        int64, owned rows to send, grouped by receiver, in the order of the receiver's halo
``send_counts``       ``(P,)`` int64, rows sent to each part; own entry 0
``recv_counts``       ``(P,)`` int64, halo rows from each part; own entry 0
====================  =====================================================================================

This is the placement *nodes*.

The placement *replicas*, with which a part trains on its own (CATGNN, Sec. 4.2), reaches
K >= 1 hops. Its arrays begin with those of *nodes*. ``n_id`` continues with the rows of each further hop, grouped by
owner. ``indptr``, ``src``, ``e_id`` and edge values continue with the in-edges of these rows; rows of the last hop have
only the in-edges that begin at rows of fewer hops, and self-loops. ``x`` has all rows. Counts are ``(K, P)``, and
``send_index`` is grouped by hop, then receiver. One more array:

====================  =====================================================================================
``in_degree``         ``(rows, 5)`` float64, over all in-edges of each row in the whole graph: their number, the number
                      of self-loops, the sum of the weights, the sum of the self-loops' weights, and the weight of the
                      last self-loop (by ``e_id``; 0 if there is none). ``(rows, 2)`` without edge weights
====================  =====================================================================================

The placement *edges* (DistGNN, Sec. 5.1) gives each edge to one part, whoever owns its ends. Its arrays are those of
*replicas* with K = 1: ``n_id`` has the owned rows (those of split nodes are roots), then those of other ends of the
part's edges (leaves). ``indptr``, ``src`` and ``e_id`` have the part's edges, in-edges of any row. Four more arrays:

====================  =====================================================================================
``has_in``            ``(h,)`` bool, leaves with an in-edge in this part; ``has_out``: with an out-edge
``send_has_in``       bool, in the order of ``send_index``: the row's leaf at the receiver has an in-edge there;
                      ``send_has_out``: an out-edge
====================  =====================================================================================

The placement *columns* (P3, Sec. 3.1) has the arrays of *nodes* without ``x``, and in its place:

====================  =====================================================================================
``columns``           ``(N, c)`` some columns of the features of all nodes, by global id: part p of P has the columns
                      from ceil(F p / P) to ceil(F (p + 1) / P). float16 stays float16
====================  =====================================================================================

If nodes were renumbered, ``ids.npy`` beside the parts holds the original id of each node, int64 of shape ``(N,)``.
If ids are names, line i + 1 of ``ids.txt`` (UTF-8) is the name of node i.

``meta.json`` holds counts, types, the partitioner and its arguments, notes on preprocessing, size and checksum of every
file, and its own checksum. No pickle is written or read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph.sources.edges import note_on_merged
from pygdist.graph.sources.prepare import fingerprint as content_of
from pygdist.graph.sources.whole import WholeGraph
from pygdist.graph.store.part_files import open_array, placement_of, write_parts
from pygdist.graph.store.shown import StoreMeta
from pygdist.graph.store.structure import check_arrays, check_meta
from pygdist.graph.streams.folder import write_once
from pygdist.memory.machine import peak_rss_bytes

log = logging.getLogger(__name__)

FORMAT_VERSION = 3


def write_store(
    data: Data,
    part: NDArray[Any],
    folder: str | Path,
    *,
    num_parts: int,
    method: str,
    arguments: Mapping[str, Any],
    notes: Sequence[str] = (),
    num_classes: int | None = None,
    fingerprint: str | None = None,
    figures: Mapping[str, Any] | None = None,
    num_hops: int = 1,
    placement: str | None = None,
    edge_part: NDArray[Any] | None = None,
    overwrite: bool = False,
) -> StoreMeta:
    """Cut a graph by the owner of its nodes and write one folder per part.

    Args:
        data: The graph as :func:`pygdist.graph.prepare` returns it; labels and masks may be absent.
        part: Owner of each node; integers of shape ``(N,)`` from 0 to ``num_parts - 1``. Parts may be empty.
        folder: The folder to write.
        num_parts: Number of parts.
        method: Name of the partitioner.
        arguments: Arguments of the partitioner.
        notes: Notes on preprocessing, one sentence each.
        num_classes: Number of classes; by default ``data.num_classes``, or the largest label plus one.
        fingerprint: :func:`pygdist.graph.fingerprint` of ``data`` if it was computed before.
        figures: More entries for ``meta.json``.
        num_hops: Number of hops that halos reach.
        placement: The content of a part; by default *nodes* for one hop and *replicas* for more.
        edge_part: The part of each edge, integers of shape ``(E,)``; for placement *edges*.
        overwrite: Replace any finished store in the folder. By default a finished store that was made from the same
            graph with the same arguments is left as it is, and any other store is refused.

    Returns:
        The content of ``meta.json``.

    Raises:
        InputError: If ``part`` does not fit the graph, ``num_hops`` does not fit ``placement``, the folder holds
            another store and ``overwrite`` is false, or anything that is not a finished store, or it cannot be written.
    """
    placement = placement_of(num_hops, placement).name
    graph = WholeGraph.from_data(data, num_classes=num_classes, notes=notes)
    part = check_part(part, graph.edges.num_nodes, num_parts)
    if edge_part is not None:
        edge_part = check_part(edge_part, graph.edges.num_edges, num_parts)
    digest = hashlib.blake2b(part.data, digest_size=16)
    digest.update(b"" if edge_part is None else edge_part.data)
    wanted = {
        "fingerprint": fingerprint or content_of(data),
        "partition": digest.hexdigest(),
        "num_parts": num_parts,
        "method": method,
        "arguments": arguments,
        "num_classes": graph.num_classes,
        "num_hops": num_hops,
        "placement": placement,
    }

    def build(place: Path) -> dict[str, Any]:
        written = write_graph(
            graph, part, place, num_parts, num_hops=num_hops, placement=placement, edge_part=edge_part
        )
        return written | dict(figures or {})

    return build_store(folder, wanted, build, overwrite=overwrite)


def build_store(
    folder: str | Path,
    wanted: Mapping[str, Any],
    build: Callable[[Path], Mapping[str, Any]],
    *,
    overwrite: bool = False,
) -> StoreMeta:
    """Write a store, unless it exists already, and return the content of its ``meta.json``.

    Args:
        folder: The folder to write.
        wanted: Entries of ``meta.json`` that identify this store: a finished store with other entries is another store.
        build: Called with an empty folder; writes all files but ``meta.json``, and returns the other entries.
        overwrite: Replace any finished store in the folder. By default another store is refused.

    Raises:
        InputError: If the folder holds another store, or anything that is not a finished store, or cannot be written.
    """
    folder = Path(folder)
    wanted = json.loads(_canonical(wanted))

    def write(place: Path) -> dict[str, Any]:
        meta: dict[str, Any] = {**build(place), "format_version": FORMAT_VERSION, **wanted}
        meta["peak_rss_bytes"] = peak_rss_bytes()
        return meta | {"crc32": _checksum(meta)}

    existing = partial(_existing, folder, wanted)
    return StoreMeta(write_once(folder, "meta.json", existing, write, kind="a store of pygdist", overwrite=overwrite))


def write_graph(
    graph: WholeGraph,
    part: NDArray[np.int32],
    place: Path,
    num_parts: int,
    *,
    num_hops: int = 1,
    placement: str | None = None,
    edge_part: NDArray[Any] | None = None,
) -> dict[str, Any]:
    """Write all parts of a graph into an empty folder; return the entries of ``meta.json`` that follow from them.

    Args:
        graph: The graph.
        part: Owner of each node, int32 of shape ``(N,)``.
        place: The empty folder.
        num_parts: Number of parts.
        num_hops: Number of hops that halos reach.
        placement: The content of a part; by default *nodes* for one hop and *replicas* for more.
        edge_part: The part of each edge, ``(E,)``; for placement *edges*.

    Raises:
        InputError: If ``num_hops`` or ``edge_part`` does not fit ``placement``.
    """
    content = placement_of(num_hops, placement)
    if content.splits_nodes != (edge_part is not None):
        problem = "needs the part of each edge" if edge_part is None else "has no use for the parts of edges"
        raise InputError(f"placement '{content.name}' {problem} (edge_part)")
    written = write_parts(graph, part, place, num_parts, num_hops=num_hops, placement=content, edge_part=edge_part)
    notes = list(graph.notes)
    if graph.merge:
        dropped, attributes = graph.edges.num_edges - written["num_edges"], graph.dtypes.get("edge_attr")
        note = note_on_merged(dropped, graph.fields, categories=attributes is not None and attributes.kind != "f")
        notes.append(f"{note}; reverses that gave way are among these" if graph.mirrored else note)
    return {
        "preprocessing": notes,
        "num_parts": num_parts,
        "num_nodes": len(part),
        "num_features": graph.num_features,
        "num_classes": graph.num_classes,
        "multi_label": graph.multi_label,
        **({} if graph.targets is None else {"targets": list(graph.targets)}),
        **({"left_out": list(graph.left_out)} if graph.left_out else {}),
        # a vertex-cut measures its own; for a partition of the nodes it is the full one
        "replication_factor": written["replication_factor_full"],
        **written,
    }


def check_part(part: NDArray[Any], num_nodes: int, num_parts: int, *, of: str = "part") -> NDArray[np.int32]:
    """Check the owners of nodes, and return the owners as int32 of shape ``(N,)``; ``of`` is their name in errors.

    Raises:
        InputError: If ``part`` is not an array of ``num_nodes`` integers from 0 to ``num_parts - 1``.
    """
    part = np.asarray(part)
    if part.shape != (num_nodes,) or part.dtype.kind not in "iu":
        raise InputError(f"{of}: {part.dtype} of shape {part.shape}, expected integers of shape ({num_nodes},)")
    if num_parts < 1 or (num_nodes and not 0 <= int(part.min()) <= int(part.max()) < num_parts):
        raise InputError(f"{of}: values from {part.min()} to {part.max()}, expected parts 0 to {num_parts - 1}")
    return np.ascontiguousarray(part, dtype=np.int32)


def read_meta(folder: str | Path) -> StoreMeta:
    """Read ``meta.json`` of a store.

    Raises:
        InputError: If the folder holds no finished store, or the store has another format version, is corrupted, or has
            an impossible entry (:func:`~pygdist.graph.store.structure.check_meta`).
    """
    path = Path(folder) / "meta.json"
    if not path.parent.is_dir():
        raise InputError(f"{folder}: there is no such folder; write it with: pygdist partition --out {folder} ...")
    if not path.is_file():
        raise InputError(
            f"{folder}: has no meta.json, so it is no partitioned graph, or not a finished one; give a folder that "
            "pygdist partition has written, or partition the graph again"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format_version"]
        checksum = _checksum(meta)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: is corrupted ({repr(error)[:200]}); partition the graph again") from error
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path}: format version {repr(version)[:40]}, but this pygdist reads version {FORMAT_VERSION}; "
            "partition the graph again"
        )
    assert isinstance(meta, dict)
    if meta.get("crc32") != checksum:
        raise InputError(f"{path}: is corrupted (its checksum does not match); partition the graph again")
    check_meta(meta, path)
    return StoreMeta(meta)


def open_part(
    folder: str | Path,
    part: int,
    *,
    num_parts: int | None = None,
    verify: bool = True,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, NDArray[Any]]:
    """Map the arrays of one part; no other part's files are touched.

    Args:
        folder: The store.
        part: Number of the part.
        num_parts: Number of processes of the run: the store must have as many parts.
        verify: Read the files once, compare their checksums, and check their structure
            (:func:`~pygdist.graph.store.structure.check_arrays`). A part that is opened again need not be verified
            again. Sizes, types and shapes are always compared with ``meta.json``.
        meta: The result of :func:`read_meta`, for callers that open many parts.

    Returns:
        The arrays by name (see the page *File formats*), memory-mapped copy-on-write: changes to them reach no other
        process and no file.

    Raises:
        InputError: If the store is missing, has another number of parts or no such part, or a file is missing or
            damaged.
    """
    folder = Path(folder)
    meta = read_meta(folder) if meta is None else meta
    if num_parts is not None and meta["num_parts"] != num_parts:
        raise InputError(
            f"{folder}: has {meta['num_parts']} parts, but the run has {num_parts} rank{'s' * (num_parts != 1)}; "
            f"partition again: pygdist partition --method {meta['method']} --parts {num_parts} --out NEW_FOLDER ..."
        )
    if not 0 <= part < meta["num_parts"]:
        raise InputError(f"{folder}: has no part {part}, only parts 0 to {meta['num_parts'] - 1}")
    place, files = folder / f"part_{part}", meta["parts"][part]["files"]
    if not place.is_dir():
        raise InputError(
            f"{place}: there is no such folder on {socket.gethostname()}; copy it from the machine that wrote the "
            "parts, or partition the graph again"
        )
    arrays = {name: open_array(place / f"{name}.npy", expected, verify=verify) for name, expected in files.items()}
    if verify:
        check_arrays(arrays, meta, part, place)
    return arrays


def store_key(fingerprint: str, arguments: Mapping[str, Any]) -> str:
    """Return the name of a store in a cache, 32 hexadecimal digits: a hash of the graph, the arguments and the format.

    Args:
        fingerprint: :func:`pygdist.graph.fingerprint` of the prepared graph.
        arguments: Everything else that the store depends on: method and its arguments, number of parts, placement.

    Raises:
        InputError: If an argument cannot be expressed in JSON.
    """
    text = f"{FORMAT_VERSION} {fingerprint} {_canonical(arguments)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _checksum(meta: Mapping[str, Any]) -> str:
    """CRC-32 of all entries but the checksum itself."""
    rest = {name: value for name, value in meta.items() if name != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _canonical(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(arguments), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"arguments: {dict(arguments)!r} cannot be written as JSON ({error})") from error


def _existing(folder: Path, wanted: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return ``meta.json`` of a finished store if it is the wanted one; ``None`` if it may be replaced."""
    if overwrite:
        return None
    meta = read_meta(folder)
    if differing := [name for name, value in wanted.items() if meta.get(name) != value]:
        raise InputError(
            f"{folder}: holds another store ({', '.join(differing)} differ); choose another folder, or overwrite it "
            "(--overwrite=true)"
        )
    return meta
