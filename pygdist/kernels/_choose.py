"""Who computes: the native library for tensors on the CPU, torch's operators for all others and where it is missing."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from pygdist.kernels import _native, _torch
from pygdist.native import library

__all__ = ["kernels_for"]


def kernels_for(x: Tensor) -> ModuleType:
    """:mod:`_native` or :mod:`_torch`; what the operators call, both offer."""
    return _native if x.device.type == "cpu" and library.load() is not None else _torch
