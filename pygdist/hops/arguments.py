"""The tensors in a call's arguments and outputs, and the rows that they hold for nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.graph import Adjacency

__all__ = ["each_tensor", "first_rows", "mapped", "node_dim", "tensors_of", "with_rows"]


def mapped(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Any], Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, each changed by its name and value; those in tuples one by one."""
    parameters = inspect.signature(forward).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    names += [""] * (len(args) - len(names))

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(changed(name, one) for one in value)
        return change(name, value)

    made = tuple(changed(name, value) for name, value in zip(names, args, strict=False))
    return made, {name: changed(name, value) for name, value in kwargs.items()}


def each_tensor(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every tensor of an output changed: in tuples, lists, dictionaries and dataclasses, however deep."""
    return apply_to_collection(out, Tensor, change, wrong_dtype=Adjacency)


def tensors_of(out: Any) -> list[Tensor]:
    """Every tensor of an output."""
    found: list[Tensor] = []

    def note(one: Tensor) -> Tensor:
        found.append(one)
        return one

    each_tensor(out, note)
    return found


def first_rows(value: Tensor, held: tuple[int, ...], wanted: int, dim: int = 0) -> Tensor:
    """The first rows of a tensor that holds as many as one of ``held``; any other as it is."""
    return value.narrow(dim, 0, wanted) if value.size(dim) != wanted and value.size(dim) in held else value


def with_rows(layer: MessagePassing, value: Tensor, held: tuple[int, ...], num_rows: int) -> Tensor:
    """A tensor that holds as many rows as one of ``held``, and more below them, so that there are ``num_rows``.

    They are there for their number; what they hold is the first row, since steps that cannot go wrong on a node's row
    cannot on its copy (a norm of zeros divided by makes NaN of all gradients).
    """
    dim = node_dim(layer, value)
    if value.size(dim) not in held or value.size(dim) == num_rows:
        return value
    shape = list(value.shape)
    shape[dim] = num_rows - value.size(dim)
    more = value.detach().narrow(dim, 0, 1).expand(shape) if value.size(dim) else value.new_zeros(shape)
    return torch.cat([value, more], dim=dim)


def node_dim(layer: MessagePassing, value: Tensor) -> int:
    """Where a layer has its nodes; 0 in tensors without that dimension."""
    return layer.node_dim if value.dim() >= max(2, abs(layer.node_dim)) else 0
