"""The models of a rank's parts: each part has parameters, buffers and optimiser states of its own.

The module holds those of one part at a time, and optimisers step them there; those of the other parts wait here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pygdist.comm import Communicator
from pygdist.lightning.optimizer_states import State, average, by_number, by_parameter

OptimizerState: TypeAlias = Literal["local", "average", "reset"]


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return what is averaged: all parameters, frozen ones included, and buffers; not copied."""
    return [value.detach() for value in (*module.parameters(), *module.buffers())]


@dataclass
class _PartModel:
    """The model and optimiser states of one part."""

    states: list[State]  # of each optimiser, by parameter
    values: list[Tensor] | None = None  # while another part's model is in the module; None if it is the last average


class PartModels:
    """The models of this rank's parts; the module holds that of one of them.

    ``module`` holds the model with which all parts begin, and ``optimizers`` step its parameters. ``shares`` holds each
    part's share of all training nodes, ``states`` the states with which its optimisers begin.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        shares: Mapping[int, float],
        states: Mapping[int, list[State]],
    ) -> None:
        self._module, self._optimizers, self._shares = module, optimizers, shares
        self._parts = {part: _PartModel(mine) for part, mine in states.items()}
        self._average = self.copies() if len(self._parts) > 1 else None  # the last one
        self._current: int | None = None  # the part whose model the module holds

    @property
    def states(self) -> dict[int, list[State]]:
        """By part, the state of each optimiser."""
        return {part: one.states for part, one in self._parts.items()}

    def copies(self) -> list[Tensor]:
        """Return a copy of the model that the module holds."""
        return [value.clone() for value in tensors_of(self._module)]

    def assign(self, values: Iterable[Tensor]) -> None:
        """Copy a model into the module."""
        with torch.no_grad():
            for tensor, value in zip(tensors_of(self._module), values, strict=True):
                tensor.copy_(value)

    def enter(self, part: int) -> None:
        """Put a part's model and optimiser states into the module and the optimisers."""
        if part == self._current or part not in self._parts:
            return
        if self._current is not None:
            self._parts[self._current].values = self.copies()
            self.assign(self._values_of(part))
        for optimizer, state in zip(self._optimizers, self._parts[part].states, strict=True):
            optimizer.state = state
        self._current = part

    def _values_of(self, part: int) -> list[Tensor]:
        """Return the model of a part that is not in the module."""
        mine = self._parts[part].values
        values = self._average if mine is None else mine
        assert values is not None, "a rank with several parts keeps the last average"
        return values

    def mean(self, communicator: Communicator, label: str) -> list[Tensor]:
        """Return the mean of all parts' models, weighted by their training nodes; all ranks make the call."""
        held = tensors_of(self._module)
        mean = [torch.zeros_like(value, dtype=_summed_in(value)) for value in held]
        for part, share in self._shares.items():
            in_module = part == self._current or self._current is None
            for total, value in zip(mean, held if in_module else self._values_of(part), strict=True):
                total.add_(value.to(total.dtype), alpha=share)
        _sum_over_ranks(mean, communicator, label)
        return [
            (total if _is_real(value) else total.round()).to(value.dtype)
            for total, value in zip(mean, held, strict=True)
        ]

    def replace_all(self, averaged: list[Tensor], policy: OptimizerState, communicator: Communicator) -> None:
        """Give all parts the averaged model, and their optimisers what the policy says; all ranks make the call."""
        for number, optimizer in enumerate(self._optimizers):
            states = {part: one.states[number] for part, one in self._parts.items()}
            if policy == "average":
                average(optimizer, states, self._shares, communicator)
            elif policy == "reset":
                for state in states.values():
                    state.clear()
        self.assign(averaged)
        for one in self._parts.values():
            one.values = None
        if self._average is not None:
            self._average = averaged

    def follow_parameters(self) -> None:
        """Move the optimisers' states to where the parameters are now."""
        for one in self._parts.values():
            numbered = map(by_number, self._optimizers, one.states)
            one.states = list(map(by_parameter, self._optimizers, numbered))


def _summed_in(value: Tensor) -> torch.dtype:
    """Return a dtype in which a mean of equal values is that value: shares are no exact numbers of half precision."""
    if value.dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    return value.dtype if _is_real(value) else torch.float64


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _sum_over_ranks(values: Sequence[Tensor], communicator: Communicator, label: str) -> None:
    """Sum tensors over all ranks, in place; one call for each dtype."""
    if communicator.world_size == 1:
        return
    for dtype in sorted({value.dtype for value in values}, key=str):
        of_type = [value for value in values if value.dtype == dtype]
        flat = torch.cat([value.reshape(-1) for value in of_type])
        communicator.reduce_in_place(flat, label)
        for value, piece in zip(of_type, flat.split([value.numel() for value in of_type]), strict=True):
            value.copy_(piece.view_as(value))
