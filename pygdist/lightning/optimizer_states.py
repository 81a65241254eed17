"""States of optimisers (Adam's moments, say), one for each part of the graph.

A state is what torch keeps in ``optimizer.state``: for each parameter that was stepped, tensors and numbers by name,
or lists and dictionaries of them (LBFGS). States are copied, averaged over parts, and brought to rank 0 for a
checkpoint. In a checkpoint a parameter is named by its place in the optimiser, as in ``Optimizer.state_dict``, so
nothing is pickled. All ranks call the functions that take a communicator.
"""

from __future__ import annotations

import io
import json
import math
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
from pygdist.lightning.to_rank_zero import to_rank_zero

State: TypeAlias = Any  # a defaultdict, which torch's optimisers make and expect: tensors and numbers by parameter
# of torch's optimisers; they have an entry for each of the parameter's
_LIKE_PARAMETER = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "sum",
)
StateByNumber: TypeAlias = dict[int, dict[str, Any]]  # parameters are named by their places in the optimiser


def copied(optimizer: Optimizer) -> State:
    """Return a copy of the optimiser's state, on the same devices."""
    state = type(optimizer.state)(dict)
    for parameter, entry in optimizer.state.items():
        state[parameter] = _changed(entry, lambda value, name: value.clone())
    return state


def by_number(optimizer: Optimizer, state: Mapping[Tensor, Mapping[str, Any]]) -> StateByNumber:
    """Return a state by the places of parameters; its tensors are not copied."""
    return {
        number: dict(state[parameter]) for number, parameter in enumerate(_parameters(optimizer)) if parameter in state
    }


def by_parameter(optimizer: Optimizer, state: StateByNumber) -> State:
    """Invert :func:`by_number`; tensors are copies, with the devices and dtypes that ``load_state_dict`` gives them."""
    by_tensor = type(optimizer.state)(dict)
    places = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in state.items():
        parameter, group = places[number]
        by_tensor[parameter] = _changed(entry, partial(_placed, parameter, group))
    return by_tensor


def _placed(parameter: Tensor, group: Mapping[str, Any], value: Tensor, name: str | None) -> Tensor:
    """Return a copy of one tensor of a parameter's state, where ``Optimizer.load_state_dict`` would place it."""
    if name == "step":  # torch keeps the number of steps on the CPU unless a kernel reads it
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device, torch.float32, copy=True) if on_device else value.clone()
    dtype = parameter.dtype if parameter.is_floating_point() and value.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def _changed(value: Any, change: Callable[[Tensor, str | None], Tensor], name: str | None = None) -> Any:
    """Return a copy of a state's value with all tensors changed; ``name`` is its key in a dictionary."""
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, dict):
        return {key: _changed(one, change, key) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(one, change) for one in value)
    return value


def check(optimizers: Sequence[Optimizer], states: Sequence[StateByNumber], of: str = "optimizer_states") -> None:
    """Refuse states out of a checkpoint that are not those of these optimisers.

    Raises:
        InputError: If there are other numbers of optimisers or parameters, or a parameter's state is of another shape.
    """
    if len(states) != len(optimizers):
        raise InputError(f"the checkpoint has {of} of {len(states)} optimisers, but this run has {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=True):
        parameters = _parameters(optimizer)
        for number, entry in state.items():
            if type(number) is not int or not 0 <= number < len(parameters) or not isinstance(entry, dict):
                raise InputError(f"the checkpoint's {of}: parameter {number!r} is none of this run's {len(parameters)}")
            for name, value in entry.items():
                shape, numbers = parameters[number].shape, isinstance(value, (Tensor, int, float))
                if name in _LIKE_PARAMETER and (not isinstance(value, Tensor) or value.shape != shape):
                    raise InputError(f"the checkpoint's {of}: {name} of parameter {number} must be a tensor {[*shape]}")
                if name in _LIKE_PARAMETER and bool(value.isnan().any()):
                    raise InputError(f"the checkpoint's {of}: {name} of parameter {number} holds NaN")
                if name == "step" and (not numbers or (isinstance(value, Tensor) and value.numel() != 1)):
                    raise InputError(f"the checkpoint's {of}: step of parameter {number} must be a number")


def check_options(optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Refuse options of optimisers out of a checkpoint, such as ``lr``, that are not like this run's.

    Raises:
        InputError: Names the option.
    """
    for optimizer, saved in zip(optimizers, groups, strict=True):
        for number, group in enumerate(saved):
            for name, own in optimizer.defaults.items():
                if not _is_like(group.get(name), own):
                    raise InputError(
                        f"the checkpoint's optimizer_states: {name} of group {number} is {str(group.get(name))[:40]}, "
                        f"expected the like of this run's {own}: finite, and no less than 0"
                    )


def _is_like(value: Any, own: Any) -> bool:
    """Tell if an option holds as many numbers as this run's, finite and not negative; switches are left to torch."""
    if isinstance(own, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, bool) or not isinstance(own, (int, float, Tensor)):
        return True
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and (value >= 0 or bool(own < 0))


def average(
    optimizer: Optimizer, states: Mapping[int, State], shares: Mapping[int, float], communicator: Communicator
) -> None:
    """Average one optimiser's states over parts, in place, weighted by ``shares``; all ranks make the call.

    Floating-point tensors are averaged, which includes numbers of steps. Parts that never made a step have no state
    and get none.

    Raises:
        InputError: On all ranks, if two parts have states of different parameters, or lists of tensors in them.
    """
    rows = {part: _tensors(optimizer, state) for part, state in states.items() if state}
    layouts = {tuple((key, value.numel()) for key, value in row.items()) for row in rows.values()}
    layout = next(iter(layouts), ())
    share = sum(shares[part] for part in rows)
    checksum, size = float(zlib.crc32(repr(layout).encode())), float(sum(size for _, size in layout))
    has_lists = float(any(map(_has_lists, states.values())))
    table = communicator.gather([float(len(layouts)), checksum, share, size, has_lists])
    stepped = table[table[:, 0] > 0]  # ranks with states
    if stepped.size(0) == 0:
        return
    if bool(stepped[:, 4].any()):
        raise InputError(
            f"optimizer_state=average: {type(optimizer).__name__} keeps lists of tensors, which have no mean; use "
            "local or reset"
        )
    if bool((stepped[:, :2] != stepped.new_tensor([1.0, float(stepped[0, 1])])).any()):
        raise InputError(
            "optimizer_state=average: parts have states of different parameters, as some parameters got no gradient on "
            "some parts; use local or reset"
        )
    device = _parameters(optimizer)[0].device
    total = torch.zeros(int(stepped[0, 3]), dtype=torch.float64, device=device)
    for part, row in rows.items():
        total.add_(torch.cat([value.reshape(-1).to(total) for value in row.values()]), alpha=shares[part])
    if communicator.world_size > 1:
        communicator.reduce_in_place(total, "optimiser states")
    total /= float(stepped[:, 2].sum())
    for row in rows.values():
        for value, mean in zip(row.values(), total.split([value.numel() for value in row.values()]), strict=True):
            value.copy_(mean.view_as(value))


def gathered(
    optimizers: Sequence[Optimizer], states: Mapping[int, Sequence[State]], communicator: Communicator
) -> tuple[dict[str, list[StateByNumber]], int]:
    """Bring the states of all parts to rank 0; all ranks make the call with the states of each optimiser, by part.

    Returns:
        On rank 0 the states by part (its number as text), nothing on other ranks; and the bytes that all ranks sent.
    """
    by_part = {str(part): list(map(by_number, optimizers, mine)) for part, mine in states.items()}
    payload = pack(by_part if communicator.rank else {})
    sizes, arriving = to_rank_zero([payload], communicator, label="optimiser states")
    if communicator.rank:
        return {}, sum(sizes[1:])
    for (arrived,) in arriving:
        by_part |= unpack(arrived.cpu())
    return by_part, sum(sizes[1:])


def pack(states: Mapping[str, Sequence[StateByNumber]]) -> Tensor:
    """Turn states into bytes: a line of JSON that describes them, then the contents of their tensors; no pickle."""
    contents: list[Tensor] = []
    described = {part: [_described(optimizer, contents) for optimizer in mine] for part, mine in states.items()}
    head = (json.dumps(described, separators=(",", ":")) + "\n").encode()
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *contents])


def _described(value: Any, contents: list[Tensor]) -> Any:
    """Return a value as JSON, in which each object has one key, its type; append tensors' bytes to ``contents``."""
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
    """Invert :func:`pack`."""
    contents = io.BytesIO(payload.numpy().tobytes())
    described = json.loads(contents.readline())
    return {part: [_restored(optimizer, contents) for optimizer in mine] for part, mine in described.items()}


def _restored(described: Any, contents: io.BytesIO) -> Any:
    """Invert :func:`_described`."""
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
    """Return the tensors that are averaged, by the parameter's place and their name."""
    return {
        (number, name): value
        for number, entry in by_number(optimizer, state).items()
        for name, value in sorted(entry.items())
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _has_lists(state: State) -> bool:
    return any(isinstance(value, (list, tuple, dict)) for entry in state.values() for value in entry.values())
