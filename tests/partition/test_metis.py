"""METIS: fewer cut edges than any order of ids, even parts, whichever library brings it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_geometric.utils import stochastic_blockmodel_graph

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.partition import HashPartitioner, MetisPartitioner
from pygdist.partition.metis import metis_libraries

INSTALLED = metis_libraries()


def blocks(num_blocks: int, size: int = 50) -> EdgeStream:
    """Dense groups of nodes with few edges between them, their ids shuffled."""
    torch.manual_seed(0)
    edges = stochastic_blockmodel_graph([size] * num_blocks, 0.3 * torch.eye(num_blocks) + 0.005).numpy()
    shuffled = np.random.default_rng(0).permutation(num_blocks * size)
    return EdgeStream(shuffled[edges], num_nodes=num_blocks * size)


def cut(edges: EdgeStream, part: np.ndarray) -> float:
    ends = np.concatenate(list(edges.chunks()), axis=1)
    return float((part[ends[0]] != part[ends[1]]).mean())


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize("library", INSTALLED)
@pytest.mark.parametrize("num_parts", [2, 4])
def test_finds_the_blocks(library: str, num_parts: int, recursive: bool) -> None:
    edges = blocks(num_parts)
    part = MetisPartitioner(library=library, recursive=recursive).assign(edges, num_parts)  # type: ignore[arg-type]
    sizes = np.bincount(part, minlength=num_parts)
    assert sizes.max() <= 1.05 * sizes.mean()
    assert cut(edges, part) < 0.1 < 0.4 < cut(edges, HashPartitioner().assign(edges, num_parts))


def test_duplicates_loops_and_directions_do_not_count() -> None:
    edges = next(iter(blocks(2).chunks()))
    loops = np.tile(np.arange(100), (2, 30))
    twice = np.concatenate([edges, edges, edges[::-1], loops], axis=1)
    plain, noisy = (MetisPartitioner().assign(EdgeStream(e, num_nodes=100), 2) for e in (edges, twice))
    np.testing.assert_array_equal(plain, noisy)


def test_without_edges_parts_are_even() -> None:
    part = MetisPartitioner().assign(EdgeStream(np.empty((2, 0), dtype=np.int64), num_nodes=7), 3)
    assert sorted(np.bincount(part)) == [2, 2, 3]


def test_the_store_notes_which_library_was_used() -> None:
    assert MetisPartitioner().arguments() == {"recursive": False, "library": INSTALLED[0]}


def test_a_library_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="library is 'kahip', expected one of auto, pyg_lib, torch_sparse, pymetis"):
        MetisPartitioner(library="kahip")  # type: ignore[arg-type]
    missing = {"pyg_lib", "torch_sparse"} - set(INSTALLED)
    if not missing:
        pytest.skip("every library is installed, with METIS")
    for library in missing:
        with pytest.raises(
            InputError, match=f"metis: {library} is not installed, or was built without METIS; use"
        ) as refused:
            MetisPartitioner(library=library)  # type: ignore[arg-type]
        assert str(refused.value).endswith(f"https://data.pyg.org/whl/torch-{torch.__version__}.html")
