"""What may be done to the edges before partitioning: self-loops, reverse edges, duplicates.

Each function works on the fields of a graph in place and keeps ``edge_weight``, ``edge_attr`` and ``edge_type`` aligned
with ``edge_index``. Edges stay in the order they came in, and a graph that needs no change is left as it is.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS

__all__ = ["drop_duplicates", "drop_self_loops", "make_symmetric"]


def drop_self_loops(fields: dict[str, Tensor], notes: list[str]) -> None:
    """Drop the edges from a node to itself.

    Args:
        fields: ``edge_index`` of shape ``(2, E)`` and, where there are, weights, attributes and types; changed.
        notes: Receives what was done.
    """
    keep = fields["edge_index"][0] != fields["edge_index"][1]
    dropped = int((~keep).sum())
    notes.append(f"removed {dropped} self-loops")
    if dropped:
        fields["edge_index"] = fields["edge_index"][:, keep]
        for name in _present(fields):
            fields[name] = fields[name][keep]


def make_symmetric(fields: dict[str, Tensor], num_nodes: int, notes: list[str]) -> None:
    """Append the reverse of every edge whose reverse (of its type) is missing, with the same weight and attributes.

    An edge that has a reverse keeps it as it is, whatever its weight, so that a graph that is symmetric already does
    not change (``torch_geometric.utils.to_undirected`` would double its summed weights).

    Args:
        fields: As in :func:`drop_self_loops`.
        num_nodes: Number of nodes.
        notes: Receives what was done.
    """
    source, target = fields["edge_index"].numpy()
    there = np.unique(_keys(source, target, fields, num_nodes))
    wanted = _keys(target, source, fields, num_nodes)
    position = np.minimum(np.searchsorted(there, wanted), max(len(there) - 1, 0))
    missing = torch.from_numpy(np.flatnonzero(there[position] != wanted)) if len(there) else torch.empty(0).long()
    notes.append(f"added {len(missing)} reverse edges, with the weights and attributes of the edges they reverse")
    if len(missing):
        added = fields["edge_index"][:, missing].flip(0)
        fields["edge_index"] = torch.cat([fields["edge_index"], added], dim=1)
        for name in _present(fields):
            fields[name] = torch.cat([fields[name], fields[name][missing]])


def drop_duplicates(fields: dict[str, Tensor], num_nodes: int, notes: list[str]) -> None:
    """Keep one edge of each (source, target, type), where the first one was; sum weights, average attributes.

    Args:
        fields: As in :func:`drop_self_loops`.
        num_nodes: Number of nodes.
        notes: Receives what was done.
    """
    source, target = fields["edge_index"].numpy()
    keys = _keys(source, target, fields, num_nodes)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    dropped = len(keys) - len(starts)
    done = {"edge_weight": "their weights were summed", "edge_attr": "their attributes were averaged"}
    said = [text for name, text in done.items() if name in fields]
    notes.append("; ".join([f"removed {dropped} duplicate edges", *said]))
    if not dropped:
        return
    first = order[starts]  # the sort is stable: the first of each group came first
    by_position = np.argsort(first)
    for name in _present(fields):
        values = fields[name].numpy()[order]
        if name == "edge_type":  # equal within a group
            fields[name] = fields[name][torch.from_numpy(first[by_position])]
            continue
        merged = np.add.reduceat(values, starts, axis=0)
        if name == "edge_attr":
            counts = np.diff(starts, append=len(keys)).astype(values.dtype)
            merged /= counts.reshape(-1, *[1] * (merged.ndim - 1))
        fields[name] = torch.from_numpy(merged[by_position])
    fields["edge_index"] = fields["edge_index"][:, torch.from_numpy(first[by_position])]


def _present(fields: dict[str, Tensor]) -> list[str]:
    return [name for name in EDGE_FIELDS if name in fields]


def _keys(
    source: NDArray[np.int64], target: NDArray[np.int64], fields: dict[str, Tensor], num_nodes: int
) -> NDArray[np.int64]:
    """One number for each (type, source, target)."""
    keys: NDArray[np.int64] = source * num_nodes + target
    if "edge_type" not in fields or not len(keys):
        return keys
    types = fields["edge_type"].numpy()
    if (int(types.max()) + 1) * num_nodes**2 >= 1 << 63:
        raise InputError(
            f"edge_type: {int(types.max()) + 1} types on {num_nodes} nodes are too many to tell edges apart by one "
            "int64; symmetrise and remove duplicates before"
        )
    keys += types * num_nodes**2
    return keys
