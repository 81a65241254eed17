"""Gradients averaged over ranks at the end of each backward pass, in place: the model stays the caller's own module.

Each rank multiplies its part of the mean by ``num_ranks``, so the average over ranks is the gradient of the whole loss.
A term that is equal on all ranks, such as a penalty on parameters, needs no factor.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from pygdist.comm import Communicator
from pygdist.comm.alike import rank_apart
from pygdist.comm.derivatives import SECOND_DERIVATIVE
from pygdist.errors import InputError

_HALVES = torch.bfloat16, torch.float16
_UNSCALED = (
    "backward() without graph.mean_loss(): gradients are averaged over processes, which have different numbers of "
    "nodes, so a mean over each process's own nodes is not the mean over all; use graph.mean_loss()"
)
_HOOKED = (
    "a hook on a parameter of a distributed model sees this process's share of the gradient, before the average over "
    "processes; change the parameters' .grad after backward() instead"
)
_ASKED = (
    "torch.autograd.grad returns this process's share of the gradients of parameters; the mean over processes is the "
    "whole gradient: use backward(), or average the shares"
)
_PASSED_ON = (
    "a backward pass begins without a graph.mean_loss, after inputs got gradients of one. Gradients of parameters are "
    "averaged over processes: if the pass begins with gradients of inputs, as in z.backward(rows.grad), multiply these "
    "by graph.num_ranks"
)


@dataclass(frozen=True)
class _Entry:
    """A parameter, held weakly: it lives as long as the loop has it."""

    reference: TensorWeakRef
    form: Tensor  # on the device "meta"
    hooks: tuple[RemovableHandle, RemovableHandle]

    @property
    def parameter(self) -> Tensor | None:
        parameter: Tensor | None = self.reference()
        return parameter

    @property
    def like(self) -> Tensor:
        """A tensor of its shape and dtype, also where no parameter lives."""
        return self.form if (one := self.parameter) is None else one

    @property
    def gradient(self) -> Tensor | None:
        return None if (one := self.parameter) is None else one.grad

    def put(self, gradient: Tensor) -> None:
        """Write into the gradient, if the parameter lives."""
        if (one := self.parameter) is None:
            return
        if one.grad is None or one.grad.layout != torch.strided:
            one.grad = torch.empty_like(one)
        one.grad.copy_(gradient.view_as(one))


class AveragedGradients:
    """Averages gradients over ranks at the end of each backward pass, as DDP does, but without a wrapper.

    Gradients of several passes add up as on one process: averages of earlier passes are equal on all ranks, so the
    average of a sum keeps them. A parameter that a rank does not reach counts as zeros there. All ranks make the same
    number of passes. A pass that fails must fail on all ranks. What it has added to gradients stays, as on one process;
    the next pass averages the sum.

    At the end of a pass all ranks say which parameters they have reached. Then the gradients of these travel. In a pass
    of a mean over the graph, a rank takes part in this exchange even if it has reached no parameter.

    Ranks step their optimizers by themselves. In the second, fourth, eighth, ... pass they compare the parameters: if
    learning rates differed, parameters would drift apart in silence.

    Args:
        communicator: The ranks.

    Attributes:
        scaled: A loss of the whole graph was made; without one a warning says that each process has a mean of its own.
        has_inputs: Inputs of the caller's own got gradients of the whole loss in some pass.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.scaled = self.has_inputs = False
        self._communicator = communicator
        self._models: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._of_models = WeakIdKeyDictionary()  # parameters of all models, also those that are frozen
        self._entries: dict[int, _Entry] = {}  # by number; the same numbers in the same order on all ranks
        self._numbers = WeakIdKeyDictionary()  # of parameters
        self._last_number = 0
        self._reached = set[int]()  # numbers of parameters, since the last average
        # autograd's numbers of backward passes: those that have begun, the last with a mean over the graph, the last
        # that got to a parameter, the last that added to a gradient
        self._begun, self._had_mean, self._got_to, self._added = set[int](), -1, -1, -1
        self._passes, self._told = 0, set[str]()

    def add(self, model: nn.Module) -> AddedModel:
        """Average the gradients of a model's parameters from now on."""
        self._models[model] = True
        self.look_at(model)
        return AddedModel(self, model)

    def remove(self, model: nn.Module) -> None:
        """Leave a model alone from now on, except for parameters that it shares with other models."""
        self._models.pop(model, None)
        of_others = {id(one) for other in self._models for one in other.parameters()}
        for one in model.parameters():
            if id(one) in of_others:
                continue
            self._of_models.pop(one, None)
            if one in self._numbers:
                for hook in self._entries.pop(self._numbers.pop(one)).hooks:
                    hook.remove()

    def is_of_model(self, tensor: Tensor) -> bool:
        """True for a parameter of a model."""
        return tensor in self._of_models

    def look_at(self, model: nn.Module) -> None:
        """Find parameters of a model that are new, or frozen no longer; inside of a backward pass do nothing."""
        if model not in self._models or not torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0:
            return
        self._begun.clear()  # of passes that failed
        for one in model.parameters():
            self._of_models[one] = True
            if one.requires_grad and one.is_leaf and one not in self._numbers:
                self._add(one)
            elif one in self._numbers and _has_other_hooks(one):
                self._tell(_HOOKED)

    def _add(self, parameter: nn.Parameter) -> None:
        number = self._last_number = self._last_number + 1
        hooks = (
            parameter.register_hook(self._get_to),
            parameter.register_post_accumulate_grad_hook(partial(self._reach, number)),
        )
        self._numbers[parameter] = number
        form = torch.empty_like(parameter, device="meta")
        self._entries[number] = _Entry(TensorWeakRef(parameter), form, hooks)

    def begin_loss(self) -> None:
        """Look at all models, before a loss of the graph: one that is called past its ``forward`` has run no hook."""
        self.scaled = True
        for model in list(self._models):
            self.look_at(model)

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            warnings.warn(words, stacklevel=2)

    def begin_mean(self, _: Tensor) -> None:
        """Hook on a mean over the graph: its backward pass begins, on all ranks."""
        self._had_mean = self._begin()

    def _get_to(self, _: Tensor) -> None:
        self._got_to = self._begin()

    def _begin(self) -> int:
        """Let autograd call ``_end`` at the end of this pass; return its number."""
        number = torch._C._current_graph_task_id()
        if number not in self._begun:
            self._begun.add(number)
            Variable._execution_engine.queue_callback(partial(self._end, number))
        return number

    def _reach(self, number: int, _: Tensor) -> None:
        self._reached.add(number)
        self._added = torch._C._current_graph_task_id()

    def _end(self, number: int) -> None:
        """Average the gradients; a pass inside of another (a reentrant checkpoint) leaves that to the outer one."""
        self._begun.discard(number)
        if self._begun and torch._C._current_autograd_node() is not None:
            return  # the pass around this one averages
        has_mean, adds = self._had_mean == number, self._added >= number
        if not has_mean and not adds:
            return
        if self._got_to >= number and not adds:  # torch.autograd.grad adds to no gradient
            self._tell(_ASKED)
        with torch.no_grad():
            reached, living = self._agree()
            if reached:
                self._average_all(reached, living, has_mean)

    def _agree(self) -> tuple[list[_Entry], list[_Entry]]:
        """Return the parameters that some rank has reached, and those that live on all; forget those that live on none.

        Raises:
            InputError: On all ranks, if a gradient of some rank has a graph.
        """
        more = self._communicator.world_size + 1
        entries, gradients = list(self._entries.items()), [one.gradient for one in self._entries.values()]
        has_graph = [one is not None and one.requires_grad for one in gradients]
        flags = [
            float(entry.parameter is not None) + more * (number in self._reached and gradient is not None)
            for (number, entry), gradient in zip(entries, gradients, strict=True)
        ]
        self._reached.clear()
        *found, some_have_graph = self._communicator.gather([*flags, float(any(has_graph))]).sum(dim=0).tolist()
        if some_have_graph:
            for (_, entry), has in zip(entries, has_graph, strict=True):
                if has and (one := entry.parameter) is not None:
                    one.grad = None  # or the next pass would be refused, too
            raise InputError(SECOND_DERIVATIVE)
        for (number, _), flag in zip(entries, found, strict=True):
            if flag == 0:
                del self._entries[number]
        reached = [entry for (_, entry), flag in zip(entries, found, strict=True) if flag >= more]
        return reached, [entry for (_, entry), flag in zip(entries, found, strict=True) if flag % more == more - 1]

    def _average_all(self, reached: list[_Entry], living: list[_Entry], has_mean: bool) -> None:
        if self.has_inputs and not has_mean:
            self._tell(_PASSED_ON)
        self._passes += 1
        if self._passes == 1 and not self.scaled:
            warnings.warn(_UNSCALED, stacklevel=2)
        self._communicator.epoch += 1
        if living and self._passes > 1 and self._passes.bit_count() == 1:  # not those reached alone: models take turns
            self._compare([entry.like for entry in living])
        for dtype in dict.fromkeys(entry.like.dtype for entry in reached):
            self._average([entry for entry in reached if entry.like.dtype == dtype])

    def _average(self, entries: list[_Entry]) -> None:
        """Send the gradients of a dtype at once."""
        gradients = [entry.gradient for entry in entries]
        device = next((one.device for one in gradients if one is not None), self._communicator.device)
        parts = [
            torch.zeros_like(entry.like, device=device) if one is None else one.to_dense()
            for entry, one in zip(entries, gradients, strict=True)
        ]
        flat = torch.cat([part.reshape(-1) for part in parts])
        flat = flat.float() if flat.dtype in _HALVES else flat  # sums of earlier passes would be rounded in each pass
        self._communicator.reduce_in_place(flat.div_(self._communicator.world_size), "gradients")
        for entry, mean in zip(entries, flat.split([part.numel() for part in parts]), strict=True):
            entry.put(mean)

    def _compare(self, parameters: list[Tensor]) -> None:
        """Compare the parameters with those of rank 0.

        Raises:
            InputError: On all ranks, if they differ by more than rounding.
        """
        if (rank := rank_apart(parameters, self._communicator, self._passes)) is not None:
            passes = "the first backward pass" if self._passes == 2 else f"{self._passes - 1} backward passes"
            raise InputError(
                f"the parameters of rank {rank} differ from those of rank 0 after {passes}: all processes must make "
                "the same steps, with the same optimizer and learning rate, and set parameters alike (call "
                "model.reset_parameters() with the same seed on all)"
            )


class AddedModel:
    """Lets :func:`~pygdist.undistribute` take a model out, as a handle of torch's does."""

    def __init__(self, gradients: AveragedGradients, model: nn.Module) -> None:
        self._gradients, self._model = gradients, model

    def remove(self) -> None:
        """Take the model out."""
        self._gradients.remove(self._model)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model has no hooks on its parameters

    def __reduce__(self) -> Any:
        return type(None), ()


def _has_other_hooks(parameter: Tensor) -> bool:
    """True if a parameter has more hooks than the two of :class:`AveragedGradients`."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(one is not None and len(one) > 1 for one in hooks)
