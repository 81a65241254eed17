"""Gradients averaged over ranks at the end of each backward pass, in place: the model stays the caller's own module.

As with DDP, a loss's share of a rank counts ``num_ranks`` times there, so that the average is the gradient of the whole
loss, and a term that is the same on all ranks, such as a penalty on parameters, counts once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.arguments import mapped

_ROUNDINGS = 64  # within which parameters count as equal
_UNSCALED = (
    "backward() without graph.mean_loss(): gradients are averaged over the processes, so a mean over this process's "
    "nodes counts as much as that of a process with more of them; use graph.mean_loss()"
)


class AveragedGradients:
    """Averages the gradients of all ranks at the end of each backward pass, as DDP does beside a wrapper.

    Gradients of several passes add up as on one process. A parameter that a rank's pass does not reach counts as zeros
    there. All ranks make as many backward passes.

    Ranks step their optimizers by themselves. In the second, fourth, eighth, ... backward pass they compare the
    parameters: with other learning rates they would drift apart in silence.

    Args:
        model: The model, with equal parameters on all ranks.
        communicator: The ranks.
        scaled: Tells if a loss of the whole graph was made; without one a warning says that processes count alike.
    """

    def __init__(self, model: nn.Module, communicator: Communicator, *, scaled: Callable[[], bool]) -> None:
        self._communicator, self._scaled = communicator, scaled
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._before: dict[int, Tensor | None] = {}  # gradients of earlier passes, by number of the parameter
        self._reached = set[int]()
        self._passes = 0
        self.hooks: list[RemovableHandle] = []
        for number, one in enumerate(self._parameters):
            self.hooks.append(one.register_hook(partial(self._set_aside, number)))
            self.hooks.append(one.register_post_accumulate_grad_hook(partial(self._reach, number)))

    def _set_aside(self, number: int, _: Tensor) -> None:
        """Put the gradient of earlier passes, which is averaged already, aside before this pass adds its own."""
        if not self._before:
            Variable._execution_engine.queue_callback(self._average)
        parameter = self._parameters[number]
        if number not in self._before:
            self._before[number], parameter.grad = parameter.grad, None

    def _reach(self, number: int, _: Tensor) -> None:
        self._reached.add(number)  # torch.autograd.grad adds to no parameter, and comes not here

    def _average(self) -> None:
        """Send all gradients of a dtype at once, in the order of the parameters."""
        before, self._before = self._before, {}
        num_ranks = self._communicator.world_size
        reached, self._reached = self._reached, set()
        mine = {number: one for number in reached if (one := self._parameters[number].grad) is not None}
        for number, gradient in before.items():
            self._parameters[number].grad = gradient
        if not reached:
            return
        self._passes += 1
        if self._passes == 1 and not self._scaled():
            warnings.warn(_UNSCALED, stacklevel=2)
        self._communicator.epoch += 1
        with torch.no_grad():
            if self._passes > 1 and self._passes.bit_count() == 1:
                self._compare()
            for dtype in dict.fromkeys(one.dtype for one in self._parameters):
                chosen = [number for number, one in enumerate(self._parameters) if one.dtype == dtype]
                parts = [mine.get(number, torch.zeros_like(self._parameters[number])) for number in chosen]
                flat = torch.cat([part.reshape(-1) for part in parts])
                self._communicator.reduce_in_place(flat, "gradients")
                flat /= num_ranks
                for number, part in zip(chosen, flat.split([part.numel() for part in parts]), strict=True):
                    parameter = self._parameters[number]
                    gradient = part.view_as(parameter)
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)

    def _compare(self) -> None:
        """Compare sums over the parameters with those of rank 0.

        Rounding that differs between processors makes sums drift apart by about ``eps`` of the norm, and by its square
        root in many passes. Parameters that are NaN or infinite on all ranks alike are the loop's own affair.

        Raises:
            InputError: On all ranks, if sums differ by more.
        """
        with torch.no_grad():
            real = [torch.view_as_real(one) if one.is_complex() else one for one in self._parameters]
            sums = torch.stack([_sums(one.reshape(-1)) for one in real]).sum(dim=0)
        ranks = self._communicator.gather([float(sums[0]), float(sums[1]), float(sums[2].sqrt())])
        if not bool(ranks.isfinite().any()):
            return
        eps = max(torch.finfo(one.dtype).eps for one in real)
        alike = (ranks == ranks[0]) | (ranks.isnan() & ranks[0].isnan())  # infinities, too
        apart = torch.where(alike, 0.0, (ranks - ranks[0]).abs()).amax(dim=1)
        apart /= ranks[0, 2].clamp(min=torch.finfo(torch.float64).tiny)
        apart[0] = 0.0
        rank = int(apart.nan_to_num(torch.inf).argmax())
        if not float(apart[rank]) <= _ROUNDINGS * eps * self._passes**0.5:
            passes = "the first backward pass" if self._passes == 2 else f"{self._passes - 1} backward passes"
            raise InputError(
                f"the parameters of rank {rank} differ from those of rank 0 after {passes}: all processes must make "
                "the same steps, with the same optimizer and learning rate, and set parameters alike (call "
                "model.reset_parameters() with the same seed on all)"
            )


class _Whole(torch.autograd.Function):
    """Rows that get the gradient of the whole loss, where a rank's share counts ``num_ranks`` times."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.num_ranks, None


class WholeInputs:
    """Forward pre-hook: inputs of the caller's own, such as noise on the features, get the gradient of the whole loss.

    Args:
        num_ranks: Number of ranks.

    Attributes:
        parameters: Those of all distributed models: what was computed from these is no input of the caller's own.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self.parameters = num_ranks, list[nn.Parameter]()

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeInputs:
        return self  # a copy of a model has parameters of its own

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call."""
        return mapped(model.forward, args, kwargs, self._whole)

    def _whole(self, _: str, value: Any) -> Any:
        wants = isinstance(value, Tensor) and value.requires_grad and not isinstance(value, Adjacency)
        if not wants or _comes_of(value, {id(one) for one in self.parameters}):
            return value
        return _Whole.apply(value, self._num_ranks)  # type: ignore[no-untyped-call]


def _comes_of(value: Tensor, parameters: set[int]) -> bool:
    """True if a tensor is a parameter, or was computed from one."""
    if id(value) in parameters:
        return True
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        nodes.extend(one for one, _ in node.next_functions)
    return False


def _sums(flat: Tensor) -> Tensor:
    """Return the sum, the sum of every other one, and the sum of squares, in float64."""
    squares = torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2
    return torch.stack([flat.sum(dtype=torch.float64), flat[::2].sum(dtype=torch.float64), squares])
