"""Changes to the edges before partitioning: remove self-loops, add reverse edges, merge duplicates.

Each function changes the fields of a graph in place and keeps ``edge_weight``, ``edge_attr`` and ``edge_type`` aligned
with ``edge_index``. Edges keep their order, and a graph that needs no change stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS
from pygdist.graph.streams.arrays import forget_pages
from pygdist.graph.streams.sorting import distinct

_VALUES = ("edge_weight", "edge_attr")


def drop_self_loops(fields: dict[str, Tensor], notes: list[str]) -> None:
    """Remove the edges from a node to itself, and append a note.

    ``fields``, changed in place, are ``edge_index`` ``(2, E)``, and weights, attributes and types if they exist.
    """
    keep = fields["edge_index"][0] != fields["edge_index"][1]
    dropped = int((~keep).sum())
    notes.append(f"removed {dropped} self-loops")
    if dropped:
        fields["edge_index"] = fields["edge_index"][:, keep]
        for name in _present(fields):
            fields[name] = fields[name][keep]


def make_symmetric(fields: dict[str, Tensor], num_nodes: int, notes: list[str]) -> None:
    """Append the reverse of every edge whose reverse (of the same type) is missing, with its weight and attributes.

    Existing reverse edges keep their weights, so a symmetric graph does not change
    (``torch_geometric.utils.to_undirected`` would double its summed weights). Arguments as in :func:`drop_self_loops`.
    """
    source, target = fields["edge_index"].numpy()
    present = distinct(_keys(source, target, fields, num_nodes))
    reverse = _keys(target, source, fields, num_nodes)
    position = np.minimum(np.searchsorted(present, reverse), max(len(present) - 1, 0))
    missing = torch.from_numpy(np.flatnonzero(present[position] != reverse)) if len(present) else torch.empty(0).long()
    notes.append(f"added {len(missing)} reverse edges, with the weights and attributes of the edges they reverse")
    if len(missing):
        added = fields["edge_index"][:, missing].flip(0)
        fields["edge_index"] = torch.cat([fields["edge_index"], added], dim=1)
        for name in _present(fields):
            fields[name] = torch.cat([fields[name], fields[name][missing]])


def drop_duplicates(fields: dict[str, Tensor], num_nodes: int, notes: list[str]) -> None:
    """Keep the first edge of each (source, target, type); sum weights, average attributes; append a note.

    Raises:
        InputError: If integer attributes of such edges differ.
    """
    source, target = fields["edge_index"].numpy()
    keys = _keys(source, target, fields, num_nodes)
    values = {name: fields[name].numpy().copy() for name in _VALUES if name in fields}

    def refuse(name: str, first: int, other: int) -> InputError:
        return InputError(
            f"{name}: edges {first} and {other} have the same ends and other {fields[name].dtype} attributes, of which "
            "there is no average; merge these edges before, or convert edge_attr to floats"
        )

    first = merge_edges(keys, np.arange(len(keys)), values, refuse)
    dropped, categories = len(keys) - len(first), "edge_attr" in fields and not fields["edge_attr"].is_floating_point()
    notes.append(note_on_merged(dropped, fields, categories=categories))
    if dropped:
        fields |= {name: torch.from_numpy(value) for name, value in values.items()}
        fields["edge_index"] = fields["edge_index"][:, torch.from_numpy(first)]
        for name in _present(fields):
            fields[name] = fields[name][torch.from_numpy(first)]


def merge_edges(
    key: NDArray[np.int64],
    e_id: NDArray[np.int64],
    values: Mapping[str, NDArray[Any]],
    refuse: Callable[[str, int, int], InputError],
    *,
    added: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Keep the first edge of each key, and write the sum of weights and the mean of attributes to its place.

    Args:
        key: A number for each edge, equal for those that are merged.
        e_id: Their places in ``values``, ascending.
        values: ``edge_weight`` (floats) and ``edge_attr``, changed in place.
        refuse: Returns the error for integers that differ, from their field and the places of two edges.
        added: 1 for edges that give way to others of the same key, 0 for these.

    Returns:
        The edges to keep, ascending, as places in ``key``.
    """
    if not (values and len(key)):
        return np.sort(np.unique(key, return_index=True)[1])
    # both sorts are stable: in the order of e_id within equal edges
    order = np.argsort(key, kind="stable") if added is None else np.lexsort((added, key))
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    first, count = order[starts], np.diff(starts, append=len(order))
    # edges that have a say in the values
    counts = np.ones(len(order), dtype=bool) if added is None else added[order] == np.repeat(added[first], count)
    for name, value in values.items():
        rows = value[e_id[order]]
        if value.dtype.kind != "f":  # attributes: weights are floats
            other = counts & (rows != np.repeat(rows[starts], count, axis=0)).reshape(len(rows), -1).any(axis=1)
            for place in np.flatnonzero(other)[:1]:
                raise refuse(name, int(e_id[np.repeat(first, count)[place]]), int(e_id[order[place]]))
            continue
        rows[~counts] = 0
        merged = np.add.reduceat(rows, starts, axis=0)
        if name == "edge_attr":
            share = np.add.reduceat(counts.astype(merged.dtype), starts)
            merged = (merged / share.reshape(-1, *[1] * (merged.ndim - 1))).astype(merged.dtype)
        value[e_id[first]] = merged
        forget_pages(value)
    return np.sort(first)


def note_on_merged(count: int, fields: Container[str], *, categories: bool) -> str:
    """Return the note on merged edges; ``categories`` tells that attributes are integers."""
    averaged = "their attributes were equal" if categories else "their attributes were averaged"
    texts = {"edge_weight": "their weights were summed", "edge_attr": averaged}
    return "; ".join([f"removed {count} duplicate edges", *(text for name, text in texts.items() if name in fields)])


def _present(fields: dict[str, Tensor]) -> list[str]:
    return [name for name in EDGE_FIELDS if name in fields]


def _keys(
    source: NDArray[np.int64], target: NDArray[np.int64], fields: dict[str, Tensor], num_nodes: int
) -> NDArray[np.int64]:
    """Return a different number for each (type, source, target)."""
    keys: NDArray[np.int64] = source * num_nodes + target
    if "edge_type" not in fields or not len(keys):
        return keys
    types = fields["edge_type"].numpy()
    if (int(types.max()) + 1) * num_nodes**2 >= 1 << 63:
        raise InputError(
            f"edge_type: {int(types.max()) + 1} types on {num_nodes} nodes are too many for symmetrize and "
            "remove_duplicates; apply these before loading the graph"
        )
    keys += types * num_nodes**2
    return keys
