"""Gradients averaged over ranks at the end of each backward pass, in place: the model stays the caller's own module.

Each rank multiplies its part of the mean by ``num_ranks``, so the average over ranks is the gradient of the whole loss.
A term that is equal on all ranks, such as a penalty on parameters, needs no factor.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from pygdist.comm import Communicator
from pygdist.comm.derivatives import SECOND_DERIVATIVE
from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.hops.arguments import mapped

_ROUNDINGS = 64  # within which parameters count as equal
_UNSCALED = (
    "backward() without graph.mean_loss(): gradients are averaged over processes, which have different numbers of "
    "nodes, so a mean over each process's own nodes is not the mean over all; use graph.mean_loss()"
)
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
_HOOKED = (
    "a hook on a parameter of a distributed model sees this process's share of the gradient, before the average over "
    "processes; change the parameters' .grad after backward() instead"
)
_ASKED = (
    "torch.autograd.grad returns this process's share of the gradients of parameters; the mean over processes is the "
    "whole gradient: use backward(), or average the shares"
)
_PASSED_ON = (
    "a backward pass without a mean of graph.mean_loss, after inputs got gradients of such a mean: if these gradients "
    "begin the pass, as in z.backward(rows.grad), multiply them by graph.num_ranks, since those of parameters are "
    "averaged over processes"
)
_INSIDE = (
    "a distributed model runs once more inside of a backward pass, by reentrant checkpointing, where gradients of its "
    "inputs cannot be told from those of the graph; use checkpoint(..., use_reentrant=False), or checkpoint inside of "
    "the model"
)


class AveragedGradients:
    """Averages the gradients of all ranks at the end of each backward pass, as DDP does, but without a wrapper.

    Gradients of several passes add up as on one process. A parameter that a rank's pass does not reach counts as zeros
    there. All ranks make as many backward passes. A pass that fails leaves what it has added so far, as on one process;
    the next one averages the sum.

    Ranks step their optimizers by themselves. In the second, fourth, eighth, ... backward pass they compare the
    parameters: with other learning rates they would drift apart in silence.

    Args:
        model: The model, with equal parameters on all ranks.
        communicator: The ranks.
        inputs: Inputs of all models of the graph.
        scaled: Tells if a loss of the whole graph was made; without one a warning says that processes count alike.
    """

    def __init__(
        self, model: nn.Module, communicator: Communicator, inputs: WholeInputs, *, scaled: Callable[[], bool]
    ) -> None:
        self._communicator, self._inputs, self._scaled = communicator, inputs, scaled
        self._hooks: dict[nn.Parameter, list[RemovableHandle]] = {}  # of the parameters, in the order of the ranks
        self._in_model = set[nn.Parameter]()
        self._reached = set[nn.Parameter]()  # since the last average
        self._begun, self._adds = set[int](), -1  # numbers of backward passes, as autograd counts
        self._told, self._passes = set[str](), 0
        self._found_in(model)

    def _found_in(self, model: nn.Module) -> None:
        self._in_model = set(model.parameters())
        for one in model.parameters():
            is_owned = one in self._inputs.owners and self._inputs.owners[one]() is not None
            if one.requires_grad and one.is_leaf and not is_owned:
                self._inputs.owners[one] = weakref.ref(self)
                hooks = one.register_hook(self._begin), one.register_post_accumulate_grad_hook(self._reach)
                self._hooks[one] = list(hooks)

    def remove(self) -> None:
        """Remove the hooks, as a handle of torch's does."""
        for parameter in list(self._hooks):
            self._let_go(parameter)

    def _let_go(self, parameter: nn.Parameter) -> None:
        for hook in self._hooks.pop(parameter):
            hook.remove()
        del self._inputs.owners[parameter]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the model has no hooks on its parameters

    def __reduce__(self) -> Any:
        return type(None), ()

    def look_at(self, model: nn.Module) -> None:
        """Outside of a backward pass: average the gradients of parameters that are new or no longer frozen, too."""
        self._found_in(model)
        if any(_has_other_hooks(one) for one in self._hooks):
            self._tell(_HOOKED)

    def _tell(self, words: str) -> None:
        if words not in self._told:
            self._told.add(words)
            warnings.warn(words, stacklevel=2)

    def _begin(self, _: Tensor) -> None:
        """Ask autograd for an average at the end of this pass, once."""
        number = torch._C._current_graph_task_id()
        if number not in self._begun:
            self._begun.add(number)
            Variable._execution_engine.queue_callback(partial(self._end, number))

    def _reach(self, parameter: nn.Parameter) -> None:
        self._reached.add(parameter)
        self._adds = torch._C._current_graph_task_id()

    def _end(self, number: int) -> None:
        """Average what the parameters have; a sum of earlier averages, equal on all ranks, is its own average."""
        self._begun.discard(number)  # those of failed passes stay: autograd uses no number again
        has_mean = self._inputs.mean_in_pass == number
        if self._adds != number:  # none here, or in a pass inside of this one
            if has_mean and self._adds < number:
                self._tell(_ASKED)
            return
        if self._inputs.has_gradients and not has_mean:
            self._tell(_PASSED_ON)
        self._passes += 1
        if self._passes == 1 and not self._scaled():
            warnings.warn(_UNSCALED, stacklevel=2)
        self._communicator.epoch += 1
        with torch.no_grad():
            if self._passes > 1 and self._passes.bit_count() == 1:
                self._compare()
            for dtype in dict.fromkeys(one.dtype for one in self._hooks):
                self._average([one for one in self._hooks if one.dtype == dtype])
        self._reached.clear()

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Send all gradients at once, and for each if this rank's passes have reached it; last, if one has a graph.

        Parameters that the model has no longer, and that no rank has reached, are let go: loops may call a model with
        new ones in each step.
        """
        mine = [one.grad for one in parameters]
        reached = [one in self._reached and one.grad is not None for one in parameters]
        flags = [*reached, any(one is not None and one.requires_grad for one in mine)]
        parts = [torch.zeros_like(one) if one.grad is None else one.grad.to_dense() for one in parameters]
        flat = torch.cat([*(part.reshape(-1) for part in parts), torch.tensor(flags).to(parts[0])])
        self._communicator.reduce_in_place(flat.div_(self._communicator.world_size), "gradients")
        *means, found = flat.split([*(part.numel() for part in parts), len(flags)])
        *some_reached, has_graph = (found != 0).tolist()
        if has_graph:
            raise InputError(SECOND_DERIVATIVE)
        for parameter, gradient, mean, has in zip(parameters, mine, means, some_reached, strict=True):
            if has:
                if gradient is None or gradient.layout != torch.strided:
                    gradient = parameter.grad = torch.empty_like(parameter)
                gradient.copy_(mean.view_as(parameter))
            elif parameter not in self._in_model:
                self._let_go(parameter)

    def _compare(self) -> None:
        """Compare sums over the parameters with those of rank 0.

        Rounding that differs between processors makes sums drift apart by about ``eps`` of the norm, and by its square
        root in many passes. Parameters that are NaN or infinite on all ranks alike are the loop's own affair.

        Raises:
            InputError: On all ranks, if sums differ by more.
        """
        with torch.no_grad():
            real = [torch.view_as_real(one) if one.is_complex() else one for one in self._hooks]
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
    """Identity whose backward pass divides by ``num_ranks``, for inputs of the caller's own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, inputs: WholeInputs) -> Tensor:
        ctx.inputs = inputs
        return rows.clone()  # which the model may change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.inputs.has_gradients = True
        return gradient / ctx.inputs.num_ranks, None


class WholeInputs:
    """Forward pre-hook: inputs of the caller's own, such as noise on the features, get the gradient of the whole loss.

    Args:
        num_ranks: Number of ranks.
        num_rows: Numbers of rows of tensors of this rank's nodes and of its edges. Inputs that depend on other tensors,
            of which each rank has a copy, are warned of.

    Attributes:
        owners: For each parameter, what averages its gradient.
        has_gradients: Inputs got gradients of the whole loss in some pass.
        mean_in_pass: Number of the latest backward pass of a mean over the graph, as autograd counts.
    """

    def __init__(self, num_ranks: int, num_rows: tuple[int, ...]) -> None:
        self.num_ranks, self._num_rows = num_ranks, num_rows
        self.has_gradients, self.mean_in_pass = False, -1
        self._looks, self._told = 0, False
        self.owners = WeakIdKeyDictionary()
        self._parameters = WeakIdKeyDictionary()  # also those that are frozen
        self._seen = WeakIdKeyDictionary()  # leaves of inputs, in forward passes
        self._models: weakref.WeakKeyDictionary[nn.Module, AveragedGradients] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeInputs:
        return self  # a copy of a model has parameters of its own

    def __reduce__(self) -> Any:
        return WholeInputs, (self.num_ranks, self._num_rows)

    def add(self, model: nn.Module, averaged: AveragedGradients) -> None:
        """Note a model and what averages its gradients."""
        self._models[model] = averaged
        self._note(model)

    def _note(self, model: nn.Module) -> None:
        for one in model.parameters():
            self._parameters[one] = True

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of a call."""
        if model in self._models:
            self._look_at(model)
        return mapped(model.forward, args, kwargs, self._whole)

    def _look_at(self, model: nn.Module) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0:
            self._models[model].look_at(model)
            self._note(model)

    def begin_loss(self) -> None:
        """Look for new parameters of all models, which may be called past their ``forward``."""
        for model in list(self._models):
            self._look_at(model)

    def note_pass(self, _: Tensor) -> None:
        """Hook on a mean over the graph: its backward pass begins."""
        self.mean_in_pass = torch._C._current_graph_task_id()

    def look_at_loss(self, loss: Tensor) -> None:
        """Warn, now and then, of leaves that reach a loss beside all models."""
        if self.num_ranks == 1 or not loss.requires_grad:
            return
        self._looks += 1
        if self._looks.bit_count() > 1:  # all but the first, second, fourth, eighth, ...
            return
        leaf = next((one for one in _leaves(loss) if one not in self._parameters), None)
        if leaf is not None:
            warnings.warn(_BESIDE.format(tuple(leaf.shape), self.num_ranks), stacklevel=3)

    def _whole(self, _: str, value: Any) -> Any:
        wants = isinstance(value, Tensor) and value.requires_grad and not isinstance(value, Adjacency)
        if not wants:
            return value
        leaves = []
        for one in _leaves(value):
            if one in self._parameters:
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


def _has_other_hooks(parameter: Tensor) -> bool:
    """True if a parameter has more hooks than the two of :class:`AveragedGradients`."""
    hooks = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
    return any(one is not None and len(one) > 1 for one in hooks)


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the tensors without history that a tensor was computed from; inputs of the caller's own aside."""
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


def _sums(flat: Tensor) -> Tensor:
    """Return the sum, the sum of every other one, and the sum of squares, in float64."""
    squares = torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2
    return torch.stack([flat.sum(dtype=torch.float64), flat[::2].sum(dtype=torch.float64), squares])
