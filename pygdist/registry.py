"""Names for plug-ins: a string goes through the registry or is a class path, an object passes straight."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from pygdist.errors import InputError

__all__ = ["Registry", "import_path"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes by name.

    Args:
        kind: What they are, for messages, such as ``"backend"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str, cls: type[T]) -> None:
        """Add a class; a name taken by another class is refused, the same class again (a reload) is not.

        Raises:
            ValueError: If the name is taken.
        """
        known = self._classes.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"the {self.kind} name '{name}' is taken by {known.__module__}.{known.__qualname__}")
        self._classes[name] = cls

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._classes))

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            raise InputError(f"unknown {self.kind} '{name}'; known are {', '.join(self)}, or give a class path")
        return self._classes[name]

    def resolve(self, value: str | T, base: type[T], **arguments: Any) -> T:
        """An instance from a name, a dotted class path, or itself.

        Raises:
            InputError: If the name or path leads nowhere, the class is of another kind, or an argument does not fit.
        """
        if isinstance(value, base):
            if arguments:
                raise InputError(f"arguments {sorted(arguments)} were given for a {self.kind} that is already made")
            return value
        if not isinstance(value, str):
            raise InputError(f"expected a {self.kind} or its name, got {type(value).__name__}")
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
    """The object at a dotted path.

    Raises:
        InputError: If it cannot be imported; the message names the part that is missing.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise InputError(f"{kind} '{path}': there is no module named '{error.name}'") from error
    except AttributeError as error:
        raise InputError(f"{kind} '{path}': module {module} has no '{name}'") from error
