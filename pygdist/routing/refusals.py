"""Refuses layers that cannot be distributed, each with its reason; without this file they would give wrong numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch_geometric.nn import ChebConv, EGConv, MessagePassing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.pool import glob

from pygdist.backends.base import Backend, names_of
from pygdist.errors import InputError
from pygdist.hops.arguments import edges_among, mapped
from pygdist.hops.layer import layer_name, methods_of
from pygdist.nn.readouts import READOUTS

#: Class names of PyG (they may be looked up in a base class too) and the reason.
REFUSED_LAYERS: dict[str, str] = {
    "DirGNNConv": "needs the out-edges of each node; a shard holds the in-edges",
    "DynamicEdgeConv": "builds its edges inside the layer from a search over all nodes",
    "GPSConv": "attends over all nodes",
    "GravNetConv": "builds its edges inside the layer from a search over all nodes",
    "HANConv": "works on heterogeneous graphs",
    "HGTConv": "works on heterogeneous graphs",
    "HeteroConv": "works on heterogeneous graphs",
    "HypergraphConv": "takes an incidence matrix of nodes and hyperedges, not edges between nodes",
    "LabelPropagation": "passes the labels of all nodes, with no parameter to train",
    "LightGCN": "holds an embedding of every node of the graph",
    "Node2Vec": "holds an embedding of every node of the graph",
    "PANConv": "multiplies powers of the whole adjacency matrix inside the layer",
    "SparseLinear": "holds a row of weights for every node of the graph (LINKX)",
    "SuperGATConv": "samples negative edges among all nodes inside the layer",
    "WLConv": "numbers the colours that occur in the whole graph inside the layer",
    "XConv": "builds its edges inside the layer from a search over all nodes",
}

_POOLS = ("global_max_pool",)  # sums and means are those of all ranks
_BATCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def refusals(model: nn.Module, backend: Backend) -> list[str]:
    """One clause for each module of ``model`` that cannot run: its path, class and the reason."""
    clauses = []
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        reason = _reason(module, backend, inside)
        if reason is not None:
            clauses.append(f"'{path or 'model'}' ({type(module).__name__}): it {reason}")
        if isinstance(module, MessagePassing):
            inside.update(module.modules())
    return clauses


def _reason(module: nn.Module, backend: Backend, inside: set[nn.Module]) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in REFUSED_LAYERS and cls.__module__.startswith("torch_geometric."):
            return REFUSED_LAYERS[cls.__name__]
    if isinstance(module, MessagePassing):
        if module.flow != "source_to_target":
            return f"has flow='{module.flow}'; a shard holds the in-edges of its nodes, so only source_to_target runs"
        if module.explain:
            return "is in explain mode"
        if isinstance(module, EGConv) and module.add_self_loops and "symnorm" not in module.aggregators:
            return (
                "adds self-loops up to the highest node of all edges, which no rank knows; with add_self_loops=False "
                "it runs, and torch_geometric.transforms.AddRemainingSelfLoops adds them to the graph"
            )
        if isinstance(module, ChebConv) and backend.abilities.trains_parts:
            return (
                "normalises by out-degrees, and a part that trains by itself has the in-edges of its nodes; use backend "
                f"{names_of(lambda abilities: not abilities.trains_parts)}"
            )
        return backend.refuse(module)
    if readouts := _readouts(type(module)):
        return (
            f"calls {', '.join(readouts)}, which reads out all nodes at once; only global_add_pool and "
            "global_mean_pool do so for all ranks"
        )
    if isinstance(module, _BATCH_NORMS):
        return "takes statistics over more than nodes and channels"
    if isinstance(module, Aggregation) and module not in inside and type(module) not in READOUTS:
        return (
            "reads out all nodes at once outside of a message passing layer; only SumAggregation and "
            "MeanAggregation do so for all ranks"
        )
    if type(module).__module__.startswith("torch_geometric.nn.attention"):
        return "attends over all nodes"
    if type(module).__module__.startswith(("torch_geometric.nn.pool", "torch_geometric.nn.unpool")):
        return "pools nodes of the whole graph"
    return None


def refuse_own_values(
    layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse a call of a layer with a parameter that has a value for each edge: its order is that of the user's edges.

    Raises:
        InputError: The message names the layer and the argument.
    """
    edges = edges_among(forward, (layer, *args), kwargs)

    def look(name: str, value: Any) -> Any:
        of_edges = name.startswith("edge_") and isinstance(value, nn.Parameter) and value.dim() > 0
        if of_edges and any(value.size(0) == one.size(1) for one in edges):
            raise InputError(
                f"{layer_name(layer)}: '{name}' is a parameter with a value for each edge, but edges are sorted by "
                "destination here, and each rank has some of them; compute values of edges from edge_attr",
                of_one_rank=True,  # by the number of edges that this rank has
            )
        return value

    mapped(forward, (layer, *args), kwargs, look)


def _readouts(cls: type[nn.Module]) -> list[str]:
    """PyG's readouts over all nodes that the code of a class calls by name."""
    names = set()
    for method in methods_of(cls):
        for name in set(_POOLS).intersection(method.__code__.co_names):
            readout = getattr(glob, name)
            # by its own name, or as an attribute of a module
            if method.__globals__.get(name, readout) is readout:
                names.add(name)
    return sorted(name for name in names if not hasattr(cls, name))
