"""Plug-ins by name: a string is a registered name or a class path; an object is taken as it is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pygdist.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name.

    Args:
        kind: Word for the classes in error messages, such as ``"backend"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str, cls: type[T]) -> None:
        """Add a class. Adding it again, as a reload does, replaces it.

        Raises:
            ValueError: If another class has the name.
        """
        taken = self._classes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the {self.kind} name '{name}' is taken by {taken.__module__}.{taken.__qualname__}")
        self._classes[name] = cls

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            raise InputError(f"unknown {self.kind} '{name}'; known are {', '.join(self)}, or give a class path")
        return self._classes[name]

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
        cls = import_path(value, self.kind) if "." in value else self[value]
        if not (inspect.isclass(cls) and issubclass(cls, base)):
            raise InputError(f"{value} is not a {self.kind}: it does not subclass {base.__module__}.{base.__name__}")
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            raise InputError(f"{self.kind} '{value}': {error}") from error
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
