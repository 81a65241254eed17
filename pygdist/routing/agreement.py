"""Ranks that begin a forward pass agree that they run the same model in the same way: one small exchange in each pass.

Modes, frozen parameters and the kinds of inputs decide which exchanges a pass and its backward pass make. A script may
set them on one rank alone.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex

from pygdist.backends.base import Backend
from pygdist.comm import PartCommunicator, describe_rows
from pygdist.errors import InputError

_MOST_NAMES = 4


def agree_on_pass(model: nn.Module, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare the pass that this rank begins with those of the others. Every rank that runs it makes the call.

    Raises:
        InputError: On all ranks, if their passes differ; the message says how.
        RuntimeError: On all ranks, if they made different exchanges before.
    """
    if backend.num_ranks == 1 or backend.abilities.trains_parts or isinstance(backend.communicator, PartCommunicator):
        return
    facts = [_mode(model), _frozen(model), _inputs(args, kwargs)]
    ranks = backend.communicator
    if ranks.are_alike([float(zlib.crc32(repr(fact).encode())) for fact in facts]):
        return
    for fact in facts:
        told = [text.split("; ") for text in ranks.gather_text("; ".join((fact.said, *fact.names)))]
        if any(one != told[0] for one in told):
            alike = set(told[0][1:]).intersection(*told)
            texts = (f"rank {rank} {_clause(said, names, alike)}" for rank, (said, *names) in enumerate(told))
            raise InputError(f"{', '.join(texts)}: all ranks must run {type(model).__name__} in the same way")
    raise InputError(f"the ranks run {type(model).__name__} with other modules or inputs")


class _Fact(NamedTuple):
    """Something that must be equal on all ranks: a clause about this rank, and the details."""

    said: str
    names: tuple[str, ...]


def _clause(said: str, names: list[str], alike: set[str]) -> str:
    """Say what sets a rank apart."""
    names = [name for name in names if name not in alike]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{said} {', '.join(names[:_MOST_NAMES])}{more}".strip()


def _mode(model: nn.Module) -> _Fact:
    """The mode of the model, and the modules in the other."""
    mode, gradients = model.training, torch.is_grad_enabled()
    others = tuple(name for name, module in model.named_modules() if module.training != mode)
    said = f"is in {'training' if mode else 'evaluation'}{'' if gradients or not mode else ' without gradients'}"
    return _Fact(f"{said}, but not" if others else said, others)


def _frozen(model: nn.Module) -> _Fact:
    """The parameters that get no gradient."""
    names = tuple(name for name, one in model.named_parameters() if not one.requires_grad)
    return _Fact("has frozen" if names else "has no frozen parameters", names)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Fact:
    """The kinds of the inputs: numbers of rows may differ."""
    named = [*((f"argument {number}", one) for number, one in enumerate(args)), *sorted(kwargs.items())]
    return _Fact("gives", tuple(f"{name}: {_kind(value)}" for name, value in named))


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor) or isinstance(value, EdgeIndex):
        return type(value).__name__
    graded = ", with gradient" if value.requires_grad and torch.is_grad_enabled() else ""
    return f"{describe_rows(value) if value.dim() else value.dtype} in {value.dim()} dimensions{graded}"
