"""Tells the time that a model spends in each hop from that between hops."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.base import names_of
from pygdist.errors import InputError

__all__ = ["Clock", "running_s"]


class Clock:
    """Tells the time that a model spends in each hop from that between hops, forward and backward.

    Args:
        device: Where the model runs.

    Attributes:
        graded: The hops that have a backward pass: not those over features, which need no gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graded: set[int] = set()
        # when, the hop that runs from then on, if any, and after which hop that is
        self._marks: list[tuple[float, int | None, int]] = []

    def begin(self, hop: int) -> None:
        """A hop begins, which may be kept and so take no time: what follows comes after it."""
        self._mark(None, hop)

    def timed(self, hop: int, run: Callable[..., Tensor], kwargs: Mapping[str, Any]) -> Tensor:
        """``run(**kwargs)`` as (a part of) hop number ``hop``, from 1."""
        inside = {name: self._leaving(value, hop) for name, value in kwargs.items()}
        self._mark(hop, hop)
        out = run(**inside)
        self._mark(None, hop)
        if isinstance(out, Tensor) and out.requires_grad:  # not where attention's weights are left to the hop
            self.graded.add(hop)
            out.register_hook(lambda _: self._mark(hop, hop))  # a layer may write into it
        return out

    def seconds(self, step: Callable[[], Tensor], parameters: list[Tensor], num_hops: int) -> tuple[list[float], ...]:
        """Seconds between hops (``num_hops + 1`` of them) and in hops, of one forward and backward pass."""
        between, inside = [0.0] * (num_hops + 1), [0.0] * num_hops
        for backward in (False, True):
            self._marks = []
            self._mark(None, num_hops if backward else 0)
            if not backward:
                out = step()
            elif out.requires_grad and parameters:
                _backward(out, parameters)
            self._mark(None, 0)
            for (start, hop, after), (end, _, _) in itertools.pairwise(self._marks):
                if hop is None:
                    between[after] += end - start
                else:
                    inside[hop - 1] += end - start
        return between, inside

    def _leaving(self, value: Any, hop: int) -> Any:
        """Marks where the gradient leaves a hop: by what the hop reads, apart from its other uses."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._leaving(one, hop) for one in value)
        if isinstance(value, Tensor) and value.requires_grad:
            return _Mark.apply(value, self, hop - 1)  # type: ignore[no-untyped-call]
        return value

    def _mark(self, hop: int | None, after: int) -> None:
        self._marks.append((running_s(self._device), hop, after))


def _backward(out: Tensor, parameters: list[Tensor]) -> None:
    try:
        torch.autograd.grad(out, parameters, allow_unused=True)
    except RuntimeError as error:
        if "torch.utils.checkpoint" not in str(error):
            raise
        raise InputError(
            "activation checkpointing (torch.utils.checkpoint) is not supported by backends that time the model's hops "
            f"or compute rows of neighbours; use backend {names_of(lambda abilities: abilities.reruns_layers)}"
        ) from error


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, after: int) -> Tensor:
        ctx.clock, ctx.after = clock, after
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock._mark(None, ctx.after)
        return grad, None, None


def running_s(device: torch.device) -> float:
    """Seconds for which this thread ran.

    Ranks that share a processor stop each other, and would count that to what is short by itself. On CUDA seconds on a
    clock, once the device has done what it was asked to.
    """
    return _now(device) if device.type == "cuda" else time.thread_time()


def _now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
