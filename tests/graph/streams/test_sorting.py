"""``distinct`` equals ``np.unique``, and ``grouped`` a stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from pygdist.graph.streams.sorting import distinct, grouped


@pytest.mark.parametrize("shape", [(0,), (1,), (500,), (2, 300)])
@pytest.mark.parametrize("bound", [3, 1 << 60])
def test_distinct_values_ascend(shape: tuple[int, ...], bound: int) -> None:
    values = np.random.default_rng(0).integers(-bound, bound, shape)
    given = values.copy()
    np.testing.assert_array_equal(distinct(values), np.unique(values))
    np.testing.assert_array_equal(values, given)


@pytest.mark.parametrize("size", [0, 500])
def test_positions_ascend_within_a_group(size: int) -> None:
    key = np.random.default_rng(0).integers(0, 7, size)
    indptr, order = grouped(key, 9)
    np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(np.diff(indptr), np.bincount(key, minlength=9))
