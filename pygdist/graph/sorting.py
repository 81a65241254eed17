"""Sorting by a number from a small range, in linear time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.native import load

__all__ = ["grouped"]


def grouped(key: NDArray[Any], num_groups: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions grouped by their key, ascending inside a group.

    Args:
        key: Integers from 0 to ``num_groups - 1``, of shape ``(n,)``.
        num_groups: Number of groups, below 2^31.

    Returns:
        Where each group starts, of shape ``(num_groups + 1,)``, and the positions, of shape ``(n,)``.

    Example:
        >>> grouped(np.array([1, 0, 1]), 2)
        (array([0, 1, 3]), array([1, 0, 2]))
    """
    indptr = np.zeros(num_groups + 1, dtype=np.int64)
    np.cumsum(np.bincount(key, minlength=num_groups), out=indptr[1:])
    native = load()
    if native is None:
        return indptr, np.argsort(key, kind="stable")
    narrow = np.ascontiguousarray(key, dtype=np.int32)
    order = np.empty(len(key), dtype=np.int64)
    following = indptr[:-1].copy()
    native.pygdist_counting_sort(narrow.ctypes.data, len(key), following.ctypes.data, order.ctypes.data)
    return indptr, order
