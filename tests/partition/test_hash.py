"""Hash: seeded, even, and the same for ever."""

from __future__ import annotations

import numpy as np
import pytest

from pygdist.graph import EdgeStream
from pygdist.partition import HashPartitioner
from pygdist.partition.hash import mix


def nodes(count: int) -> EdgeStream:
    return EdgeStream(np.empty((2, 0), dtype=np.int64), num_nodes=count)


def test_mix_is_splitmix64() -> None:
    """The published first outputs of the generator for seed 1234567."""
    values = mix(np.arange(3, dtype=np.uint64), 1234567)
    assert values.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_an_assignment_never_changes() -> None:
    expected = [1, 0, 1, 1, 1, 0, 2, 2, 2, 2, 1, 1]
    assert HashPartitioner().assign(nodes(12), 3).tolist() == expected
    assert HashPartitioner(seed=1).assign(nodes(12), 3).tolist() != expected


@pytest.mark.parametrize("num_parts", [2, 3, 16])
def test_parts_are_even(num_parts: int) -> None:
    count = np.bincount(HashPartitioner().assign(nodes(100_000), num_parts))
    assert abs(count - 100_000 / num_parts).max() < 5 * np.sqrt(100_000 / num_parts), "five standard deviations"


def test_few_nodes_may_leave_a_part_empty() -> None:
    sizes = [np.bincount(HashPartitioner(seed=seed).assign(nodes(4), 4), minlength=4) for seed in range(10)]
    assert any((size == 0).any() for size in sizes)


def test_large_seeds_wrap() -> None:
    assert HashPartitioner(seed=2**64 - 1).assign(nodes(5), 2).shape == (5,)
