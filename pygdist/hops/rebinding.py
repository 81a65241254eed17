"""Methods of a user's or of PyG's layers with some of PyG's functions replaced; the layers' modules stay untouched."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from torch import nn

Replacements = Mapping[Any, Any]
"""By PyG's function: the one that takes its place."""


def methods_of(cls: type) -> list[types.FunctionType]:
    """The methods of a class and of its bases as they were written, without decorators such as ``torch.no_grad()``.

    Not those of ``nn.Module``, which know nothing of PyG.
    """
    bases = (base for base in cls.__mro__ if base not in (nn.Module, object))
    methods = (value for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType))
    return [one for one in map(inspect.unwrap, methods) if isinstance(one, types.FunctionType)]


def calls_by_name(cls: type, replacements: Replacements) -> bool:
    """True if a method of ``cls`` or of its bases calls one of PyG's functions in ``replacements``."""
    return any(_uses(method, replacements) for method in methods_of(cls))


def rebound(cls: type, replacements: Replacements) -> tuple[type, ...]:
    """Bases for a class that is ``cls`` with PyG's functions replaced; PyG's own modules stay untouched.

    For each class in the method resolution order whose code calls one of the functions, a subclass with copies of these
    methods is put in front of it, so that ``super().forward()`` in a user's subclass reaches the copies too.
    """
    bases: list[type] = []
    for base in cls.__mro__:
        methods = {
            name: _rebind(value, replacements)
            for name, value in vars(base).items()
            if isinstance(value, types.FunctionType) and _uses(value, replacements)
        }
        if methods:
            bases.append(type(base.__name__, (base,), {**methods, "__module__": base.__module__}))
    if not bases or not issubclass(bases[0], cls):
        bases.insert(0, cls)
    return tuple(bases)


#: By function of a library: which functions were looked for, its globals, and if one of them was found.
_USES: dict[types.FunctionType, tuple[frozenset[Any], list[Any], bool]] = {}


def _uses(
    function: types.FunctionType, replacements: Replacements, callers: tuple[types.FunctionType, ...] = ()
) -> bool:
    """True if a function calls one of PyG's in ``replacements``; a library's is read once for the same globals."""
    if _is_helper(function):
        return _calls(function, replacements, callers)
    sought, values = frozenset(replacements), [function.__globals__.get(name) for name in _names(function.__code__)]
    known = _USES.get(function)
    if known is None or known[0] != sought or any(a is not b for a, b in zip(known[1], values, strict=True)):
        known = _USES[function] = sought, values, _calls(function, replacements, callers)
    return known[2]


def _calls(function: types.FunctionType, replacements: Replacements, callers: tuple[types.FunctionType, ...]) -> bool:
    decorated = _decorated(function)
    within = decorated is not None and _uses(decorated, replacements, (*callers, function))
    return within or any(True for _ in _found(function, replacements, callers))


def _rebind(
    function: types.FunctionType, replacements: Replacements, made: dict[Any, Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """The same code with other globals; a decorator calls a copy of what it decorates.

    ``made`` are the copies on the way to this one, as a helper may call itself.
    """
    made = {} if made is None else made
    variables, attributes, decorated = _Globals(function), dict(vars(function)), _decorated(function)
    inner, closure = types.CellType(), function.__closure__
    if decorated is not None and closure is not None:
        closure = tuple(inner if _content(cell) is decorated else cell for cell in closure)
    copy = types.FunctionType(function.__code__, variables, function.__name__, function.__defaults__, closure)
    made[function] = copy
    if decorated is not None:
        inner.cell_contents = attributes["__wrapped__"] = _rebind(decorated, replacements, made)
    variables.others = _others(function, replacements, made)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    vars(copy).update(attributes)
    return variables.keeping(copy) if variables.written else copy


class _Globals(dict[str, Any]):
    """The globals of a function as they are at the time, but for some others; what the function writes reaches them.

    Python asks for a global by ``__getitem__`` where globals are no plain dictionary; what it writes it puts in here.
    """

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__(function.__globals__)  # for eval, which does not ask
        self.here = function.__globals__
        self.others: dict[str, Any] = {}
        self.written = _written(function.__code__)

    def __getitem__(self, name: str) -> Any:
        if name in self.written:
            return super().__getitem__(name)
        value = self.here[name]
        if name in self.others:
            return self.others[name] if value is super().__getitem__(name) else value  # the user may have changed it
        return value

    def keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that writes globals, so that others see what it has written."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in self.written & self.here.keys():
                super(_Globals, self).__setitem__(name, self.here[name])
            try:
                return function(*args, **kwargs)
            finally:
                self.here.update({name: super(_Globals, self).__getitem__(name) for name in self.written & self.keys()})

        return call


@functools.lru_cache(maxsize=4096)
def _written(code: types.CodeType) -> frozenset[str]:
    """Return the globals that a function writes, or one that it makes."""
    names = frozenset(str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    return names.union(*(_written(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _decorated(function: types.FunctionType) -> types.FunctionType | None:
    """Return the function that a decorator such as ``torch.no_grad()`` wraps; ``None`` if there is none."""
    decorated = vars(function).get("__wrapped__")
    return decorated if isinstance(decorated, types.FunctionType) else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty until the end of a definition
        return None


def _others(
    function: types.FunctionType, replacements: Replacements, made: dict[Any, Callable[..., Any]]
) -> dict[str, Any]:
    """Return what takes the place of the globals that a function must see otherwise."""
    others: dict[str, Any] = {}
    for name, value in _found(function, replacements):
        if isinstance(value, types.ModuleType):
            others[name] = _view(value, _names(function.__code__), replacements)
        elif value in replacements:
            others[name] = replacements[value]
        else:
            others[name] = made[value] if value in made else _rebind(value, replacements, made)
    return others


def _found(
    function: types.FunctionType, replacements: Replacements, callers: tuple[types.FunctionType, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield globals that a function must see otherwise: PyG's functions by any name, modules with them, and helpers.

    Helpers are functions of the user's own that call PyG's; ``callers`` are those on the way to this one.
    """
    names = _names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            other = _view(value, names, replacements) is not None
        elif isinstance(value, types.FunctionType) and value in replacements:
            other = True
        else:
            other = _is_helper(value) and value not in callers and _uses(value, replacements, (*callers, function))
        if other:
            yield name, value


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function's code, and in the functions that it makes."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def _view(module: types.ModuleType, names: frozenset[str], replacements: Replacements) -> types.ModuleType | None:
    """Return a copy of a module in which PyG's functions are replaced; ``None`` if there are none of these names."""
    others: dict[str, Any] = {}
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{module.__name__}."):
            view = _view(value, names, replacements)
            others |= {} if view is None else {name: view}
        elif isinstance(value, types.FunctionType) and value in replacements:
            others[name] = replacements[value]
    if not others:
        return None
    return _View(module, others)


class _View(types.ModuleType):
    """A module as it is at the time, but for some others."""

    def __init__(self, module: types.ModuleType, others: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self).clear()
        vars(self).update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)


def _is_helper(value: Any) -> TypeGuard[types.FunctionType]:
    """True for a function that is no library's; one that was made from text has no module."""
    libraries = ("torch", "torch_geometric", "pygdist")
    return isinstance(value, types.FunctionType) and (value.__module__ or "").partition(".")[0] not in libraries
