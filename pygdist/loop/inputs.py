"""Inputs of the caller's own in a loop on several processes: their gradients are those of the whole loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.arguments import mapped
from pygdist.loop.gradients import AveragedGradients

_BESIDE = (
    "mean_loss: the loss depends on a tensor of shape {} that is neither a parameter of a distributed model nor an "
    "input of one: its gradient is that of this process's share, {} times; make it a parameter of a model that "
    "graph.distribute gets, or, if each process has rows of its own in it, divide its gradient by graph.num_ranks"
)
_SHARED = (
    "an input of the model depends on a tensor of shape {} that is no parameter of a distributed model and has no row "
    "for each node or edge of this process: its gradient is only this process's share of the whole one; make it a "
    "parameter of a model that graph.distribute gets, or add its gradients of all processes"
)
_INSIDE = (
    "a distributed model runs once more inside of a backward pass, by reentrant checkpointing, where gradients of its "
    "inputs cannot be told from those of the graph; use checkpoint(..., use_reentrant=False), or checkpoint inside of "
    "the model"
)


class _Whole(torch.autograd.Function):
    """Identity whose backward pass divides by ``num_ranks``, for inputs of the caller's own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inputs: WholeInputs) -> Tensor:
        ctx.inputs = inputs
        return rows.clone()  # which the model may change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.inputs.gradients.has_inputs = True
        return gradient / ctx.inputs.num_ranks, None


class WholeInputs:
    """Forward pre-hook: inputs of the caller's own, such as noise on the features, get the gradient of the whole loss.

    Args:
        gradients: Averages the gradients of models.
        num_ranks: Number of ranks.
        num_rows: Sizes of tensors with a row for each node, or each edge, of this rank. A tensor of another size is
            taken for a copy that each rank has; inputs that depend on one are warned of.
    """

    def __init__(self, gradients: AveragedGradients, num_ranks: int, num_rows: tuple[int, ...]) -> None:
        self.gradients, self.num_ranks, self._num_rows = gradients, num_ranks, num_rows
        self._looks, self._told = 0, False
        self._seen = WeakIdKeyDictionary()  # leaves of inputs, in forward passes

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeInputs:
        return self  # which knows the parameters of the model itself; those of a copy are not averaged

    def __reduce__(self) -> Any:
        return _LeftInputs, ()

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call."""
        self.gradients.look_at(model)
        return mapped(model.forward, args, kwargs, self._whole)

    def look_at_loss(self, loss: Tensor) -> None:
        """Warn of a leaf of a loss that is neither a parameter nor an input of a model; look at a few losses."""
        if self.num_ranks == 1 or not loss.requires_grad:
            return
        self._looks += 1
        if self._looks.bit_count() > 1:  # all but the first, second, fourth, eighth, ...
            return
        leaf = next((one for one in _leaves(loss) if not self.gradients.is_of_model(one)), None)
        if leaf is not None:
            warnings.warn(_BESIDE.format(tuple(leaf.shape), self.num_ranks), stacklevel=3)

    def _whole(self, _: str, value: Any) -> Any:
        wants = isinstance(value, Tensor) and value.requires_grad and not isinstance(value, Adjacency)
        if not wants:
            return value
        leaves = []
        for one in _leaves(value):
            if self.gradients.is_of_model(one):
                return value
            leaves.append(one)
        if torch._C._current_graph_task_id() >= 0 and any(one not in self._seen for one in leaves):
            raise InputError(_INSIDE)
        for one in leaves:
            self._seen[one] = True
        self._tell_of_copies(leaves)
        return _Whole.apply(value, self)  # type: ignore[no-untyped-call]

    def _tell_of_copies(self, leaves: list[Tensor]) -> None:
        copied = next((one for one in leaves if not one.dim() or one.size(0) not in self._num_rows), None)
        if copied is not None and not self._told:
            self._told = True
            warnings.warn(_SHARED.format(tuple(copied.shape)), stacklevel=4)


class _LeftInputs:
    """Stands for the hook in an unpickled model: nothing is averaged there."""

    def __call__(self, *_: Any) -> None:
        return None


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves from which a tensor was computed, but none behind inputs of the caller's own."""
    if value.grad_fn is None:
        yield value
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        elif not type(node).__name__.startswith(_Whole.__name__):
            nodes.extend(one for one, _ in node.next_functions)
