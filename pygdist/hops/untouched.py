"""Puts a model back as it was after runs that its user did not ask for: rehearsals, timings and trials.

Whatever the user's code changes meanwhile is put back: attributes of modules and of other objects, containers, tensors,
attributes of classes, variables that functions close over, globals that they name, and random generators. Iterators
only go on, and cannot be put back: a model that holds one is refused here. Files and other processes are out of reach.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pygdist.graph.identity import identity_of

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torch_geometric", "torch_scatter", "torch_sparse", "torchmetrics", "numpy", "pygdist"),
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
}
_MISSING = object()
_OURS = "_pygdist"  # begins the names of attributes that pygdist itself keeps on a module


class IrreversibleError(Exception):
    """What a model holds that cannot be put back, as a clause: "its ``draws`` is an iterator"."""


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[Snapshot]:
    """Put back, at the end, whatever happens to ``model`` and all that it can reach, and to the random generators.

    Raises:
        IrreversibleError: If the model can reach an iterator, before anything runs.

    Example:
        >>> with untouched(model):
        ...     model(x, edge_index)
    """
    snapshot = Snapshot(model)
    try:
        yield snapshot
    finally:
        snapshot.restore()


class Snapshot:
    """Copies of all state that a model can reach.

    Attributes:
        changed: After :meth:`restore`: names of what had changed, random generators aside.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed: list[str] = []
        self._seen: dict[int, Any] = {}  # by id; held, so that no other object gets the same
        self._undo: list[tuple[str, Callable[[], bool]]] = []  # each returns True if there was something to undo
        self._random = [_of_random(), _of_numpy(), *_of_torch()]
        missing: list[tuple[str, Any]] = [(type(model).__name__, model)]
        while missing:
            name, one = missing.pop()
            if type(one) not in _PLAIN and id(one) not in self._seen:
                self._seen[id(one)] = one
                missing += self._remember(name, one)

    def restore(self) -> None:
        """Put everything back."""
        self.changed = [name for name, undo in self._undo if undo()]
        for undo in self._random:
            undo()

    def _remember(self, name: str, one: Any) -> Iterable[tuple[str, Any]]:
        """Note how to put an object back; return those that it holds, by name."""
        for kinds, copied in _CONTAINERS.items():
            if isinstance(one, kinds):
                self._undo.append((name, copied(one)))
                return [(name, value) for value in _values(one)]
        if isinstance(one, (tuple, frozenset)):
            return [(name, value) for value in one]
        if isinstance(one, Tensor):
            self._undo.append((name, _of_tensor(one)))
            return [(name, one.grad)] if one.is_leaf else []
        if isinstance(one, functools.partial):
            return [(name, value) for value in (one.func, one.args, one.keywords)]
        if isinstance(one, types.MethodType):
            return [(name, one.__self__), (name, one.__func__)]
        if isinstance(one, (classmethod, staticmethod)):
            return [(name, one.__func__)]
        if isinstance(one, property):
            return [(name, one.fget)]
        if isinstance(one, types.FunctionType):
            return self._remember_function(one)
        if isinstance(one, type):
            return self._remember_class(one)
        if isinstance(one, collections.abc.Iterator) and not isinstance(one, io.IOBase):
            raise IrreversibleError(f"{name} is an iterator ({type(one).__name__})")
        return self._remember_object(one)

    def _remember_object(self, one: Any) -> Iterable[tuple[str, Any]]:
        """Note the attributes of a module, or of an object of the user's."""
        cls = type(one)
        if not isinstance(one, nn.Module) and _of_library(cls):
            return []
        attributes = getattr(one, "__dict__", {})
        self._undo.append((cls.__name__, _of_attributes(attributes)))
        held = [(f"{cls.__name__}.{name}", value) for name, value in attributes.items() if not name.startswith(_OURS)]
        for name in _slots(cls):
            if hasattr(one, name):
                value = getattr(one, name)
                self._undo.append((f"{cls.__name__}.{name}", _of_name(one, name, value)))
                held.append((f"{cls.__name__}.{name}", value))
        return [*held, (cls.__name__, cls)]

    def _remember_class(self, cls: type) -> Iterable[tuple[str, Any]]:
        """Note the attributes of a class of the user's, and of those that it inherits from."""
        held = []
        for one in cls.__mro__:
            if not _of_library(one):
                self._undo.append((one.__name__, _of_class(one)))
                held += [(f"{one.__name__}.{name}", value) for name, value in vars(one).items()]
        return held

    def _remember_function(self, function: types.FunctionType) -> Iterable[tuple[str, Any]]:
        """Note variables that a function closes over, and globals that one of the user's names."""
        own = (function.__defaults__, function.__kwdefaults__, vars(function))
        held: list[tuple[str, Any]] = [(function.__name__, value) for value in own]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                self._undo.append((name, _of_name(cell, "cell_contents", cell.cell_contents)))
                held.append((name, cell.cell_contents))
        library = str(function.__globals__.get("__name__")).split(".")[0] in _LIBRARIES
        for name in () if library else _names(function.__code__):
            value = function.__globals__.get(name, _MISSING)
            self._undo.append((name, _of_global(function.__globals__, name, value)))
            if value is not _MISSING:
                held.append((name, value))
        return held


# -- one function for each kind of state: it copies the state, and returns what puts it back --------------------------


def _of_dict(one: dict[Any, Any]) -> Callable[[], bool]:
    items = list(one.items())

    def undo() -> bool:
        if _same(items, list(one.items())):
            return False
        one.clear()
        one.update(items)
        return True

    return undo


def _of_attributes(one: dict[str, Any]) -> Callable[[], bool]:
    """Those of pygdist's own stay as they are."""
    items = {name: value for name, value in one.items() if not name.startswith(_OURS)}

    def undo() -> bool:
        ours = {name: value for name, value in one.items() if name.startswith(_OURS)}
        if _same(list(items.items()), [item for item in one.items() if item[0] not in ours]):
            return False
        one.clear()
        one.update(items | ours)
        return True

    return undo


def _of_list(one: Any) -> Callable[[], bool]:
    values = list(one)

    def undo() -> bool:
        if len(values) == len(one) and all(left is right for left, right in zip(values, one, strict=True)):
            return False
        one.clear()
        one.extend(values)
        return True

    return undo


def _of_set(one: set[Any]) -> Callable[[], bool]:
    values = set(one)

    def undo() -> bool:
        if values == one:
            return False
        one.clear()
        one.update(values)
        return True

    return undo


def _of_array(one: np.ndarray) -> Callable[[], bool]:
    values = one.copy()

    def undo() -> bool:
        if np.array_equal(values, one, equal_nan=values.dtype.kind in "fc"):
            return False
        one[...] = values
        return True

    return undo


def _of_tensor(one: Tensor) -> Callable[[], bool]:
    if one.layout != torch.strided or is_lazy(one) or one.device.type == "meta":
        return lambda: False
    # the memory is held, so that a tensor that gets other memory does not get the same address
    memory, values, identity = one.detach(), one.detach().clone(), identity_of(one)
    grad, needs_grad = one.grad if one.is_leaf else None, one.requires_grad

    def undo() -> bool:
        if one.is_leaf:
            one.grad = grad
            one.requires_grad_(needs_grad)
        if identity_of(one) == identity and _equal(one.detach(), values):  # writes through .data are not counted
            return False
        with torch.no_grad():
            if identity_of(one)[:-1] != identity[:-1]:
                one.data = memory
            one.data.copy_(values)
        return True

    return undo


def _of_name(one: Any, name: str, value: Any) -> Callable[[], bool]:
    """Of an attribute; a cell has one, its contents."""

    def undo() -> bool:
        if getattr(one, name, None) is value:
            return False
        setattr(one, name, value)
        return True

    return undo


def _of_class(cls: type) -> Callable[[], bool]:
    attributes = dict(vars(cls))

    def undo() -> bool:
        now = dict(vars(cls))
        changed = [name for name in attributes if now.get(name, _MISSING) is not attributes[name]]
        for name in changed:
            setattr(cls, name, attributes[name])
        for name in now.keys() - attributes.keys():
            delattr(cls, name)
        return bool(changed) or len(now) > len(attributes)

    return undo


def _of_global(names: dict[str, Any], name: str, value: Any) -> Callable[[], bool]:
    def undo() -> bool:
        if names.get(name, _MISSING) is value:
            return False
        if value is _MISSING:
            del names[name]
        else:
            names[name] = value
        return True

    return undo


def _of_generator(one: Any) -> Callable[[], bool]:
    """Of a random generator of torch, NumPy or Python."""
    if isinstance(one, random.Random):
        return _state_by(one.getstate, one.setstate)
    if isinstance(one, torch.Generator):
        return _state_by(one.get_state, one.set_state)
    if isinstance(one, np.random.RandomState):
        return _state_by(one.get_state, one.set_state)
    bits = one.bit_generator
    return _state_by(lambda: bits.state, functools.partial(setattr, bits, "state"))


def _state_by(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], bool]:
    state = get()

    def undo() -> bool:
        put(state)
        return False  # to draw is no change of a model: on each rank it draws other numbers anyway

    return undo


def _of_random() -> Callable[[], bool]:
    return _state_by(random.getstate, random.setstate)


def _of_numpy() -> Callable[[], bool]:
    return _state_by(np.random.get_state, np.random.set_state)


def _of_torch() -> Iterator[Callable[[], bool]]:
    yield _state_by(torch.get_rng_state, torch.set_rng_state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield _state_by(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)


_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, types.ModuleType}
_CONTAINERS: dict[Any, Callable[[Any], Callable[[], bool]]] = {
    dict: _of_dict,
    (list, collections.deque, bytearray): _of_list,
    set: _of_set,
    np.ndarray: _of_array,
    (random.Random, torch.Generator, np.random.Generator, np.random.RandomState): _of_generator,
}


# -- parts of objects --------------------------------------------------------------------------------------------------


def _values(one: Any) -> Iterable[Any]:
    """What a container holds."""
    if isinstance(one, dict):
        return one.values()
    return one if isinstance(one, (list, collections.deque, set)) else ()


def _same(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    """True if these are the same objects, by the same names, in the same order."""
    return len(before) == len(now) and all(
        key == other and value is changed for (key, value), (other, changed) in zip(before, now, strict=True)
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    """True if all numbers are the same, or are none in both."""
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


def _slots(cls: type) -> Iterator[str]:
    for one in cls.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name


def _names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in a function's code, that of functions inside it included."""
    return {*code.co_names}.union(*(_names(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _of_library(cls: type) -> bool:
    return (cls.__module__ or "").split(".")[0] in _LIBRARIES
