"""A hash of the code of a notebook's or script's own classes, which change from run to run under the same name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_PLAIN = (bool, int, float, str, bytes, tuple, type(None))


def own_code(kind: type) -> str:
    """Return a hash of the methods and plain attributes of a class that was defined in ``__main__``; empty for others.

    Functions and plain values of ``__main__`` that the methods name count too.
    """
    if kind.__module__ != "__main__":
        return ""
    seen = set[FunctionType]()
    pieces: list[object] = []
    for cls in kind.__mro__:
        if cls.__module__ == "__main__":
            pieces += [(name, list(_of_value(value, seen))) for name, value in sorted(vars(cls).items())]
    return hashlib.blake2b(repr(pieces).encode(), digest_size=16).hexdigest()


def _of_value(value: Any, seen: set[FunctionType]) -> Iterator[object]:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    if isinstance(value, _PLAIN):
        yield value
    elif isinstance(function, FunctionType) and function.__module__ == "__main__" and function not in seen:
        seen.add(function)
        yield repr(function.__defaults__), repr(function.__kwdefaults__)
        for code in _codes(function.__code__):
            yield code.co_code, code.co_names, [one for one in code.co_consts if not isinstance(one, CodeType)]
            for name in code.co_names:
                yield from _of_value(function.__globals__.get(name), seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)
