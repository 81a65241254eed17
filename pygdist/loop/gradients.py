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
        self._pending: dict[int, Tensor] = {}  # the gradients of this pass, by number of the parameter
        self.hooks: list[RemovableHandle] = [
            one.register_hook(partial(self._note, number)) for number, one in enumerate(self._parameters)
        ]

    def _note(self, number: int, gradient: Tensor) -> Tensor:
        if not self._pending:
            Variable._execution_engine.queue_callback(self._sum)
        self._pending[number] = gradient
        return torch.zeros_like(gradient)  # the sum is added at the end

    def _sum(self) -> None:
        """Send all gradients of a dtype at once, in the order of the parameters."""
        pending, self._pending = self._pending, {}
        with torch.no_grad():
            for dtype in dict.fromkeys(one.dtype for one in self._parameters):
                chosen = [number for number, one in enumerate(self._parameters) if one.dtype == dtype]
                parts = [pending.get(number, torch.zeros_like(self._parameters[number])) for number in chosen]
                flat = torch.cat([part.reshape(-1) for part in parts])
                self._communicator.reduce_in_place(flat, "gradients")
                sums = flat.split([part.numel() for part in parts])
                for number, part in zip(chosen, sums, strict=True):
                    parameter = self._parameters[number]
                    gradient = part.view_as(parameter)
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
