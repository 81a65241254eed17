"""Layers that are alike: what was found of one of them need not be found of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.hops.layer import hooked, hooks_of, own_class

__all__ = ["TrialCache"]

T = TypeVar("T")


class TrialCache(Generic[T]):
    """What trials found, of each layer; layers that were made alike share it.

    A distributed layer keeps what was found when it was distributed, though its attributes change while it trains; but
    not if hooks on its hops are others.
    """

    def __init__(self, find: Callable[[MessagePassing], T]) -> None:
        self.find = find
        self.of_layer: WeakKeyDictionary[MessagePassing, tuple[tuple[int, ...], T]] = WeakKeyDictionary()
        self.of_class: WeakKeyDictionary[type, dict[str | None, T]] = WeakKeyDictionary()

    def of(self, layer: MessagePassing) -> T:
        """What is known of a layer, found if it is not."""
        hooks, known = hooks_of(layer), self.of_layer.get(layer)
        if known is None or known[0] != hooks:
            key = _key(layer)
            alike = {} if key is None else self.of_class.setdefault(own_class(layer), {})
            if key not in alike:
                with torch.device("cpu"), torch.inference_mode(False):  # gradients tell what a hop reads
                    alike[key] = self.find(layer)
            known = self.of_layer[layer] = hooks, alike[key]
        return known[1]


_LIBRARIES = ("torch", "torch_geometric", "pygdist")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
# what PyG's base class notes for itself; a layer of it would change the class
_NOTED = (name for name in MessagePassing.__init__.__code__.co_names if name.startswith("_"))
_OF_BASE = {*vars(nn.Module()), *_NOTED, "inspector"}


def _key(layer: MessagePassing) -> str | None:
    """The same for layers that differ in nothing but the numbers in their parameters; ``None`` if that is not known."""
    if hooked(layer):
        return None
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    said = [str(shapes)]
    for name, one in layer.named_modules():
        options = _options(one)
        known = one is layer or (_of_library(one) and not (one._forward_hooks or one._forward_pre_hooks))
        if options is None or not known:
            return None
        said.append(f"{name}: {own_class(one).__module__}.{own_class(one).__qualname__} {sorted(options.items())}")
    return "\n".join(said)


def _options(module: nn.Module) -> dict[str, Any] | None:
    """What a module was made with, if all of that is plain."""
    library = _of_library(module)
    if module._buffers and not library:
        return None
    found = {}
    for name, value in vars(module).items():
        if name in _OF_BASE or name.startswith("_pygdist") or (library and name.startswith("_")):
            continue
        if library and isinstance(value, Tensor):  # libraries' layers keep degrees and the like, but no options in it
            continue
        if not _is_plain(value):
            return None
        found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(one) for item in value.items() for one in item)
    if isinstance(value, (tuple, list)):
        return all(_is_plain(one) for one in value)
    return type(value) in _PLAIN


def _of_library(module: nn.Module) -> bool:
    return own_class(module).__module__.split(".")[0] in _LIBRARIES
