"""The files of a store's parts: written part by part, opened with a check that they are what was written.

:mod:`pygdist.graph.store` describes the layout and decides when; this module knows the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS, MASKS
from pygdist.graph.folder import checksum, write_rows
from pygdist.graph.node_parts import NodeParts

__all__ = ["open_array", "write_parts"]

_NODE_FIELDS = ("x", "y", *MASKS)


def write_parts(data: Data, part: NDArray[np.int32], folder: Path, num_parts: int) -> dict[str, Any]:
    """Write ``part_0``, ``part_1``, ... into a folder.

    Args:
        data: The graph.
        part: Owner of each node, of shape ``(N,)``.
        folder: An empty folder.
        num_parts: Number of parts.

    Returns:
        The entries of ``meta.json`` that follow from the parts: types, counts, metrics, and each part's counts and
        files.
    """
    assert data.edge_index is not None
    parts = NodeParts(data.edge_index.numpy(), part, num_parts)
    fields = _fields(data, len(part))
    described = [_write_part(parts, p, folder / f"part_{p}", fields) for p in range(num_parts)]
    _write_plans(parts, folder, described)
    return {
        "dtypes": {name: str(value.dtype) for name, value in fields.items() if name not in MASKS},
        "counts": {name: int(fields[name].sum()) for name in MASKS},
        "replication_factor_full": 1 + sum(one["num_halo"] for one in described) / max(len(part), 1),
        "edge_cut": sum(one["num_cut"] for one in described),
        "parts": described,
    }


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


def _fields(data: Data, num_nodes: int) -> dict[str, NDArray[Any]]:
    """The arrays to cut. Masks that are absent are empty, so that a reader finds all three."""
    fields = {}
    for name in (*_NODE_FIELDS, *EDGE_FIELDS):
        value = data.get(name)
        if isinstance(value, Tensor):
            fields[name] = value.numpy()
        elif name in MASKS:
            fields[name] = np.zeros(num_nodes, dtype=bool)
    return fields


def _write_part(parts: NodeParts, part: int, folder: Path, fields: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Write all but the sending half of the plan, which needs the halos of the other parts."""
    folder.mkdir()
    owned, topology = parts.owned(part), parts.topology(part)
    files = {name: write_rows(folder / f"{name}.npy", value) for name, value in vars(topology).items()}
    for name in _NODE_FIELDS:
        if name in fields:
            files[name] = write_rows(folder / f"{name}.npy", fields[name], owned)
    for name in EDGE_FIELDS:
        if name in fields:
            files[name] = write_rows(folder / f"{name}.npy", fields[name], topology.e_id)
    return {
        "num_owned": len(owned),
        "num_halo": len(topology.n_id) - len(owned),
        "num_edges": len(topology.src),
        "num_cut": int(np.count_nonzero(topology.src >= len(owned))),
        "counts": {name: int(np.count_nonzero(fields[name][owned])) for name in MASKS},
        "recv_counts": topology.recv_counts.tolist(),
        "files": files,
    }


def _write_plans(parts: NodeParts, folder: Path, described: list[dict[str, Any]]) -> None:
    """Write what each part sends: the rows that every other part lists, in the order in which it lists them.

    The lists are read back from disk, so that memory holds one part's plan at a time.
    """
    n_ids = [np.load(folder / f"part_{p}" / "n_id.npy", mmap_mode="r") for p in range(parts.num_parts)]
    recv_counts = np.array([one["recv_counts"] for one in described], dtype=np.int64)  # (receiver, sender)
    first = np.array([[one["num_owned"]] for one in described]) + np.cumsum(recv_counts, axis=1) - recv_counts
    for sender, one in enumerate(described):
        wanted = [
            n_id[first[receiver, sender] : first[receiver, sender] + recv_counts[receiver, sender]]
            for receiver, n_id in enumerate(n_ids)
        ]
        plan = {
            "send_index": parts.owned_rows(np.concatenate(wanted)),
            "send_counts": recv_counts[:, sender].copy(),
        }
        for name, value in plan.items():
            one["files"][name] = write_rows(folder / f"part_{sender}" / f"{name}.npy", value)
