"""Changes to the edges before partitioning: remove self-loops, add reverse edges, merge duplicates.

Each function changes the fields of a graph in place and keeps ``edge_weight``, ``edge_attr`` and ``edge_type`` aligned
with ``edge_index``. Edges keep their order, and a graph that needs no change stays as it is.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph.check import EDGE_FIELDS


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
    present = np.unique(_keys(source, target, fields, num_nodes))
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
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    dropped = len(keys) - len(starts)
    categories = "edge_attr" in fields and not fields["edge_attr"].is_floating_point()
    notes.append(note_on_merged(dropped, fields, categories=categories))
    if not dropped:
        return
    first = order[starts]  # the sort is stable, so this is the first edge of each group
    by_position = np.argsort(first)
    for name in _present(fields):
        values = fields[name].numpy()[order]
        if name == "edge_type" or (name == "edge_attr" and categories):
            group = np.repeat(first, np.diff(starts, append=len(keys)))
            _check_equal(name, fields[name], order, group)
            fields[name] = fields[name][torch.from_numpy(first[by_position])]
            continue
        merged = np.add.reduceat(values, starts, axis=0)
        if name == "edge_attr":
            counts = np.diff(starts, append=len(keys)).astype(values.dtype)
            merged /= counts.reshape(-1, *[1] * (merged.ndim - 1))
        fields[name] = torch.from_numpy(merged[by_position])
    fields["edge_index"] = fields["edge_index"][:, torch.from_numpy(first[by_position])]


def note_on_merged(count: int, fields: Container[str], *, categories: bool) -> str:
    """Return the note on merged edges; ``categories`` tells that attributes are integers."""
    averaged = "their attributes were equal" if categories else "their attributes were averaged"
    texts = {"edge_weight": "their weights were summed", "edge_attr": averaged}
    return "; ".join([f"removed {count} duplicate edges", *(text for name, text in texts.items() if name in fields)])


def _check_equal(name: str, values: Tensor, edges: NDArray[np.int64], first: NDArray[np.int64]) -> None:
    """Refuse integers that differ between an edge and the first of those that it is merged with."""
    wrong = (values[torch.from_numpy(edges)] != values[torch.from_numpy(first)]).reshape(len(edges), -1).any(dim=1)
    if len(at := wrong.nonzero()):
        raise InputError(
            f"{name}: edges {first[at[0, 0]]} and {edges[at[0, 0]]} have the same ends and other {values.dtype} "
            "attributes, of which there is no average; merge these edges before, or convert edge_attr to floats"
        )


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
