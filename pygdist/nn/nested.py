"""Values in collections, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch_geometric.data import Data


def each_named(value: Any, change: Callable[[str, Any], Any], name: str = "", *, whole: type | tuple[type, ...]) -> Any:
    """Apply ``change`` to the name and value of all that tuples, lists, dictionaries, dataclasses and ``Data`` hold.

    The result has new collections of the same types; the collections passed do not change. A value in a dictionary,
    dataclass or ``Data`` is named by its key or field. A value in a tuple or list has the name of the tuple or list.

    Args:
        value: A value, or a collection of values, nested to any depth.
        change: Called with the name and value of each value that is no collection; returns the new value.
        name: Name of ``value``.
        whole: Types of collections that count as one value.
    """
    # no closure that calls itself: the cycle would hold what ``change`` holds, such as tensors
    if not isinstance(value, whole):
        if isinstance(value, (MutableMapping, Data)):
            made = copy.copy(value)  # also a defaultdict, with its factory
            for key, one in value.items():
                made[key] = each_named(one, change, str(key), whole=whole)
            return made
        if isinstance(value, (tuple, list)):
            values = [each_named(one, change, name, whole=whole) for one in value]
            return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            twin = copy.copy(value)
            for field in dataclasses.fields(value):
                changed = each_named(getattr(value, field.name), change, field.name, whole=whole)
                object.__setattr__(twin, field.name, changed)  # of a frozen one, too
            return twin
    return change(name, value)


def each_value(
    value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any], *, but: tuple[type, ...] = ()
) -> Any:
    """Apply ``change`` to every value of a type in collections, as :func:`each_named`; others stay as they are.

    Args:
        value: A value, or a collection of values.
        kind: Type of the values to change.
        change: Called with each of these values; returns the new value.
        but: Subtypes of ``kind`` that stay as they are.

    Example:
        >>> each_value({"a": [1, "x"]}, int, lambda one: one + 1)
        {'a': [2, 'x']}
    """

    def changed(_: str, one: Any) -> Any:
        return change(one) if isinstance(one, kind) and not isinstance(one, but) else one

    return each_named(value, changed, whole=kind)
