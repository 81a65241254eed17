"""Generated edges: what two types of nodes, two skews and both directions add; the rest is in ``test_stream.py``."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from pygdist.errors import InputError
from pygdist.graph import EdgeGenerator
from pygdist.graph.generated.edges import node_ranks


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "options", "crc"),
    [
        pytest.param(1000, 600_000, {"seed": 3}, 0xD9901289, id="defaults"),
        pytest.param(10_000, 400_000, {"num_communities": 20, "inside": 0.9}, 0xCE083AE0, id="communities"),
        pytest.param(7, 1000, {"seed": 1}, 0x390E4E53, id="few-nodes"),
    ],
)
def test_edges_stay_what_they_have_been(num_nodes: int, num_edges: int, options: dict[str, Any], crc: int) -> None:
    edges = EdgeGenerator(num_nodes, num_edges, **options)
    same = EdgeGenerator((num_nodes, num_nodes), num_edges, exponent=(0.6, 0.6), **options)
    assert zlib.crc32(edges.read(0, num_edges).tobytes()) == crc
    np.testing.assert_array_equal(same.read(0, 5000), edges.read(0, 5000)[:, :5000])


def test_two_types_of_nodes_share_communities() -> None:
    generator = EdgeGenerator((5000, 300), 200_000, num_communities=12, inside=0.7, exponent=(0.0, 0.4), seed=5)
    source, target = generator.read(0, 200_000)
    assert (source.max(), target.max()) == (4999, 299)
    assert generator.num_nodes == 5000
    same = generator.communities(source, end="source") == generator.communities(target)
    assert same.mean() == pytest.approx(0.7 + 0.3 / 12, abs=0.01)
    assert np.bincount(source, minlength=5000).max() < 100  # 40 on average, and no skew
    in_degree = np.bincount(target, minlength=300)
    assert in_degree.argmax() == 0  # rank 0 has id 0
    assert in_degree.max() == pytest.approx(generator.largest_in_degree(), rel=0.1)


def test_undirected_edges_come_in_pairs() -> None:
    generator = EdgeGenerator(1000, 300_000, num_communities=10, exponent=0.3, undirected=True, seed=2)
    edges = generator.read(0, 300_000)
    np.testing.assert_array_equal(edges[:, 0::2], edges[::-1, 1::2])
    np.testing.assert_array_equal(generator.read(262_143, 262_147), edges[:, 262_143:262_147])  # across blocks
    assert np.bincount(edges[1]).max() == pytest.approx(generator.largest_in_degree(), rel=0.1)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 1000, 2_449_029])
def test_ranks_are_a_permutation(num_nodes: int) -> None:
    assert np.array_equal(np.sort(node_ranks(np.arange(num_nodes), num_nodes)), np.arange(num_nodes))
    largest = 2_999_999_999  # the product of two such numbers still fits
    assert 0 <= node_ranks(np.array([largest - 1]), largest)[0] < largest


def test_communities_are_of_equal_size() -> None:
    counts = np.bincount(EdgeGenerator(1003, 0, num_communities=10).communities(np.arange(1003)))
    assert sorted(counts) == [100] * 7 + [101] * 3


@pytest.mark.parametrize(
    ("num_nodes", "num_edges", "options", "message"),
    [
        pytest.param((10, 0), 4, {}, r"num_nodes is \(10, 0\)", id="no-targets"),
        pytest.param(10, 4, {"exponent": (0.5, 1.0)}, r"exponent \(0.5, 1.0\)", id="skew"),
        pytest.param((10, 5), 4, {"num_communities": 6}, "num_communities is 6, expected 1 to 5", id="communities"),
        pytest.param(10, 3, {"undirected": True}, "an even number", id="odd"),
        pytest.param((10, 5), 4, {"undirected": True}, "one type of nodes", id="undirected-types"),
        pytest.param(1 << 33, 4, {}, "at most 3000000000", id="too-many"),
    ],
)
def test_arguments_that_make_no_sense(num_nodes: Any, num_edges: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EdgeGenerator(num_nodes, num_edges, **options)
