"""The native library: C++17 with OpenMP behind a plain C ABI, reached through :mod:`ctypes`.

It includes no torch and no Python header, so one build serves every version of both. The C++ sources and the
description of the ABI (``pygdist_native.h``) are in ``src``; the build puts ``libpygdist_native.so`` in this folder.
The callers, such as :mod:`pygdist.kernels`, turn tensors and arrays into pointers.
"""

from __future__ import annotations

from pygdist.native.library import (
    Isa,
    NativeCsr,
    NativeDependencies,
    NativeEdges,
    NativeHop,
    NativePlacement,
    NativeText,
    Status,
    load,
    require,
    set_isa,
)

__all__ = [
    "Isa", "NativeCsr", "NativeDependencies", "NativeEdges", "NativeHop", "NativePlacement", "NativeText", "Status",
    "load", "require", "set_isa",
]  # fmt: skip
