"""Keeps what trials tell about a layer, for all layers that were made alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from pygdist.errors import InputError
from pygdist.hops.layer import hooked, hooks_of, is_changed, own_class
from pygdist.hops.untouched import IrreversibleError, untouched

T = TypeVar("T")


class TrialCache(Generic[T]):
    """The result of ``find``, which tries a layer, by layer; layers that were made alike share it.

    A layer keeps the result of its first trial although its numbers change while it trains. It is tried again if its
    hooks, its modules, or its options that are no numbers change.
    """

    def __init__(self, find: Callable[[MessagePassing], T]) -> None:
        self.find = find
        self.of_layer: WeakKeyDictionary[MessagePassing, tuple[Any, T]] = WeakKeyDictionary()
        self.of_class: WeakKeyDictionary[type, dict[str | None, T]] = WeakKeyDictionary()

    def of(self, layer: MessagePassing) -> T:
        """The result for ``layer``, which is tried if neither it nor a layer like it was."""
        state, tried = _state(layer), self.of_layer.get(layer)
        if tried is None or tried[0] != state:
            key = _key(layer)
            alike = {} if key is None else self.of_class.setdefault(own_class(layer), {})
            if key not in alike:
                with _on_cpu(), torch.inference_mode(False), _untouched(layer):  # gradients tell what a hop reads
                    alike[key] = self.find(layer)
            tried = self.of_layer[layer] = state, alike[key]
        return tried[1]


def _state(layer: MessagePassing) -> tuple[Any, ...]:
    """Return something that changes with what a layer computes, numbers aside."""
    modules = []
    for module in layer.modules():
        # Hooks on the layer itself get whole rows, and do not change how columns divide. A layer that is the model has
        # hooks of ours.
        hooks = () if module is layer else (*module._forward_hooks, *module._forward_pre_hooks)
        options = [
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, (bool, str, type(None))) and name != "training" and not name.startswith("_")
        ]
        modules.append((id(module), hooks, "forward" in vars(module), options))
    return hooks_of(layer), modules


@contextmanager
def _untouched(layer: MessagePassing) -> Iterator[None]:
    """A trial runs a copy of the layer. What its code changes elsewhere is put back here."""
    try:
        with untouched(layer):
            yield
    except IrreversibleError as error:
        raise InputError(f"could not be tried on a few nodes, nor put back afterwards: {error}") from error


def _on_cpu() -> AbstractContextManager[Any]:
    """Make new tensors on the CPU; they are made there as a rule, and the context of torch slows every operation."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


_LIBRARIES = ("torch", "torch_geometric", "pygdist")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
# attributes that PyG's base class sets; read off its code, as making a layer of that class would change the class
_NOTED = (name for name in MessagePassing.__init__.__code__.co_names if name.startswith("_"))
_OF_BASE = {*vars(nn.Module()), *_NOTED, "inspector"}


def _key(layer: MessagePassing) -> str | None:
    """A text that is equal for layers that differ only in the numbers in their parameters; ``None`` if none can be."""
    if hooked(layer) or any(map(is_lazy, layer.parameters())):
        return None
    lines = [str([(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()])]
    for name, module in layer.named_modules():
        options = _options(module)
        changed = module is not layer and is_changed(module)
        if options is None or changed or not (module is layer or _of_library(module)):
            return None
        cls = own_class(module)
        lines.append(f"{name}: {cls.__module__}.{cls.__qualname__} {sorted(options.items())}")
    return "\n".join(lines)


def _options(module: nn.Module) -> dict[str, Any] | None:
    """The options that a module was made with; ``None`` if some are not plain values."""
    library = _of_library(module)
    if module._buffers and not library:
        return None
    options = {}
    for name, value in vars(module).items():
        if name in _OF_BASE or name.startswith("_pygdist") or (library and name.startswith("_")):
            continue
        if library and isinstance(value, Tensor):  # libraries keep degrees and the like in tensors, but no options
            continue
        if not _is_plain(value):
            return None
        options[name] = value
    return options


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(one) for item in value.items() for one in item)
    if isinstance(value, (tuple, list)):
        return all(_is_plain(one) for one in value)
    return type(value) in _PLAIN


def _of_library(module: nn.Module) -> bool:
    return own_class(module).__module__.split(".")[0] in _LIBRARIES
