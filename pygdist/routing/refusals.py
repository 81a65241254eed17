"""Refuses layers that cannot be distributed, each with its reason; without this file they would give wrong numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.nn.modules.batchnorm import _LazyNormBase
from torch_geometric.nn import ChebConv, CorrectAndSmooth, EGConv, LabelPropagation, MeshCNNConv, MessagePassing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.pool import glob

from pygdist.backends.base import Backend, names_of
from pygdist.errors import InputError
from pygdist.hops.rebinding import methods_of
from pygdist.nn.norms import GLOBAL_NORMS
from pygdist.nn.readouts import READOUTS

_BY_TYPE = "takes rows and edges by type; merge the types by to_homogeneous() and use a layer with edge_type"

#: Class names of PyG (they may be looked up in a base class too) and the reason.
REFUSED_LAYERS: dict[str, str] = {
    "ARGA": "averages its losses over the nodes of one rank; train its encoder with pygdist's LinkPredictor",
    "CuGraphModule": "takes the graph in cuGraph's own form; use the layer of the same name without CuGraph",
    "DeepGraphInfomax": "compares each node with a summary of all nodes, and with nodes in an order drawn at random",
    "DirGNNConv": "needs the out-edges of each node; a shard holds the in-edges",
    "DynamicEdgeConv": "builds its edges inside the layer from a search over all nodes",
    "FusedGATConv": "takes the graph in three sorted forms (csr, csc, perm); use GATConv",
    "GPSConv": "attends over all nodes",
    "GravNetConv": "builds its edges inside the layer from a search over all nodes",
    "HANConv": _BY_TYPE,
    "HGTConv": _BY_TYPE,
    "HeteroConv": _BY_TYPE,
    "HypergraphConv": "takes an incidence matrix of nodes and hyperedges, not edges between nodes",
    "LightGCN": "holds an embedding of every node of the graph",
    "MetaLayer": (
        "reads rows of nodes by edge_index outside of a MessagePassing layer, where a rank has only the rows of its "
        "own nodes; write a MessagePassing layer, with edge_updater for values of edges"
    ),
    "Node2Vec": "holds an embedding of every node of the graph",
    "PANConv": "multiplies powers of the whole adjacency matrix inside the layer",
    "SparseLinear": "holds a row of weights for every node of the graph (LINKX)",
    "SuperGATConv": "samples negative edges among all nodes inside the layer",
    "VGAE": (
        "draws numbers for each node, and averages its losses over the nodes of one rank; train its encoder with "
        "pygdist's LinkPredictor"
    ),
    "WLConv": "gives each colour of the whole graph a number, inside the layer",
    "XConv": "builds its edges inside the layer from a search over all nodes",
}

_COMPILED = (
    "was compiled or traced (torch.jit, torch.fx, torch.export), so its calls cannot be rerouted; distribute the model "
    "that it was made from"
)
_POOLS = ("global_max_pool",)  # sums and means are those of all ranks


def refuse_layers(model: nn.Module, backend: Backend) -> None:
    """Refuse a model with modules that cannot run on a backend.

    Raises:
        InputError: Names all of them, each with the reason.
    """
    if clauses := refusals(model, backend):
        raise InputError(f"backend '{backend.name or type(backend).__name__}' cannot run " + "; ".join(clauses))


def refuse_known_layers(model: nn.Module) -> None:
    """Refuse layers that run on no backend, before the model runs to find its sizes.

    Raises:
        InputError: Names the first one, with the reason.
    """
    for path, module in model.named_modules():
        if (reason := _known_reason(module)) is not None:
            raise InputError(f"no backend can run '{path or 'model'}' ({type(module).__name__}): it {reason}")


def refusals(model: nn.Module, backend: Backend) -> list[str]:
    """One clause for each module of ``model`` that cannot run: its path, class and the reason."""
    clauses = []
    inside, refused = set[nn.Module](), set[nn.Module]()
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    for path, module in modules:
        if module in refused:  # the outermost is named
            continue
        reason = _COMPILED if _is_compiled(module, path) else _reason(module, backend, inside)
        if reason is not None:
            clauses.append(f"'{path or 'model'}' ({type(module).__name__}): it {reason}")
            refused.update(module.modules())
        if isinstance(module, (MessagePassing, *GLOBAL_NORMS)):
            inside.update(module.modules())
    return clauses


def reason_against_layer(layer: MessagePassing, backend: Backend) -> str | None:
    """Return the reason for which a layer cannot run on a backend; ``None`` if it can."""
    return _reason(layer, backend, set())


def _reason(module: nn.Module, backend: Backend, inside: set[nn.Module]) -> str | None:
    if (known := _known_reason(module)) is not None:
        return known
    if isinstance(module, (CorrectAndSmooth, LabelPropagation, MessagePassing)):
        return _reason_of_layer(module, backend)
    if readouts := _readouts(type(module)):
        return (
            f"calls {', '.join(readouts)}, which reads out all nodes at once; only global_add_pool and "
            "global_mean_pool do so for all ranks"
        )
    if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
        return "takes statistics over more than nodes and channels"
    if isinstance(module, _LazyNormBase):
        return "takes its number of channels from its first input; run the model once on a few nodes before"
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


def _known_reason(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        if cls.__name__ in REFUSED_LAYERS and cls.__module__.startswith("torch_geometric."):
            return REFUSED_LAYERS[cls.__name__]
    return None


def _reason_of_layer(module: nn.Module, backend: Backend) -> str | None:
    abilities = backend.abilities
    if isinstance(module, (CorrectAndSmooth, LabelPropagation)) and abilities.trains_parts:
        return f"smooths what is known of the whole graph; use backend {names_of(lambda one: not one.trains_parts)}"
    if isinstance(module, CorrectAndSmooth):
        return (
            None
            if abilities.reruns_layers
            else (
                "takes the labels of training nodes, and this backend needs a row for each node; use backend "
                f"{names_of(lambda one: one.reruns_layers)}"
            )
        )
    assert isinstance(module, MessagePassing)
    if module.flow != "source_to_target":
        return f"has flow='{module.flow}'; a shard holds the in-edges of its nodes, so only source_to_target runs"
    if module.explain:
        return "is in explain mode"
    if isinstance(module, EGConv) and module.add_self_loops and "symnorm" not in module.aggregators:
        return (
            "adds self-loops up to the highest node of all edges, which no rank knows; with add_self_loops=False "
            "it runs, and torch_geometric.transforms.AddRemainingSelfLoops adds them to the graph"
        )
    if isinstance(module, MeshCNNConv) and not (abilities.reruns_layers and abilities.mixes_columns):
        return (
            "takes four neighbours of each node, in their order, and this backend first tries layers on other graphs; "
            f"use backend {names_of(lambda one: one.reruns_layers and one.mixes_columns)}"
        )
    if isinstance(module, ChebConv) and abilities.trains_parts:
        return (
            "normalises by out-degrees, and a part that trains by itself has the in-edges of its nodes; use backend "
            f"{names_of(lambda one: not one.trains_parts)}"
        )
    return backend.refuse(module)


def _is_compiled(module: nn.Module, path: str) -> bool:
    """True if calls inside a module cannot be rerouted: a model of ``torch.jit``, or a layer's code that was traced."""
    parts: list[nn.Module] = list(module.modules())
    if isinstance(module, torch.jit.ScriptModule):
        known = {cls.__name__ for cls in _subclasses(MessagePassing)}
        return not path or any(getattr(one, "original_name", "") in known for one in parts)
    has_layers = any(isinstance(one, MessagePassing) for one in parts)
    if isinstance(module, torch.fx.GraphModule) and not has_layers:
        names = {node.name for node in module.graph.nodes if node.op == "placeholder"}
        return any("edge" in name or "adj" in name for name in names)
    return False


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    subclasses: list[type[Any]] = cls.__subclasses__()
    for one in subclasses:
        yield one
        yield from _subclasses(one)


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
