"""Tensors in the arguments and outputs of calls, and their rows of nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.graph import Adjacency
from pygdist.nn.nested import each_named, each_value


def mapped(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``change`` to the name and value of each argument of a call, and of all that collections among them hold.

    The values of a dictionary, a dataclass or PyG's ``Data`` have names of their own.
    """
    parameters = inspect.signature(forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names += [""] * (len(args) - len(names))
    positional = tuple(each_named(one, change, name, whole=()) for name, one in zip(names, args, strict=False))
    return positional, {name: each_named(one, change, name, whole=()) for name, one in kwargs.items()}


def copied(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same values in containers of their own: a model may write into the ``Data`` that it gets."""
    return mapped(forward, args, kwargs, lambda _, value: value)


def named_values(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the name and value of each argument of a call, in the order of :func:`mapped`."""
    values: list[tuple[str, Any]] = []

    def note(name: str, value: Any) -> Any:
        values.append((name, value))
        return value

    mapped(forward, args, kwargs, note)
    return values


def edges_among(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Adjacency]:
    """Return the edges among the arguments of a call."""
    return [value for _, value in named_values(forward, args, kwargs) if isinstance(value, Adjacency)]


def each_tensor(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to every tensor of an output: in tuples, lists, dictionaries and dataclasses, however deep."""
    return each_value(out, Tensor, change, but=(Adjacency,))


def tensors_of(out: Any) -> list[Tensor]:
    """Every tensor of an output."""
    tensors: list[Tensor] = []

    def note(one: Tensor) -> Tensor:
        tensors.append(one)
        return one

    each_tensor(out, note)
    return tensors


def first_rows(value: Tensor, possible: tuple[int, ...], wanted: int, dim: int = 0) -> Tensor:
    """Cut a tensor to its first ``wanted`` rows, if its number of rows is one of ``possible``; keep any other."""
    return value.narrow(dim, 0, wanted) if value.size(dim) != wanted and value.size(dim) in possible else value


def with_rows(layer: MessagePassing, value: Tensor, possible: tuple[int, ...], num_rows: int) -> Tensor:
    """Fill a tensor up to ``num_rows`` rows, if its number of rows is one of ``possible``; keep any other.

    The rows that are added are copies of the first one, since a step that works on a node's row works on its copy;
    zeros could make NaN of all gradients, where their norm is divided by.
    """
    dim = node_dim(layer, value)
    if value.size(dim) not in possible or value.size(dim) == num_rows:
        return value
    shape = list(value.shape)
    shape[dim] = num_rows - value.size(dim)
    more = value.detach().narrow(dim, 0, 1).expand(shape) if value.size(dim) else value.new_zeros(shape)
    return torch.cat([value, more], dim=dim)


def node_dim(layer: MessagePassing, value: Tensor) -> int:
    """The dimension in which a layer's tensor has its nodes; 0 in tensors without that dimension."""
    return layer.node_dim if value.dim() >= max(2, abs(layer.node_dim)) else 0
