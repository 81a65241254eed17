"""A clock that separates the time that a model spends in each hop from the time between hops."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pygdist.hops.hop import each_end


class Clock:
    """Separates the time that a model spends in each hop from the time between hops, forward and backward.

    Args:
        device: The device that the model runs on.

    Attributes:
        graded: The hops that have a backward pass. Hops over features have none, as these need no gradient.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.graded: set[int] = set()
        # (seconds, the hop that runs from then on or None, the last hop before that moment)
        self._marks: list[tuple[float, int | None, int]] = []

    def begin(self, hop: int) -> None:
        """Note that a hop begins. The time that follows counts as after it; a hop whose result is kept takes none."""
        self._mark(None, hop)

    def timed(self, hop: int, run: Callable[..., Tensor], kwargs: Mapping[str, Any]) -> Tensor:
        """Run ``run(**kwargs)`` and count it as a part of hop number ``hop``, from 1."""
        inside = {name: each_end(value, partial(self._leaving, hop)) for name, value in kwargs.items()}
        self._mark(hop, hop)
        out = run(**inside)
        self._mark(None, hop)
        if isinstance(out, Tensor) and out.requires_grad:  # not where an edge_updater leaves its work to the hop
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
                torch.autograd.grad(out, parameters, allow_unused=True)
            self._mark(None, 0)
            for (start, hop, after), (end, _, _) in itertools.pairwise(self._marks):
                # a model whose rows decide on its hops may make more than when it was tried
                if hop is None:
                    between[min(after, num_hops)] += end - start
                elif num_hops:
                    inside[min(hop, num_hops) - 1] += end - start
        return between, inside

    def _leaving(self, hop: int, value: Any) -> Any:
        """The argument of a hop, so that its gradient marks when it leaves the hop; other uses of it mark nothing."""
        if isinstance(value, Tensor) and value.requires_grad:
            return _Mark.apply(value, self, hop - 1)  # type: ignore[no-untyped-call]
        return value

    def _mark(self, hop: int | None, after: int) -> None:
        self._marks.append((running_s(self._device), hop, after))


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
    """Seconds for which this thread ran; on CUDA, seconds on the wall clock (:func:`wall_s`).

    Ranks that share a processor interrupt each other, which must not count as work.
    """
    return wall_s(device) if device.type == "cuda" else time.thread_time()


def wall_s(device: torch.device) -> float:
    """Seconds on the wall clock, once the device has done all the work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
