"""Sorting integers: by small keys in linear time, and to distinct ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pygdist.native import load


def grouped(key: NDArray[Any], num_groups: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Group positions by their key, 0 to ``num_groups - 1`` (below 2^31), in ascending order within a group.

    Returns:
        The start of each group, int64 of shape ``(num_groups + 1,)``, and the positions, int32 if they fit.

    Example:
        >>> grouped(np.array([1, 0, 1]), 2)
        (array([0, 1, 3]), array([1, 0, 2]))
    """
    native = load()
    if native is None or len(key) > np.iinfo(np.int32).max:
        indptr = np.zeros(num_groups + 1, dtype=np.int64)
        np.cumsum(np.bincount(key, minlength=num_groups), out=indptr[1:])
        return indptr, np.argsort(key, kind="stable")
    narrow = np.ascontiguousarray(key, dtype=np.int32)
    indptr, order = np.empty(num_groups + 1, dtype=np.int64), np.empty(len(key), dtype=np.int32)
    native.pygdist_counting_sort(narrow.ctypes.data, len(key), num_groups, indptr.ctypes.data, order.ctypes.data)
    return indptr, order


def distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distinct values, ascending, ``(k,)``.

    ``np.unique`` hashes them since numpy 2.3, which takes 80 times as long for millions of them.

    Example:
        >>> distinct(np.array([3, 1, 3]))
        array([1, 3])
    """
    ordered = np.sort(values, axis=None)
    is_new = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]
