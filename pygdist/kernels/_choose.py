"""Chooses the kernels: the native library for tensors on the CPU if it was built, torch's operators otherwise."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pygdist.kernels import _native, _torch
from pygdist.native import library

__all__ = ["kernels_for"]


def kernels_for(x: Tensor) -> ModuleType:
    """Return :mod:`_native` or :mod:`_torch`, which define the same functions."""
    return _native if x.device.type == "cpu" and library.load() is not None else _torch
