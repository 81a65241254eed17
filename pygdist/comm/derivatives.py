"""Refuses derivatives that pygdist does not compute: second derivatives, and derivatives by torch's transformations.

Torch's own ``once_differentiable`` treats some results as constants, and drops their derivatives without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from pygdist.errors import InputError

SECOND_DERIVATIVE = (
    "pygdist computes first derivatives alone, and a term of the loss needs a second one (create_graph=True); leave "
    "out that term, such as a gradient penalty, or call undistribute(model) and train on one process with the graph's "
    "own edge_index"
)

TRANSFORMED = (
    "a distributed model computes values, and gradients by backward(); torch.func, forward-mode derivatives, tracing "
    "and fake tensors are refused: call undistribute(model), and use the graph's own edge_index on one process"
)


def is_transformed() -> bool:
    """Tell if a transformation of torch is active, under which kernels and exchanges cannot run."""
    by_function = torch._C._functorch.maybe_current_level() is not None
    has_tangents = torch.autograd.forward_ad._current_level >= 0
    traced = torch.jit.is_tracing() or torch.compiler.is_exporting()
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return by_function or has_tangents or traced or fake


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let an autograd function's ``backward`` compute without a graph, and refuse derivatives of its results.

    Torch's decorator of this name refuses nothing if the incoming gradients need no gradient; but the gradients of
    attention also depend on the input rows.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            out = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # nobody asked for a graph
            return out
        return tuple(map(_refused, out)) if isinstance(out, tuple) else _refused(out)

    return run


def refuse_second_derivative(*_: Any) -> NoReturn:
    """Raise the error for a derivative that pygdist does not compute.

    Raises:
        InputError: Always; on all ranks, as they run the same model.
    """
    raise InputError(SECOND_DERIVATIVE)


def _refused(value: Any) -> Any:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return _Refused.apply(value.detach().requires_grad_())  # type: ignore[no-untyped-call]


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()
