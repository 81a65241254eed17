"""Refuses layers that cannot be distributed, each with its reason; without this file they would give wrong numbers."""

from __future__ import annotations

import contextlib
import dis
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import EGConv, MessagePassing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.pool import glob

from pygdist.backends.base import Backend
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.layer import methods_of, own_class
from pygdist.nn.readouts import READOUTS

#: Class names of PyG (they may be looked up in a base class too) and the reason.
REFUSED_LAYERS: dict[str, str] = {
    "ChebConv": "scales its Laplacian by a maximum over all edges",
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
    "PointNetConv": "needs node positions, which a shard does not hold",
    "PointTransformerConv": "needs node positions, which a shard does not hold",
    "PPFConv": "needs node positions, which a shard does not hold",
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


def refuse_values_of_edges(model: nn.Module, shard: Shard, switch: str) -> None:
    """Refuse a model that holds a tensor with a value for each edge of the graph: a parameter, a buffer, a mask.

    Such values are in the order of the user's edges. A part has its edges by destination, so only one part whose edges
    came sorted keeps that order.

    Raises:
        InputError: On all ranks; the message names the tensor and ends with ``switch``.
    """
    num_edges = shard.num_edges
    held = next((name for name, one in _held_tensors(model) if _is_of_edges(one, num_edges)), None)
    if held is None:
        return
    alone = shard.num_parts == 1
    if alone and torch.equal(shard.e_id.cpu(), torch.arange(num_edges)):
        return
    order = "edges are sorted by destination here" if alone else "a rank has some of the edges, sorted by destination"
    remedy = "; or sort the edges before: data.sort(sort_by_row=False)" if alone else ""
    raise InputError(
        f"{own_class(model).__name__}: '{held}' has a value for each of the graph's {num_edges} edges in the order in "
        f"which they were given, but {order}; put such values into the graph, as edge_attr or edge_weight{remedy} "
        f"({switch})"
    )


def _held_tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a user's own modules hold, or read by name; those of torch's and PyG's layers aside."""
    for path, module in model.named_modules():
        cls, start = own_class(module), path + "." * bool(path)
        if not cls.__module__.startswith(("torch.", "torch_geometric.", "pygdist.")):
            for name, value in vars(module).items():
                if not name.startswith("_"):
                    yield from ((start + name, one) for one in tree_leaves(value))
            functions = [one for one in vars(module).values() if isinstance(one, types.FunctionType)]
            for function in (*methods_of(cls), *functions):
                yield from _read_by_name(function)
        elif not isinstance(module, (nn.Embedding, nn.ParameterList, nn.ParameterDict)):
            continue
        for name, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield start + name, one


def _read_by_name(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that its code reads."""
    for name in _globals_of(function.__code__):
        yield name, function.__globals__.get(name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in the cell yet
            yield name, cell.cell_contents


def _globals_of(code: types.CodeType) -> set[str]:
    """Return the names of the globals that code reads, and functions within it."""
    names = {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_of(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _is_of_edges(value: Any, num_edges: int) -> bool:
    """True for a tensor with a row or a column for each edge; ``(2, E)`` integers are edges themselves."""
    if not isinstance(value, Tensor) or is_lazy(value) or not value.dim() or num_edges < 2:
        return False
    edges = value.dim() == 2 and value.size(0) == 2 and not value.is_floating_point()
    return num_edges in (value.size(0), value.size(-1)) and not edges


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
