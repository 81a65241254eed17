"""The state of an optimiser (Adam's moments, say) where each part of the graph has one of its own.

A state is what torch keeps in ``optimizer.state``: for each parameter that was stepped, tensors and numbers by name.
Here it is copied, averaged over parts, and brought to rank 0 for a checkpoint. There parameters go by their place in
the optimiser, as in its ``state_dict``, so that a checkpoint needs no pickled objects. Functions that take a
communicator are called on all ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from pygdist.comm import Communicator
from pygdist.errors import InputError

__all__ = ["State", "StateByNumber", "average", "by_number", "by_parameter", "copied", "gathered", "pack", "unpack"]

State: TypeAlias = Any  # a defaultdict, which torch's optimisers make and expect: tensors and numbers by parameter
StateByNumber: TypeAlias = dict[int, dict[str, Any]]
"""A state by the place that each parameter has in the optimiser."""


def copied(optimizer: Optimizer) -> State:
    """A copy of what the optimiser holds now."""
    return by_parameter(optimizer, by_number(optimizer, optimizer.state))


def by_number(optimizer: Optimizer, state: Mapping[Tensor, Mapping[str, Any]]) -> StateByNumber:
    """A state by the places of parameters; its tensors are not copied."""
    return {
        number: dict(state[parameter]) for number, parameter in enumerate(_parameters(optimizer)) if parameter in state
    }


def by_parameter(optimizer: Optimizer, state: StateByNumber) -> State:
    """The inverse of :func:`by_number`: a copy, on the devices of the parameters."""
    found = type(optimizer.state)(dict)
    parameters = _parameters(optimizer)
    for number, entry in state.items():
        found[parameters[number]] = {
            # torch keeps the number of steps on the CPU
            name: value.clone().to(parameters[number].device if value.dim() else value.device)
            if isinstance(value, Tensor)
            else value
            for name, value in entry.items()
        }
    return found


def average(
    optimizer: Optimizer, states: Mapping[int, State], shares: Mapping[int, float], communicator: Communicator
) -> None:
    """Average the states that parts have of one optimiser, in place; all ranks call it.

    Tensors of floating point are averaged, numbers of steps among them. Parts that never made a step have no state,
    and get none.

    Args:
        optimizer: Whose states they are.
        states: Of this rank's parts.
        shares: The weight of each of these parts.
        communicator: The ranks.

    Raises:
        InputError: On all ranks, if two parts have states of different parameters.
    """
    rows = {part: _tensors(optimizer, state) for part, state in states.items() if state}
    layouts = {tuple((key, value.numel()) for key, value in row.items()) for row in rows.values()}
    layout = next(iter(layouts), ())
    share = sum(shares[part] for part in rows)
    found = [float(len(layouts)), float(zlib.crc32(repr(layout).encode())), share, sum(size for _, size in layout)]
    table = communicator.gather(found)
    there = table[table[:, 0] > 0]
    if there.size(0) == 0:
        return
    if bool((there[:, :2] != there.new_tensor([1.0, float(there[0, 1])])).any()):
        raise InputError(
            "optimizer_state=average: parts have states of different parameters, some of which got no gradient; "
            "use local or reset"
        )
    device = _parameters(optimizer)[0].device
    total = torch.zeros(int(there[0, 3]), dtype=torch.float64, device=device)
    for part, row in rows.items():
        total.add_(torch.cat([value.reshape(-1).to(total) for value in row.values()]), alpha=shares[part])
    if communicator.world_size > 1:
        communicator.reduce_in_place(total, "optimiser states")
    total /= float(there[:, 2].sum())
    for row in rows.values():
        for value, mean in zip(row.values(), total.split([value.numel() for value in row.values()]), strict=True):
            value.copy_(mean.view_as(value))


def gathered(
    optimizers: Sequence[Optimizer], states: Mapping[int, Sequence[State]], communicator: Communicator
) -> dict[str, list[StateByNumber]]:
    """The states of all parts, on rank 0; all ranks call it.

    Args:
        optimizers: The optimisers.
        states: Of this rank's parts, a state of each optimiser.
        communicator: The ranks.

    Returns:
        By part, as text; nothing on other ranks than 0.
    """
    own = {
        str(part): [by_number(optimizer, state) for optimizer, state in zip(optimizers, mine, strict=True)]
        for part, mine in states.items()
    }
    if communicator.world_size == 1:
        return own
    payload = pack(own).to(communicator.device)
    sizes = communicator.gather([float(payload.numel())])[:, 0].long().tolist()
    if communicator.rank != 0:
        communicator.send_to(0, [payload], label="optimiser states")
        return {}
    for rank, size in enumerate(sizes[1:], start=1):
        arrived = torch.empty(size, dtype=torch.uint8, device=communicator.device)
        communicator.receive_from(rank, [arrived], label="optimiser states")
        own |= unpack(arrived.cpu())
    return own


def pack(states: Mapping[str, Sequence[StateByNumber]]) -> Tensor:
    """States as bytes: a line of JSON that describes the tensors, then their contents; no pickle.

    Returns:
        uint8, on the CPU.
    """
    described, contents = [], []
    for part, optimizers in states.items():
        for at, optimizer in enumerate(optimizers):
            for number, entry in optimizer.items():
                for name, value in entry.items():
                    known = [part, at, number, name]
                    if isinstance(value, Tensor):
                        contents.append(value.detach().cpu().contiguous().view(-1).view(torch.uint8))
                        described.append([*known, str(value.dtype).removeprefix("torch."), list(value.shape)])
                    else:
                        described.append([*known, None, value])
    shape = {part: len(optimizers) for part, optimizers in states.items()}
    head = (json.dumps([shape, described]) + "\n").encode()
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *contents])


def unpack(payload: Tensor) -> dict[str, list[StateByNumber]]:
    """The inverse of :func:`pack`."""
    raw = payload.numpy().tobytes()
    head, _, body = raw.partition(b"\n")
    shape, described = json.loads(head)
    states: dict[str, list[StateByNumber]] = {part: [{} for _ in range(count)] for part, count in shape.items()}
    offset = 0
    for part, at, number, name, dtype, rest in described:
        value = rest
        if dtype is not None:
            kind = getattr(torch, dtype)
            size = kind.itemsize * int(torch.Size(rest).numel())
            value = (
                torch.frombuffer(bytearray(body[offset : offset + size]), dtype=kind).reshape(rest)
                if size
                else torch.empty(rest, dtype=kind)
            )
            offset += size
        states[part][at].setdefault(number, {})[name] = value
    return states


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(optimizer: Optimizer, state: State) -> dict[tuple[int, str], Tensor]:
    """The tensors that are averaged, by the place of the parameter and name."""
    return {
        (number, name): value
        for number, entry in by_number(optimizer, state).items()
        for name, value in sorted(entry.items())
        if isinstance(value, Tensor) and value.is_floating_point()
    }
