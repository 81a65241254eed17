"""Values in collections, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any


def each_value(
    value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any], *, but: tuple[type, ...] = ()
) -> Any:
    """Apply ``change`` to every value of a type in tuples, lists, dictionaries and dataclasses, however deep.

    Collections keep their types and are new objects; the ones passed do not change. Other values stay as they are.

    Args:
        value: A value, or a collection of values.
        kind: Type of the values to change.
        change: Called with each of these values; returns what takes its place.
        but: Subtypes of ``kind`` that stay as they are.

    Example:
        >>> each_value({"a": [1, "x"]}, int, lambda one: one + 1)
        {'a': [2, 'x']}
    """
    if isinstance(value, kind):
        return value if isinstance(value, but) else change(value)
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # also a defaultdict, with its factory
        for key, one in value.items():
            made[key] = each_value(one, kind, change, but=but)
        return made
    if isinstance(value, (tuple, list)):
        values = [each_value(one, kind, change, but=but) for one in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            changed = each_value(getattr(value, field.name), kind, change, but=but)
            object.__setattr__(twin, field.name, changed)  # of a frozen one, too
        return twin
    return value
