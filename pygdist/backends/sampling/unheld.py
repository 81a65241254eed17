"""Rows that stand for features that no rank holds whole, while a model runs up to its first layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.errors import InputError


class UnheldRows(Tensor):
    """Rows that a model may drop elements of, and nothing else, before its first layer gets them.

    Each rank draws dropout for its own columns when it computes the first layer; here only the rate is noted.

    Attributes:
        dropped: Rate of the dropout that they went through.
    """

    dropped: float = 0.0

    @classmethod
    def of(cls, x: Tensor, dropped: float = 0.0) -> UnheldRows:
        """Let a tensor stand for the features."""
        rows: UnheldRows = x.as_subclass(cls)
        rows.dropped = dropped
        return rows

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.dropout and isinstance(args[0], cls):
            return _after_dropout(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        dropped = max((one.dropped for one in args if isinstance(one, cls)), default=0.0)
        # a view of dropped rows is not the features as they were
        return cls.of(out, dropped) if dropped and isinstance(out, Tensor) and out.dim() == 2 else out


def _after_dropout(x: UnheldRows, p: float = 0.5, training: bool = True, inplace: bool = False) -> UnheldRows:
    if not training or not p:
        return x
    if x.dropped:
        raise InputError("the model drops elements of the features twice before its first layer; drop them once")
    return UnheldRows.of(x.as_strided(x.shape, x.stride()), p)
