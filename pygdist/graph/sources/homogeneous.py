"""A heterogeneous graph as one graph with ``edge_type``, for layers such as ``RGCNConv``.

Nodes are grouped by type and edges by relation, in the order of the ``HeteroData``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pygdist.errors import InputError
from pygdist.graph.check import MASKS


def as_homogeneous(graph: HeteroData, *, reverse: bool = False, name: str = "dataset") -> Data:
    r"""Merge all nodes and edges of a heterogeneous graph into one graph.

    Args:
        graph: ``edge_index`` for each type of edges, ``x`` for any types of nodes, ``y`` and masks for one of them.
        reverse: Add the reverse of each relation as another relation. Relations between nodes of one type that have
            every edge in both directions are left alone.
        name: Name of the graph in error messages.

    Returns:
        A graph with

        - ``x``: the features of each type, with zeros for nodes of other types (all types share the same columns if
          their widths are equal); then one column for each type, 1 for its nodes, so that a layer's weights for this
          column are an embedding of the type;
        - ``edge_type`` and ``node_type``: int64, the number of the relation or type;
        - ``y`` and masks: -1 and false for nodes of types without labels.

    Raises:
        InputError: If there are no edges, an edge ends at no node of its type, edges have attributes or weights, or
            several types of nodes have labels.
    """
    kinds, relations = list(graph.node_types), list(graph.edge_types)
    if not relations:
        raise InputError(f"dataset '{name}' is heterogeneous and has no edges (edge_index)")
    counts = [int(graph[kind].num_nodes or 0) for kind in kinds]
    first = {kind: sum(counts[:number]) for number, kind in enumerate(kinds)}
    edges = []
    for relation in relations:
        source, target = relation[0], relation[-1]
        edge_index = graph[relation].get("edge_index")
        if not isinstance(edge_index, Tensor):
            raise InputError(f"dataset '{name}': edge_index of {relation} is missing; add it, or remove the edge type")
        _check_ends(edge_index, (counts[kinds.index(source)], counts[kinds.index(target)]), relation, name)
        dropped = next((field for field in ("edge_attr", "edge_weight") if field in graph[relation]), None)
        if dropped is not None:
            raise InputError(
                f"dataset '{name}': {dropped} of {relation} would be lost, since edges of a heterogeneous graph only "
                f"get an edge_type; remove {dropped}"
            )
        edges.append(edge_index + torch.tensor([[first[source]], [first[target]]]))
        if reverse and not (source == target and _both_ways(edge_index, counts[kinds.index(source)])):
            edges.append(edges[-1].flip(0))
    out = Data(
        x=_features(graph, kinds, counts, first),
        edge_index=torch.cat(edges, dim=1),
        edge_type=torch.cat([torch.full((one.size(1),), number) for number, one in enumerate(edges)]),
        node_type=torch.repeat_interleave(torch.arange(len(kinds)), torch.tensor(counts)),
        num_nodes=sum(counts),
    )
    labelled = [kind for kind in kinds if isinstance(graph[kind].get("y"), Tensor)]
    if len(labelled) > 1:
        raise InputError(f"dataset '{name}': nodes of {' and '.join(labelled)} have labels (y); keep those of one type")
    for kind in labelled:
        _label(out, graph[kind], first[kind])
    return out


def _check_ends(edge_index: Tensor, counts: tuple[int, int], relation: tuple[str, str, str], name: str) -> None:
    """Refuse edges beyond their own types: in one graph these would end at nodes of the next type."""
    for end, ids, kind, count in zip(
        ("source", "target"), edge_index, (relation[0], relation[-1]), counts, strict=True
    ):
        wrong = ((ids < 0) | (ids >= count)).nonzero()
        if len(wrong):
            edge = int(wrong[0])
            raise InputError(
                f"dataset '{name}': the {end} of edge {edge} of {relation} is node {int(ids[edge])}, but '{kind}' has "
                f"nodes 0 to {count - 1}; correct edge_index, or set num_nodes of '{kind}'"
            )


def _both_ways(edge_index: Tensor, num_nodes: int) -> bool:
    forward, backward = (one[0] * num_nodes + one[1] for one in (edge_index, edge_index.flip(0)))
    return torch.equal(forward.sort().values, backward.sort().values)


def _features(graph: HeteroData, kinds: list[str], counts: list[int], first: dict[str, int]) -> Tensor:
    features = {kind: graph[kind].x for kind in kinds if isinstance(graph[kind].get("x"), Tensor)}
    features = {kind: x if x.layout is torch.strided else x.to_dense() for kind, x in features.items()}
    widths = [x.size(1) for x in features.values()]
    shared = len(set(widths)) <= 1
    width = max(widths, default=0) if shared else sum(widths)
    double = any(x.dtype == torch.float64 for x in features.values())
    out = torch.zeros(sum(counts), width + len(kinds), dtype=torch.float64 if double else torch.float32)
    column = 0
    for number, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        rows = out[first[kind] : first[kind] + count]
        rows[:, width + number] = 1
        if kind in features:
            rows[:, column : column + features[kind].size(1)] = features[kind]
            column += 0 if shared else features[kind].size(1)
    return out


def _label(out: Data, store: object, start: int) -> None:
    values: dict[str, Tensor] = {name: value for name in ("y", *MASKS) if isinstance(value := store.get(name), Tensor)}  # type: ignore[attr-defined]
    end = start + len(values["y"])
    for name, value in values.items():
        shape = (int(out.num_nodes or 0), *value.shape[1:])
        unlabelled = float("nan") if value.is_floating_point() else -1 if name == "y" else False
        out[name] = torch.full(shape, unlabelled, dtype=value.dtype)
        out[name][start:end] = value
