"""Gradients summed over ranks at the end of each backward pass, in place: the model stays the caller's own module."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from pygdist.comm import Communicator
from pygdist.errors import InputError

_DRIFT = 1e-5  # of the largest parameter; processors round differently


class SummedGradients:
    """Adds the gradients of all ranks at the end of each backward pass, as DDP does beside a wrapper.

    Gradients of several passes add up as on one process. A parameter that a rank's pass does not reach counts as zeros
    there. All ranks make as many backward passes.

    Ranks step their optimizers by themselves. Before the second step, the fourth, the eighth, and so on, they compare
    the parameters: with other learning rates they would drift apart in silence.

    Args:
        model: The model, with equal parameters on all ranks.
        communicator: The ranks.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._before: dict[int, Tensor | None] = {}  # gradients of earlier passes, by number of the parameter
        self._reached = set[int]()
        self._passes = 0
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
        self._passes += 1
        self._communicator.epoch = self._passes
        with torch.no_grad():
            if self._passes > 1 and self._passes.bit_count() == 1:
                self._compare()
            for dtype in dict.fromkeys(one.dtype for one in self._parameters):
                chosen = [number for number, one in enumerate(self._parameters) if one.dtype == dtype]
                parts = [mine.get(number, torch.zeros_like(self._parameters[number])) for number in chosen]
                flat = torch.cat([part.reshape(-1) for part in parts])
                self._communicator.reduce_in_place(flat, "gradients")
                for number, part in zip(chosen, flat.split([part.numel() for part in parts]), strict=True):
                    parameter = self._parameters[number]
                    gradient = part.view_as(parameter)
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)

    def _compare(self) -> None:
        """Compare the parameters of all ranks with their mean.

        Raises:
            InputError: On all ranks, if they differ by more than rounding.
        """
        here = [torch.view_as_real(one) if one.is_complex() else one for one in self._parameters]
        flat = torch.cat([one.detach().to(torch.float64).reshape(-1) for one in here])
        mean = flat.clone()
        self._communicator.reduce_in_place(mean, "parameters")
        mean /= self._communicator.world_size
        drift = float((flat - mean).abs().max() / mean.abs().max().clamp(min=1e-30))
        drifts = self._communicator.gather([drift])[:, 0]
        if not bool((drifts <= _DRIFT).all()):
            rank = int(drifts.nan_to_num(torch.inf).argmax())
            raise InputError(
                f"the parameters of the ranks differ after {self._passes - 1} backward passes, most on rank {rank} (by "
                f"{float(drifts[rank]):.1g} of the largest): all processes must make the same steps, with the same "
                "optimizer and learning rate"
            )
