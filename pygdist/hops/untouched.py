"""Puts a model back as it was after runs that its user did not ask for: rehearsals, timings and trials.

Whatever the user's code changes meanwhile is put back: attributes of modules and of other objects, containers, tensors,
attributes of classes, variables that functions close over, globals whose names are in their code, and random
generators. A model that holds an iterator is refused here, because an iterator cannot go back. Files, other processes,
attributes of modules of Python and the insides of installed libraries' objects are out of reach.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dis
import functools
import io
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric import EdgeIndex
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage

from pygdist.graph.identity import place_of

_MISSING = object()
_LIBRARIES = {"pygdist", "torch", "torch_geometric", "lightning", "lightning_fabric", "pytorch_lightning"}
_RECORDS = (argparse.Namespace, types.SimpleNamespace, BaseData, BaseStorage)  # of libraries, but they hold the user's
_OURS = "_pygdist"  # begins the names of attributes that pygdist itself keeps on a module


class IrreversibleError(Exception):
    """A model holds something that cannot be put back; the message is a clause: "its ``draws`` is an iterator"."""


@contextlib.contextmanager
def untouched(model: nn.Module, *, most_bytes: float = float("inf")) -> Iterator[Snapshot]:
    """Put back, at the end, whatever happens to ``model`` and all that it can reach, and to the random generators.

    Raises:
        IrreversibleError: If the model can reach an iterator, or more than ``most_bytes`` of tensors, before anything
            runs.

    Example:
        >>> with untouched(model):
        ...     model(x, edge_index)
    """
    snapshot = Snapshot(model, most_bytes)
    try:
        yield snapshot
    finally:
        snapshot.restore()


class Snapshot:
    """Copies of all state that a model can reach.

    Attributes:
        changed: After :meth:`restore`: names of what had changed; the generators of torch that are nobody's own aside.
    """

    def __init__(self, model: nn.Module, most_bytes: float = float("inf")) -> None:
        self.changed: list[str] = []
        self._bytes_left = most_bytes
        self._seen: dict[int, Any] = {}  # by id; held, so that no other object gets the same
        self._storages: dict[int, torch.UntypedStorage] = {}  # likewise; many tensors may share one
        self._undo: list[tuple[str, Callable[[], bool]]] = []  # each returns True if there was something to undo
        self._random = list(_of_global_generators())
        # a user's package may be installed, too
        self._own = {_root(type(one).__module__) for one in model.modules()} - _LIBRARIES
        missing: list[tuple[str, Any]] = [(type(model).__name__, model)]
        while missing:
            name, one = missing.pop()
            if type(one) not in _PLAIN and id(one) not in self._seen:
                self._seen[id(one)] = one
                missing += self._remember(name, one)

    def restore(self) -> None:
        """Put everything back; what fails is told after the rest is back."""
        errors: list[Exception] = []
        for name, undo in [*self._random, *self._undo]:
            try:
                if undo() and name:
                    self.changed.append(name)
            except Exception as error:  # whatever an object of the user's says
                errors.append(error)
        if errors:
            raise errors[0]

    def _remember(self, name: str, one: Any) -> Iterable[tuple[str, Any]]:
        """Note how to put an object back; return those that it holds, by name."""
        for kinds, copied in _CONTAINERS.items():
            if isinstance(one, kinds):
                self._undo.append((name, copied(one)))
                return [*((name, value) for value in _values(one)), *self._remember_object(one)]
        if isinstance(one, (tuple, frozenset)):
            return [(name, value) for value in one]
        if isinstance(one, EdgeIndex):  # has no memory but that of the tensors in it
            return [(name, value) for value in vars(one).values()]
        if isinstance(one, Tensor):
            return self._remember_tensor(name, one)
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

    def _remember_tensor(self, name: str, one: Tensor) -> Iterable[tuple[str, Any]]:
        """Note a tensor, and once the memory that it shares with others."""
        if one.layout != torch.strided or one.is_nested or is_lazy(one) or one.device.type == "meta":
            return []
        self._undo.append((name, _of_tensor(one)))
        storage = one.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage
            self._bytes_left -= storage.nbytes()
            if self._bytes_left < 0:
                raise IrreversibleError(f"{name} and the tensors before it take too much memory to copy")
            self._undo.append((name, _of_storage(storage)))
        return [(name, one.grad)] if one.is_leaf else []

    def _remember_object(self, one: Any) -> Iterable[tuple[str, Any]]:
        """Note the attributes of a module, or of an object of the user's."""
        cls = type(one)
        if not isinstance(one, (nn.Module, *_RECORDS)) and self._of_library(cls):
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
            if not self._of_library(one):
                self._undo.append((one.__name__, _of_class(one)))
                held += [(f"{one.__name__}.{name}", value) for name, value in vars(one).items()]
        return held

    def _remember_function(self, function: types.FunctionType) -> Iterable[tuple[str, Any]]:
        """Note variables that a function closes over, and globals that one of the user's names."""
        containers = (function.__defaults__, function.__kwdefaults__, vars(function))
        held: list[tuple[str, Any]] = [(function.__name__, value) for value in containers]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                self._undo.append((name, _of_name(cell, "cell_contents", cell.cell_contents)))
                held.append((name, cell.cell_contents))
        library = self._is_library(str(function.__globals__.get("__name__")))
        for name in () if library else globals_of(function.__code__):
            value = function.__globals__.get(name, _MISSING)
            self._undo.append((name, _of_global(function.__globals__, name, value)))
            if value is not _MISSING:
                held.append((name, value))
        return held

    def _of_library(self, cls: type) -> bool:
        return self._is_library(cls.__module__ or "")

    def _is_library(self, module: str) -> bool:
        return _root(module) not in self._own and _is_library(_root(module))


# -- one function for each kind of state: it copies the state, and returns what puts it back --------------------------


def _of_dict(one: dict[Any, Any]) -> Callable[[], bool]:
    # by the methods of the base class: a counter's own update() adds up
    kind: Any = collections.OrderedDict if isinstance(one, collections.OrderedDict) else dict
    items = list(kind.items(one))

    def undo() -> bool:
        if _same(items, list(kind.items(one))):
            return False
        kind.clear(one)
        for key, value in items:
            kind.__setitem__(one, key, value)
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
    kind: Any = next(kind for kind in (list, collections.deque, bytearray) if isinstance(one, kind))
    values = list(kind.__iter__(one))

    def undo() -> bool:
        now = list(kind.__iter__(one))
        if len(values) == len(now) and all(left is right for left, right in zip(values, now, strict=True)):
            return False
        kind.clear(one)
        kind.extend(one, values)
        return True

    return undo


def _of_set(one: set[Any]) -> Callable[[], bool]:
    values = set(set.__iter__(one))

    def undo() -> bool:
        if set.__eq__(values, one):
            return False
        set.clear(one)
        set.update(one, values)
        return True

    return undo


def _of_array(one: np.ndarray) -> Callable[[], bool]:
    values = one.copy()

    def undo() -> bool:
        if values.dtype.hasobject:
            same = all(left is right for left, right in zip(values.flat, one.flat, strict=True))
        else:
            same = values.tobytes() == one.tobytes()
        if not same:
            one[...] = values
        return not same

    return undo


def _of_tensor(one: Tensor) -> Callable[[], bool]:
    # holds the old memory, so that new memory cannot get its address
    memory, place, is_leaf = one.detach(), place_of(one), one.is_leaf
    grad, needs_grad = one.grad if is_leaf else None, one.requires_grad

    def undo() -> bool:
        if is_leaf and not one.is_leaf:  # something with a gradient was written into it
            one.detach_()
        moved = place_of(one) != place
        if moved:
            one.data = memory
        if is_leaf:
            one.grad = grad
            one.requires_grad_(needs_grad)
        return moved

    return undo


def _of_storage(storage: torch.UntypedStorage) -> Callable[[], bool]:
    content = storage.clone()

    def undo() -> bool:
        if torch.equal(_bytes(storage), _bytes(content)):
            return False
        storage.copy_(content)
        return True

    return undo


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _of_name(one: Any, name: str, value: Any) -> Callable[[], bool]:
    """Put back an attribute; a cell has one, its contents."""

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
    """Put back a random generator of torch, NumPy or Python."""
    if isinstance(one, random.Random):
        return _state_by(one.getstate, one.setstate)
    if isinstance(one, (torch.Generator, np.random.RandomState)):
        return _state_by(one.get_state, one.set_state)
    bits = one.bit_generator
    return _state_by(lambda: bits.state, functools.partial(setattr, bits, "state"))


def _state_by(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], bool]:
    state = get()

    def undo() -> bool:
        drew: bool = _frozen(get()) != _frozen(state)
        put(state)
        return drew

    return undo


def _frozen(state: Any) -> Any:
    """A generator's state as a value to compare."""
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


def _of_global_generators() -> Iterator[tuple[str, Callable[[], bool]]]:
    yield "random", _state_by(random.getstate, random.setstate)
    yield "numpy.random", _state_by(np.random.get_state, np.random.set_state)
    # dropout draws from torch's, which have no name: whoever runs a layer again cares for them
    yield "", _state_by(torch.get_rng_state, torch.set_rng_state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "", _state_by(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)


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
    """Return the objects that a container holds."""
    if isinstance(one, dict):
        return one.values()
    return one if isinstance(one, (list, collections.deque, set)) else ()


def _same(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    """True if these are the same objects, by the same names, in the same order."""
    return len(before) == len(now) and all(
        (key is other or (isinstance(key, str) and key == other)) and value is changed
        for (key, value), (other, changed) in zip(before, now, strict=True)
    )


def _slots(cls: type) -> Iterator[str]:
    for one in cls.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType, operation: str = "_GLOBAL") -> frozenset[str]:
    """Return the names of globals in a function's code, and in functions inside it; ``LOAD_GLOBAL``: that it reads."""
    names = frozenset(str(one.argval) for one in dis.get_instructions(code) if one.opname.endswith(operation))
    return names.union(*(globals_of(one, operation) for one in code.co_consts if isinstance(one, types.CodeType)))


def _root(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _is_library(root: str) -> bool:
    """True if a package is Python's, pygdist's, or was installed: what belongs to the user lies elsewhere."""
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root == "pygdist" or root in sys.stdlib_module_names or "-packages" in file
