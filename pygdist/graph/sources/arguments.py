"""Arguments of a dataset from a configuration: objects are made only where the signature of the dataset asks for one.

A configuration names code: classes of models, datasets, transforms. It names none where a number or a text belongs.
"""

from __future__ import annotations

import argparse
import collections.abc
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any

from torch_geometric.transforms import BaseTransform

from pygdist.errors import InputError
from pygdist.registry import import_path

_TRANSFORMS = ("transform", "pre_transform")  # of dataset classes without annotations
_PLAIN = (bool, int, float, str, NoneType)
_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text", NoneType: "null"}


def made_arguments(factory: Callable[..., Any], args: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return arguments for ``factory``, with an object for each ``{class_path: ..., init_args: {...}}``.

    Such an object is a transform where the signature says ``Callable`` (as PyG's datasets do of ``transform``), and a
    subclass of the class that the signature names otherwise.

    Args:
        factory: A dataset class or a function.
        args: Numbers, texts, lists and mappings, as in a file; or objects.
        name: The dataset or the class path, for messages.

    Raises:
        InputError: If ``factory`` has other parameters, an argument is not of the parameter's type, or an object is
            given for a parameter that does not ask for one; names the argument.
    """
    signature = inspect.signature(factory)
    try:
        signature.bind(**args)
    except TypeError as error:
        parameters = ", ".join(signature.parameters) or "none"
        raise InputError(f"dataset '{name}': {error}; its arguments are: {parameters}") from None
    hints = _annotations(factory)
    made = {}
    for key, value in {key: _plain(value) for key, value in args.items()}.items():
        hint = hints.get(key, Callable if key in _TRANSFORMS else Any)
        _check_plain(value, hint, f"dataset '{name}': {key}")
        made[key] = _made(value, hint, f"dataset '{name}': {key}")
    return made


def _plain(value: Any) -> Any:
    """Turn the namespaces that jsonargparse makes of ``{class_path: ...}`` back into mappings."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _annotations(factory: Callable[..., Any]) -> dict[str, Any]:
    function = getattr(factory, "func", factory)  # of a partial
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # annotations may name what only type checkers import
        parameters = inspect.signature(factory).parameters
        return {key: one.annotation for key, one in parameters.items() if isinstance(one.annotation, type)}


def _choices(hint: Any) -> list[Any]:
    """Return the types that an annotation allows; of a list or a mapping, those of its values too."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        return [choice for one in typing.get_args(hint) for choice in _choices(one)]
    if origin in (list, tuple, dict, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Mapping):
        return [choice for one in typing.get_args(hint) if one is not ... for choice in _choices(one)]
    return [Callable if origin is collections.abc.Callable or hint is collections.abc.Callable else hint]


def _check_plain(value: Any, hint: Any, place: str) -> None:
    """Refuse a number or a text where the annotation names other plain types only, and numbers that are not finite."""
    origin = typing.get_origin(hint)
    choices = typing.get_args(hint) if origin in (typing.Union, UnionType) else (hint,)
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{place} is {value}, expected a finite number")
    if not all(choice in _PLAIN for choice in choices) or _has_class_path(value):
        return
    fits = type(value) in choices or (isinstance(value, int) and not isinstance(value, bool) and float in choices)
    fits = fits or any(choice is not NoneType and isinstance(value, choice) for choice in choices if choice is not int)
    if not fits and type(value) in (bool, int, float, str, list, dict, NoneType):
        expected = " or ".join(_NAMES[choice] for choice in choices)
        raise InputError(f"{place} is {str(value)[:60]!r}, expected {expected}")


def _has_class_path(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value and set(value) <= {"class_path", "init_args"}


def _made(value: Any, hint: Any, place: str) -> Any:
    """Create the object of a ``class_path``, also inside lists and mappings; return anything else as it is."""
    if isinstance(value, list):
        return [_made(one, hint, place) for one in value]
    if not _has_class_path(value):
        return {key: _made(one, hint, place) for key, one in value.items()} if isinstance(value, dict) else value
    path, init_args = value["class_path"], value.get("init_args") or {}
    if not isinstance(path, str) or not isinstance(init_args, dict):
        raise InputError(f"{place}: expected class_path with the path of a class, and init_args with its arguments")
    bases = tuple(BaseTransform if choice is Callable else choice for choice in _choices(hint))
    bases = tuple(base for base in bases if inspect.isclass(base) and base not in (*_PLAIN, object, Any))
    if not bases:
        raise InputError(f"{place} takes no object, but class_path {path[:200]!r} is given; give a value")
    cls = import_path(path, f"{place}: class_path")
    if not (inspect.isclass(cls) and issubclass(cls, bases)):
        names = " or ".join(f"{base.__module__}.{base.__qualname__}" for base in bases)
        raise InputError(f"{place}: {path} is no subclass of {names}")
    try:
        return cls(**made_arguments(cls, init_args, path))
    except InputError as error:
        inner = str(error).replace("dataset '", "'")
        raise InputError(f"{place}: {inner}") from error
    except (TypeError, ValueError, AssertionError, KeyError) as error:  # transforms refuse arguments with these
        raise InputError(f"{place}: {path}: {type(error).__name__}: {error} (with {init_args})") from error
