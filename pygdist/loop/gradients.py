"""Gradients summed over ranks at the end of each backward pass, in place: the model stays the caller's own module."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from pygdist.comm import Communicator


class SummedGradients:
    """Adds the gradients of all ranks at the end of each backward pass, as DDP does beside a wrapper.

    Gradients of several passes add up as on one process. A parameter that a rank's pass does not reach counts as zeros
    there. All ranks make as many backward passes.

    Args:
        model: The model, with equal parameters on all ranks.
        communicator: The ranks.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._before: dict[int, Tensor | None] = {}  # gradients of earlier passes, by number of the parameter
        self._reached = set[int]()
        self.hooks: list[RemovableHandle] = []
        for number, one in enumerate(self._parameters):
            self.hooks.append(one.register_hook(partial(self._set_aside, number)))
            self.hooks.append(one.register_post_accumulate_grad_hook(partial(self._reach, number)))

    def _set_aside(self, number: int, _: Tensor) -> None:
        """Put the gradient of earlier passes, which is summed already, aside before this pass adds its own."""
        if not self._before:
            Variable._execution_engine.queue_callback(self._sum)
        parameter = self._parameters[number]
        if number not in self._before:
            self._before[number], parameter.grad = parameter.grad, None

    def _reach(self, number: int, _: Tensor) -> None:
        self._reached.add(number)  # torch.autograd.grad adds to no parameter, and comes not here

    def _sum(self) -> None:
        """Send all gradients of a dtype at once, in the order of the parameters."""
        before, self._before = self._before, {}
        reached, self._reached = self._reached, set()
        mine = {number: one for number in reached if (one := self._parameters[number].grad) is not None}
        for number, gradient in before.items():
            self._parameters[number].grad = gradient
        if not reached:
            return
        with torch.no_grad():
            for dtype in dict.fromkeys(one.dtype for one in self._parameters):
                chosen = [number for number, one in enumerate(self._parameters) if one.dtype == dtype]
                parts = [mine.get(number, torch.zeros_like(self._parameters[number])) for number in chosen]
                flat = torch.cat([part.reshape(-1) for part in parts])
                self._communicator.reduce_in_place(flat, "gradients")
                for number, part in zip(chosen, flat.split([part.numel() for part in parts]), strict=True):
                    parameter = self._parameters[number]
                    gradient = part.view_as(parameter)
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
