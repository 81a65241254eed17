"""Refuses models that hold values of edges in the order in which their user gave the edges."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.layer import own_class
from pygdist.hops.rebinding import methods_of
from pygdist.hops.untouched import globals_of


def refuse_values_of_edges(model: nn.Module, shard: Shard, switch: str) -> None:
    """Refuse a model that holds a tensor with a value for each edge of the graph: a parameter, a buffer, a mask.

    Such values are in the order of the user's edges. A part has its edges by destination, so only one part whose edges
    came sorted keeps that order.

    Raises:
        InputError: On all ranks; the message names the tensor and ends with ``switch``.
    """
    num_edges, tables = shard.num_edges, shard.num_edges != shard.num_nodes  # else tables are more likely of nodes
    held = next((name for name, one in _held_tensors(model, tables) if _is_of_edges(one, num_edges)), None)
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


def _held_tensors(model: nn.Module, tables: bool) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a user's own modules hold, or read by name; those of torch's and PyG's layers aside.

    Embeddings are looked at if ``tables``.
    """
    for path, module in model.named_modules():
        cls, start = own_class(module), path + "." * bool(path)
        if not cls.__module__.startswith(("torch.", "torch_geometric.", "pygdist.")):
            for name, value in vars(module).items():
                if not name.startswith("_"):
                    yield from ((start + name, one) for one in tree_leaves(value))
            functions = [one for one in vars(module).values() if isinstance(one, types.FunctionType)]
            for function in (*methods_of(cls), *functions):
                yield from _read_by_name(function)
        elif not isinstance(module, (nn.ParameterList, nn.ParameterDict, *((nn.Embedding,) if tables else ()))):
            continue
        for name, one in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield start + name, one


def _read_by_name(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that its code reads; of a ``Data`` among them, what is named there."""
    for name, value in _variables(function):
        if isinstance(value, Data):
            named = set(_names(function.__code__))
            yield from ((f"{name}.{key}", one) for key, one in value.items() if key in named)
        else:
            yield name, value


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of attributes and global variables in a function's code, and in that of functions within."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name in globals_of(function.__code__, "LOAD_GLOBAL"):
        yield name, function.__globals__.get(name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in the cell yet
            yield name, cell.cell_contents


def _is_of_edges(value: Any, num_edges: int) -> bool:
    """True for a tensor with a row or a column for each edge; ``(2, E)`` integers are edges themselves."""
    if not isinstance(value, Tensor) or is_lazy(value) or not value.dim() or num_edges < 2:
        return False
    edges = value.dim() == 2 and value.size(0) == 2 and not value.is_floating_point()
    return num_edges in (value.size(0), value.size(-1)) and not edges
