"""The partitioners' per-edge loops in the native library: arrays become pointers here.

Each function takes one chunk of the stream and changes the caller's arrays in place. Ids are int64 in the stream and
int32 in what is kept for each node, so there are fewer than 2^31 nodes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.native import NativeEdges, load

__all__ = ["call", "count_degrees", "require"]

Argument = NDArray[Any] | ctypes.Structure | ctypes.c_int32 | float | None


def require(name: str, num_nodes: int) -> None:
    """Refuse where partitioner ``name`` cannot run.

    Raises:
        InputError: If there is no native library, or there are too many nodes for its ids.
    """
    if load() is None:
        raise InputError(
            f"partitioner '{name}' needs pygdist's native library, which was not built here: install a C++17 compiler "
            "(Debian, Ubuntu: apt install g++) and reinstall pygdist; 'chunk', 'hash' and 'metis' work without"
        )
    if num_nodes >= 1 << 31:
        raise InputError(f"partitioner '{name}' takes fewer than 2^31 nodes, the graph has {num_nodes}; use 'hash'")


def call(function: str, chunk: NDArray[np.int64] | None, *arguments: Argument) -> None:
    """Call ``pygdist_<function>`` with a chunk of edges, if it takes one, and the other arguments in order.

    Arrays are passed as they lie in memory: they must be C-contiguous and of the type that ``pygdist_native.h`` states.
    Structures and ``c_int32`` go by reference.
    """
    native = load()
    assert native is not None, "the caller has asked require()"
    given: list[Any] = []
    if chunk is not None:
        source, target = np.ascontiguousarray(chunk, dtype=np.int64)
        edges = NativeEdges(source.ctypes.data, target.ctypes.data, chunk.shape[1], torch.get_num_threads())
        given.append(ctypes.byref(edges))
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            given.append(argument.ctypes.data)
        elif isinstance(argument, ctypes.Structure | ctypes.c_int32):
            given.append(ctypes.byref(argument))
        else:
            given.append(argument)
    status = getattr(native, f"pygdist_{function}")(*given)
    if status != 0:
        raise MemoryError(f"not enough memory for {function.replace('_', ' ')}")


def count_degrees(edges: EdgeStream) -> NDArray[np.int32]:
    """The number of edge ends at each node; int32 of shape ``(N,)``. One pass."""
    degree = np.zeros(edges.num_nodes, dtype=np.int32)
    for chunk in edges.chunks():
        call("count_degrees", chunk, degree)
    return degree
