"""Plug-ins by name: a string is a registered name or a class path; an object is taken as it is.

A package registers a class when it is imported. It may also name the class in its metadata, as an entry point: then it
is imported when somebody uses the name, and not before.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from typing import Any, Generic, TypeVar

from pygdist.errors import InputError, did_you_mean, is_first_rank

log = logging.getLogger(__name__)
T = TypeVar("T")


class PlugIns:
    """Objects that installed packages offer by name. A package is imported when one of its names is used.

    Args:
        kind: Word for the objects in error messages, such as ``"backend"``.
        group: Group of the entry points, such as ``"pygdist.backends"``.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._settled: set[str] = set()  # names that need no warning: their plug-in is in use, or a warning was given

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(_offered(self.group, tuple(sys.path))))

    def __contains__(self, name: object) -> bool:
        if name not in _offered(self.group, tuple(sys.path)):  # or was installed since, as by %pip in a notebook
            importlib.invalidate_caches()
            _offered.cache_clear()
        return name in _offered(self.group, tuple(sys.path))

    def load(self, name: str) -> Any:
        """Import the object of a name.

        Raises:
            InputError: If several packages offer the name, or the object cannot be imported; names the packages.
        """
        points = _offered(self.group, tuple(sys.path))[name]
        if len(points) > 1:
            raise InputError(
                f"{self.kind} '{name}': the packages {' and '.join(map(_package, points))} both offer this name; "
                "uninstall one, or give a class path"
            )
        self._settled.add(name)
        try:
            return points[0].load()
        except Exception as error:  # code of others fails in many ways
            raise InputError(
                f"{self.kind} '{name}': {points[0].value} of the package {_package(points[0])} cannot be imported "
                f"({type(error).__name__}: {error}); mend or uninstall the package"
            ) from error

    def pass_over(self, name: str, owner: str) -> None:
        """Say once that a name means what ``owner`` defines, if an installed package offers it too."""
        others = [one for one in _offered(self.group, tuple(sys.path)).get(name, []) if _root(one.module) != owner]
        if others and name not in self._settled and is_first_rank():
            self._settled.add(name)
            log.warning(
                "%s '%s' is that of %s; the package %s offers the name too, and is not used: give its class path, %s",
                self.kind, name, owner, _package(others[0]), others[0].value.replace(":", "."),
            )  # fmt: skip


@lru_cache
def _offered(group: str, path: tuple[str, ...]) -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points of a group by name. ``path`` is ``sys.path``, on which they depend."""
    offered: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=group):
        offered.setdefault(point.name, []).append(point)
    return offered


def _package(point: metadata.EntryPoint) -> str:
    return _root(point.module) if point.dist is None else point.dist.name


def _root(module: str) -> str:
    return module.partition(".")[0]


class Registry(Generic[T]):
    """Classes by name.

    Args:
        kind: Word for the classes in error messages, such as ``"backend"``.
        group: Group of entry points by which packages offer classes, such as ``"pygdist.backends"``.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.plug_ins = PlugIns(kind, group)
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str, cls: type[T]) -> None:
        """Add a class. Adding it again, as a reload does, replaces it.

        Raises:
            ValueError: If another class has the name.
        """
        taken = self._classes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"{cls.__module__}.{cls.__qualname__} is called '{name}', a name that {taken.__module__}."
                f"{taken.__qualname__} has; give it another name"
            )
        self._classes[name] = cls

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the registered classes; see :meth:`names`."""
        return iter(sorted(self._classes))

    def names(self) -> list[str]:
        """Return all names, sorted: also those of plug-ins, which are not imported."""
        return sorted({*self._classes, *self.plug_ins})

    def __getitem__(self, name: str) -> type[T]:
        if name in self._classes:
            return self._classes[name]
        if name not in self.plug_ins:
            raise InputError(
                f"unknown {self.kind} '{name}'; known are {', '.join(self.names())}, or give a class path"
                f"{did_you_mean(name, self.names())}"
            )
        cls: type[T] = self.plug_ins.load(name)
        return cls

    def class_of(self, name: str, base: type[T]) -> type[T]:
        """Return the class of a name or of a dotted class path.

        Raises:
            InputError: If there is none, or it does not subclass ``base``.
        """
        cls = import_path(name, self.kind) if "." in name else self[name]
        if not (inspect.isclass(cls) and issubclass(cls, base)):
            raise InputError(f"{name} is not a {self.kind}: it does not subclass {base.__module__}.{base.__name__}")
        if "." not in name:
            self.plug_ins.pass_over(name, _root(cls.__module__))
        return cls

    def resolve(self, value: str | T, base: type[T], **arguments: Any) -> T:
        """Return an instance, given a name, a dotted class path, or the instance itself.

        Raises:
            InputError: If there is no such class, it does not subclass ``base``, or an argument does not fit.
        """
        if isinstance(value, base):
            if arguments:
                raise InputError(
                    f"arguments {sorted(arguments)} do not go with a {self.kind} that is an object already"
                )
            return value
        if not isinstance(value, str):
            raise InputError(f"expected a {self.kind} or its name, got an object of type {type(value).__name__}")
        cls = self.class_of(value, base)
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            options = ", ".join(inspect.signature(cls).parameters) or "none"
            raise InputError(f"{self.kind} '{value}': {error}; its options are: {options}") from error
        try:
            return cls(**arguments)
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.kind} '{value}': {error} (with {arguments})") from error


def import_path(path: str, kind: str) -> Any:
    """Return the object at a dotted path.

    Raises:
        InputError: If it cannot be imported; names the part that is missing.
    """
    module, _, name = path.rpartition(".")
    if not (module and all(part.isidentifier() for part in path.split("."))):
        raise InputError(f"{kind} '{path[:200]}': expected a class path, such as my_package.MyClass")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise InputError(f"{kind} '{path}': there is no module named '{error.name}'") from error
    except ImportError as error:
        raise InputError(f"{kind} '{path}': cannot be imported ({error})") from error
    except AttributeError as error:
        raise InputError(f"{kind} '{path}': module {module} has no '{name}'") from error
