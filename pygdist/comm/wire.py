"""Dtypes for the exchange of rows and gradients that take fewer bytes, and give up exactness."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from pygdist.errors import InputError

WireDtype: TypeAlias = Literal["bfloat16"]


def wire_of(name: WireDtype | None) -> torch.dtype | None:
    """Return the dtype called ``name``; ``None`` if rows travel in their own dtype.

    Raises:
        InputError: If the name is unknown.
    """
    if name not in (None, *get_args(WireDtype)):
        raise InputError(f"wire_dtype is {name!r}, expected {' or '.join(get_args(WireDtype))} or nothing")
    return None if name is None else getattr(torch, name)


def narrowed(name: WireDtype | None) -> str:
    """Return the clause that names the exactness given up for fewer bytes; empty if the exchange is exact."""
    return "" if name is None else f"rows and gradients travel as {name}"
