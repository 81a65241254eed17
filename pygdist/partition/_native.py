"""Calls the partitioners' per-edge loops in the native library.

Each loop takes one chunk of the stream and changes the caller's arrays in place. Ids are int64 in the stream and int32
in arrays by node, so there are fewer than 2^31 nodes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.native import NativeEdges, library

Argument: TypeAlias = NDArray[Any] | ctypes.Structure | ctypes.c_int32 | float | None
PlaceEdges: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int32]], None]
"""Writes the part of each edge of a chunk ``(2, k)`` into an array ``(k,)``; called in the order of the stream."""


def require(name: str, num_nodes: int) -> None:
    """Refuse to run partitioner ``name`` without the native library, or with too many nodes for its ids."""
    library.require(f"partitioner '{name}'", "; 'chunk', 'hash' and 'metis' work without")
    if num_nodes >= 1 << 31:
        raise InputError(f"partitioner '{name}' takes fewer than 2^31 nodes, the graph has {num_nodes}; use 'hash'")


def call(function: str, chunk: NDArray[np.int64] | None, *arguments: Argument) -> None:
    """Call ``pygdist_<function>`` with a chunk of edges, if it takes one, and the other arguments in order.

    Arrays are passed as they lie in memory: they must be C-contiguous and of the type that ``pygdist_native.h`` states.
    Structures and ``c_int32`` go by reference.
    """
    values: list[Any] = []
    if chunk is not None:
        source, target = np.ascontiguousarray(chunk, dtype=np.int64)
        edges = NativeEdges(source.ctypes.data, target.ctypes.data, chunk.shape[1], torch.get_num_threads())
        values.append(ctypes.byref(edges))
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            assert argument.flags.c_contiguous
            values.append(argument.ctypes.data)
        elif isinstance(argument, ctypes.Structure | ctypes.c_int32):
            values.append(ctypes.byref(argument))
        else:
            values.append(argument)
    status = getattr(library.require("this partitioner"), f"pygdist_{function}")(*values)
    if status != 0:
        raise MemoryError(f"not enough memory for {function.replace('_', ' ')}")


def count_degrees(edges: EdgeStream) -> NDArray[np.int32]:
    """Count the edge ends at each node, in one pass; int32 of shape ``(N,)``."""
    degree = np.zeros(edges.num_nodes, dtype=np.int32)
    for chunk in edges.chunks():
        call("count_degrees", chunk, degree)
    return degree
