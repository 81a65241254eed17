"""The state of an optimiser (Adam's moments, say) where each part of the graph has one of its own.

A state is what torch keeps in ``optimizer.state``: for each parameter that was stepped, tensors and numbers by name,
or lists and dictionaries of them (LBFGS).
Here it is copied, averaged over parts, and brought to rank 0 for a checkpoint. There parameters go by their place in
the optimiser, as in its ``state_dict``, so that a checkpoint needs no pickled objects. Functions that take a
communicator are called on all ranks.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from pygdist.comm import Communicator
from pygdist.comm.transfer import as_bytes
from pygdist.errors import InputError

__all__ = ["State", "StateByNumber", "average", "by_number", "by_parameter", "copied", "gathered", "pack", "unpack"]

State: TypeAlias = Any  # a defaultdict, which torch's optimisers make and expect: tensors and numbers by parameter
StateByNumber: TypeAlias = dict[int, dict[str, Any]]
"""A state by the place that each parameter has in the optimiser."""


def copied(optimizer: Optimizer) -> State:
    """A copy of what the optimiser holds now, where it is."""
    found = type(optimizer.state)(dict)
    for parameter, entry in optimizer.state.items():
        found[parameter] = _changed(entry, lambda value, name: value.clone())
    return found


def by_number(optimizer: Optimizer, state: Mapping[Tensor, Mapping[str, Any]]) -> StateByNumber:
    """A state by the places of parameters; its tensors are not copied."""
    return {
        number: dict(state[parameter]) for number, parameter in enumerate(_parameters(optimizer)) if parameter in state
    }


def by_parameter(optimizer: Optimizer, state: StateByNumber) -> State:
    """The inverse of :func:`by_number`: a copy, placed and typed as torch's ``load_state_dict`` does it."""
    found = type(optimizer.state)(dict)
    places = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in state.items():
        parameter, group = places[number]
        found[parameter] = _changed(entry, partial(_placed, parameter, group))
    return found


def _placed(parameter: Tensor, group: Mapping[str, Any], value: Tensor, name: str | None) -> Tensor:
    """A copy of one tensor of a parameter's state, as ``Optimizer.load_state_dict`` would place it."""
    if name == "step":  # torch keeps the number of steps on the CPU, unless a kernel reads it
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device, torch.float32, copy=True) if on_device else value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() and value.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def _changed(value: Any, change: Callable[[Tensor, str | None], Tensor], name: str | None = None) -> Any:
    """A value of a state with other tensors; its lists and dictionaries are new. ``name`` is the key in the last."""
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, dict):
        return {key: _changed(one, change, key) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(one, change) for one in value)
    return value


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
        InputError: On all ranks, if two parts have states of different parameters, or lists of tensors in them.
    """
    rows = {part: _tensors(optimizer, state) for part, state in states.items() if state}
    layouts = {tuple((key, value.numel()) for key, value in row.items()) for row in rows.values()}
    layout = next(iter(layouts), ())
    share = sum(shares[part] for part in rows)
    found = [float(len(layouts)), float(zlib.crc32(repr(layout).encode())), share, sum(size for _, size in layout)]
    table = communicator.gather([*found, float(any(map(_has_lists, states.values())))])
    there = table[table[:, 0] > 0]
    if there.size(0) == 0:
        return
    if bool(there[:, 4].any()):
        raise InputError(
            f"optimizer_state=average: {type(optimizer).__name__} keeps lists of tensors, which have no mean; use "
            "local or reset"
        )
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
) -> tuple[dict[str, list[StateByNumber]], int]:
    """The states of all parts, on rank 0; all ranks call it.

    Args:
        optimizers: The optimisers.
        states: Of this rank's parts, a state of each optimiser.
        communicator: The ranks.

    Returns:
        The states by part, as text, nothing on other ranks than 0; and the bytes that all ranks together sent.
    """
    own = {
        str(part): [by_number(optimizer, state) for optimizer, state in zip(optimizers, mine, strict=True)]
        for part, mine in states.items()
    }
    if communicator.world_size == 1:
        return own, 0
    payload = pack(own if communicator.rank else {}).to(communicator.device)
    sizes = communicator.gather([float(payload.numel())])[1:, 0].long().tolist()
    if communicator.rank != 0:
        communicator.send_to(0, [payload], label="optimiser states")
        return {}, sum(sizes)
    for rank, size in enumerate(sizes, start=1):
        arrived = torch.empty(size, dtype=torch.uint8, device=communicator.device)
        communicator.receive_from(rank, [arrived], label="optimiser states")
        own |= unpack(arrived.cpu())
    return own, sum(sizes)


def pack(states: Mapping[str, Sequence[StateByNumber]]) -> Tensor:
    """States as bytes: a line of JSON that describes them, then the contents of their tensors; no pickle.

    Returns:
        uint8, on the CPU.
    """
    contents: list[Tensor] = []
    described = {part: [_described(optimizer, contents) for optimizer in mine] for part, mine in states.items()}
    head = (json.dumps(described, separators=(",", ":")) + "\n").encode()
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *contents])


def _described(value: Any, contents: list[Tensor]) -> Any:
    """A value as JSON, where an object has one key, its type; the bytes of tensors go to ``contents``."""
    if isinstance(value, Tensor):
        contents.append(as_bytes(value.detach().cpu().contiguous()))
        return {str(value.dtype).removeprefix("torch."): list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, _described(one, contents)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        inside = [_described(one, contents) for one in value]
        return inside if isinstance(value, list) else {"tuple": inside}
    return value


def unpack(payload: Tensor) -> dict[str, list[StateByNumber]]:
    """The inverse of :func:`pack`."""
    contents = io.BytesIO(payload.numpy().tobytes())
    described = json.loads(contents.readline())
    return {part: [_restored(optimizer, contents) for optimizer in mine] for part, mine in described.items()}


def _restored(described: Any, contents: io.BytesIO) -> Any:
    """The inverse of :func:`_described`."""
    if isinstance(described, list):
        return [_restored(one, contents) for one in described]
    if not isinstance(described, dict):
        return described
    ((kind, inside),) = described.items()
    if kind == "dict":
        return {key: _restored(one, contents) for key, one in inside}
    if kind == "tuple":
        return tuple(_restored(one, contents) for one in inside)
    dtype, count = getattr(torch, kind), torch.Size(inside).numel()
    if not count:
        return torch.empty(inside, dtype=dtype)
    return torch.frombuffer(bytearray(contents.read(count * dtype.itemsize)), dtype=dtype).reshape(inside)


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


def _has_lists(state: State) -> bool:
    return any(isinstance(value, (list, tuple, dict)) for entry in state.values() for value in entry.values())
