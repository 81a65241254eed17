"""The pipeline of P3 (Sec. 3.3): three batches are on their way, so that exchanges and computing overlap.

Step *t* of an epoch of *T* batches, which has *T + 2* steps, on every rank:

====================  =============================================================================================
computes              and meanwhile
====================  =============================================================================================
first layer of *t*    terms of *t* leave for the owners of the batches
other layers of       their sum, posted in step *t - 1*, is taken; its gradient is posted after the backward pass
*t - 1*
gradients of the      the gradients of *t - 2*, posted in step *t - 1*, are taken
first layer of *t-2*
====================  =============================================================================================

So the gradient of the first layer's parameters is applied two optimiser steps after they were read, that of all others
without delay. At the end of an epoch nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch_geometric.data import Data

from pygdist.backends.sampling.totals import FirstLayer, Flight
from pygdist.comm.derivatives import once_differentiable
from pygdist.errors import InputError
from pygdist.hops.cuts import InEdges
from pygdist.sampler.steps import Steps

LAG = 2  # steps


class LaggedSteps:
    """The steps of a pipelined epoch: each yields the batch that is one step behind, with the one ahead of it.

    A batch has ``ahead``, the blocks of all ranks in the batch after it; the last one has none. Steps without a batch
    of any rank yield one without seeds, and without ``blocks``.

    Args:
        steps: The steps without a pipeline.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return len(self._steps) + LAG

    def epoch(self, number: int, first: int = 0) -> Iterator[Data]:
        """Iterate over the steps of an epoch.

        Raises:
            InputError: If ``first`` is not 0, as what was on its way is lost.
        """
        if first:
            raise InputError(
                "the checkpoint was made within an epoch, but pipeline=3 had batches on their way; resume from the end "
                "of an epoch"
            )
        behind = _nothing()
        for sample in self._steps.epoch(number):
            behind.ahead = sample.blocks
            yield behind
            behind = sample
        yield behind
        yield _nothing()

    def close(self) -> None:
        """End the thread that makes batches."""
        self._steps.close()

    def release(self) -> None:
        """End the thread, and close its process group."""
        self._steps.release()


def _nothing() -> Data:
    """Return a batch of no rank."""
    return Data(batch_size=0, num_in_step=0)


class Pipeline:
    """The flights of up to three batches.

    Args:
        first: The first layer, on a communicator for flights alone.
    """

    def __init__(self, first: FirstLayer) -> None:
        self._first = first
        self._ahead: Flight | None = None  # its terms were posted in this step
        self._running: Flight | None = None  # its sum is taken in this step, and its gradient posted
        self._behind: Flight | None = None  # its gradients are taken in this step
        self._trains_first = self._trains_others = False  # in this step, on some rank

    def begin_step(self, ahead: Sequence[InEdges] | None, *, weighted: bool) -> None:
        """Compute the first layer of the batches ahead and post the terms; every rank makes the call.

        ``weighted`` tells if the layer gets the weights of edges.
        """
        self._behind, self._running, self._ahead = self._running, self._ahead, None
        self._trains_first, self._trains_others = self._behind is not None, self._running is not None
        if ahead is not None:
            self._ahead = Flight(self._first, of_layer(ahead, weighted=weighted), lasts=True)
            self._ahead.post_terms()

    def total(self) -> Tensor | None:
        """Take the first layer's sum for this rank's batch; the backward pass notes its gradient.

        ``None`` if no rank has a batch in this step.
        """
        if self._running is None:
            return None
        total = self._running.total().requires_grad_()
        out: Tensor = _Landed.apply(self._running, total)  # type: ignore[no-untyped-call]
        return out

    def late_term(self) -> Tensor:
        """Return a zero whose backward pass gives the first layer's parameters the gradients of the batches behind."""
        if self._behind is None:  # DDP waits for a gradient of each parameter
            zeros = [one.sum() * 0 for one in self._first.parameters if one.requires_grad]
            return torch.stack(zeros).sum() if zeros else torch.zeros(())
        late = self._behind.gradients()
        self._behind = None
        out: Tensor = _Late.apply(late, *self._first.parameters)  # type: ignore[no-untyped-call]
        return out

    def not_trained(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters for which no rank has a gradient in this step."""
        first = set(map(id, self._first.parameters))
        return [one for one in parameters if not (self._trains_first if id(one) in first else self._trains_others)]

    def end_backward(self) -> None:
        """Post the gradient of this step's sum; every rank makes the call."""
        if self._running is not None and self._running.gradient is not None:
            self._running.post_gradient(self._running.gradient)

    def drain(self) -> None:
        """Take and drop what is on its way, on all ranks alike, where an epoch was cut."""
        for flight in (self._behind, self._running, self._ahead):
            if flight is not None:
                flight.drop()
        self._behind = self._running = self._ahead = None


class _Landed(Function):
    """A sum that has arrived: its gradient is noted, to be posted when DDP's sums, which are small, have passed."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, total: Tensor) -> Tensor:
        ctx.flight = flight
        return total.view_as(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.flight.gradient = gradient
        return None, None


class _Late(Function):
    """Zero, whose gradients are known: those of an earlier step."""

    @staticmethod
    def forward(ctx: Any, late: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.late = late
        return parameters[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(None if one is None else one * gradient for one in ctx.late))


def of_layer(blocks: Sequence[InEdges], *, weighted: bool) -> list[InEdges]:
    """Return blocks as a layer uses them: without weights if it gets none."""
    return [one if weighted else replace(one, weight=None) for one in blocks]
