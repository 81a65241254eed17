"""A heterogeneous graph as one graph with ``edge_type``, for layers such as ``RGCNConv``.

Nodes are grouped by type and edges by relation, in the order of the ``HeteroData``.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import is_undirected

from pygdist.errors import InputError
from pygdist.graph.check import MASKS, NOTES, as_field, is_multi_label
from pygdist.graph.sources.fields import SPLIT_FIELDS, edges_from_adjacency, masks_from_ids


def as_homogeneous(graph: HeteroData, *, reverse: bool = False, name: str = "dataset") -> Data:
    r"""Merge all nodes and edges of a heterogeneous graph into one graph.

    Args:
        graph: ``edge_index`` for each type of edges, ``x`` for any types of nodes, ``y`` and a split for one of them.
            The forms of fields are those of :func:`pygdist.graph.load_graph`; the graph itself is not changed.
        reverse: Add the reverse of each relation as another relation. A relation between nodes of one type that already
            has every edge in both directions gets no reverse.
        name: Name of the graph in error messages.

    Returns:
        A graph with

        - ``x``: the features of each type, with zeros for nodes of other types (all types share the same columns if
          their widths are equal); then one column for each type, 1 for its nodes, so that a layer's weights for this
          column are an embedding of the type. ``x`` is integer if all features are;
        - ``edge_type`` and ``node_type``: int64, the number of the relation or type;
        - ``y`` and masks: -1 and false for nodes of types without labels.

    Raises:
        InputError: If there are no edges, an end of an edge is not a node of the relation's type, edges have attributes
            or weights, several types of nodes have labels, or a field does not fit its type of nodes or edges. The
            message names the type and the field.
    """
    graph, where, notes = copy.copy(graph), f"dataset '{name}'", list[str]()
    kinds, relations = list(graph.node_types), list(graph.edge_types)
    if not relations:
        raise InputError(f"{where} is heterogeneous and has no edges (edge_index)")
    for relation in relations:
        if unknown := {relation[0], relation[-1]} - set(kinds):
            kind = min(unknown)
            raise InputError(f"{where}: {relation} has no nodes '{kind}'; set x or num_nodes of data['{kind}']")
    _spread(graph, kinds, where)
    nodes = {kind: _node_fields(graph[kind], kind, where, notes) for kind in kinds}
    counts = [int(nodes[kind].pop("num_nodes")) for kind in kinds]
    first = {kind: sum(counts[:number]) for number, kind in enumerate(kinds)}
    edges = []
    for relation in relations:
        source, target = relation[0], relation[-1]
        ends = counts[kinds.index(source)], counts[kinds.index(target)]
        edge_index = _edges(graph[relation], ends, relation, where, notes)
        edges.append(edge_index + torch.tensor([[first[source]], [first[target]]]))
        if reverse and not (source == target and is_undirected(edge_index, num_nodes=ends[0])):
            edges.append(edges[-1].flip(0))
    out = Data(
        x=_features(nodes, counts, first, where, notes),
        edge_index=torch.cat(edges, dim=1),
        edge_type=torch.cat([torch.full((one.size(1),), number) for number, one in enumerate(edges)]),
        node_type=torch.repeat_interleave(torch.arange(len(kinds)), torch.tensor(counts)),
        num_nodes=sum(counts),
    )
    labelled = [kind for kind in kinds if "y" in nodes[kind]]
    if len(labelled) > 1:
        raise InputError(f"{where}: nodes of {' and '.join(labelled)} have labels (y); keep those of one type")
    for kind in labelled:
        _label(out, nodes[kind], first[kind])
    for kind in kinds:
        if kind not in labelled and (left_out := [mask for mask in MASKS if mask in nodes[kind]]):
            notes.append(f"left out {', '.join(left_out)} of '{kind}', which has no labels (y)")
    out[NOTES] = [f"merged {len(kinds)} types of nodes and {len(relations)} types of edges into one graph", *notes]
    return out


def _spread(graph: HeteroData, kinds: list[str], where: str) -> None:
    """Give each type of nodes its own of the splits that are dictionaries by type."""
    whole = graph.stores[0]
    for field in [field for field in SPLIT_FIELDS if field in whole]:
        value = whole[field]
        by_stage = isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values())
        if field == "split_idx" and by_stage and not set(value) & set(kinds):  # as OGB's: stage, then type
            of_kinds = {kind: {stage: one[kind] for stage, one in value.items() if kind in one} for kind in kinds}
            unknown = {kind for one in value.values() for kind in one} - set(kinds)
        else:
            of_kinds = {kind: value[kind] for kind in kinds if kind in value} if isinstance(value, Mapping) else {}
            unknown = set(value) - set(kinds) if isinstance(value, Mapping) else {"no type"}
        of_kinds = {kind: one for kind, one in of_kinds.items() if not isinstance(one, Mapping) or one}
        if unknown or any(field in graph[kind] for kind in of_kinds):
            raise InputError(
                f"{where}: {field} must be a dictionary by type of nodes ({', '.join(kinds)}), or be set for one of "
                f"them: data['{kinds[0]}'].{field}"
            )
        for kind, one in of_kinds.items():
            graph[kind][field] = one
        del whole[field]


def _node_fields(store: Any, kind: str, where: str, notes: list[str]) -> dict[str, Any]:
    """Return ``num_nodes``, ``x``, ``y`` and masks of a type of nodes, as far as it has them, as tensors."""
    where = f"{where}: '{kind}'"
    fields: dict[str, Any] = {
        name: as_field(name, value, f"{where}: ").detach().cpu()
        for name in ("x", "y")
        if (value := store.get(name)) is not None
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the number cannot be inferred
        count = int(store.num_nodes or 0) if store.get("x") is None or "num_nodes" in store else len(fields["x"])
    masks_from_ids(store, count, where)
    fields |= {name: as_field(name, store[name], f"{where}: ").cpu() for name in MASKS if store.get(name) is not None}
    for name, value in fields.items():
        dims = (2,) if name == "x" else (1, 2)
        if value.dim() not in dims or value.size(0) != count or value.is_complex():
            raise InputError(
                f"{where}: {name}: {value.dtype} of shape {tuple(value.shape)}, expected numbers for each of {count} "
                "nodes"
            )
    if unused := sorted(set(store.keys()) - {"x", "y", "num_nodes", *MASKS}):
        notes.append(f"left out unused attributes of '{kind}': {', '.join(unused)}")
    return {"num_nodes": count, **fields}


def _edges(store: Any, ends: tuple[int, int], relation: tuple[str, str, str], where: str, notes: list[str]) -> Tensor:
    """Return the edges of one type, int64, in the ids of the types of their ends."""
    edges_from_adjacency(store, f"{where}: {relation}", notes)
    edge_index = as_field("edge_index", store["edge_index"], f"{where}: {relation}: ").cpu()
    whole = not edge_index.is_floating_point() and not edge_index.is_complex() and edge_index.dtype != torch.bool
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or not whole:
        raise InputError(
            f"{where}: {relation}: edge_index: {edge_index.dtype} of shape {tuple(edge_index.shape)}, expected "
            "integers of shape (2, number of edges)"
        )
    for end, ids, kind, count in zip(("source", "target"), edge_index, (relation[0], relation[-1]), ends, strict=True):
        # in one graph these would end at nodes of the next type
        if len(wrong := ((ids < 0) | (ids >= count)).nonzero()):
            edge, nodes = int(wrong[0]), f"nodes 0 to {count - 1}" if count else "no nodes"
            raise InputError(
                f"{where}: the {end} of edge {edge} of {relation} is node {int(ids[edge])}, but '{kind}' has {nodes}; "
                f"correct edge_index, or set num_nodes of '{kind}'"
            )
    for field in ("edge_attr", "edge_weight"):
        if store.get(field) is not None:
            raise InputError(
                f"{where}: {field} of {relation} would be lost, since edges of a heterogeneous graph only get an "
                f"edge_type; remove {field}"
            )
    if unused := sorted(set(store.keys()) - {"edge_index"}):
        notes.append(f"left out unused attributes of {relation}: {', '.join(unused)}")
    return edge_index.to(torch.int64)


def _features(
    nodes: Mapping[str, Mapping[str, Any]], counts: list[int], first: Mapping[str, int], where: str, notes: list[str]
) -> Tensor:
    """Return the features of all types in the columns that they have, and a column for each type."""
    features = {kind: fields["x"] for kind, fields in nodes.items() if "x" in fields}
    features = {kind: x if x.layout is torch.strided else x.to_dense() for kind, x in features.items()}
    widths = [x.size(1) for x in features.values()]
    shared = len(set(widths)) <= 1
    width = max(widths, default=0) if shared else sum(widths)
    dtype = _common_type(features, where, notes)
    out = torch.zeros(sum(counts), width + len(nodes), dtype=dtype)
    column = 0
    for number, (kind, count) in enumerate(zip(nodes, counts, strict=True)):
        rows = out[first[kind] : first[kind] + count]
        rows[:, width + number] = 1
        if kind in features:
            rows[:, column : column + features[kind].size(1)] = features[kind]
            column += 0 if shared else features[kind].size(1)
    return out


def _common_type(features: Mapping[str, Tensor], where: str, notes: list[str]) -> torch.dtype:
    """Return the type that holds all features: integers if all are, else float32, or float64 if any is."""
    dtypes = {x.dtype for x in features.values()}
    if dtypes and not any(dtype.is_floating_point for dtype in dtypes):
        return functools.reduce(torch.promote_types, dtypes)
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    for kind, x in features.items():
        if x.dtype in (torch.float32, torch.float64):
            continue
        if not x.is_floating_point() and not torch.equal(x.to(dtype).to(x.dtype), x):
            raise InputError(
                f"{where}: '{kind}': x: {x.dtype} with numbers that {dtype} rounds, but features of other types are "
                f"{dtype}; give all types integers, or all types floats"
            )
        notes.append(f"converted x of '{kind}' from {x.dtype} to {dtype}".replace("torch.", ""))
    return dtype


def _float_for(value: Tensor) -> torch.dtype:
    """Return float32, or float64 for integers that float32 may round."""
    largest = max(-int(value.min()), int(value.max())) if value.numel() else 0
    return torch.float64 if largest > 1 << 24 else torch.float32


def _label(out: Data, fields: Mapping[str, Any], start: int) -> None:
    """Set labels and masks of all nodes from those of one type, which begins at node ``start``."""
    for name, value in ((name, fields[name]) for name in ("y", *MASKS) if name in fields):
        if name == "y" and not value.is_floating_point():  # -1 or NaN: unlabelled
            value = value.to(_float_for(value) if is_multi_label(value) else torch.int64)
        unlabelled = 0 if name != "y" else float("nan") if value.is_floating_point() else -1
        out[name] = torch.full((int(out.num_nodes or 0), *value.shape[1:]), unlabelled, dtype=value.dtype)
        out[name][start : start + len(value)] = value
