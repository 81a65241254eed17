"""``hybrid``: whatever is chosen is exact; the choice is that of the paper's greedy algorithm, done plainly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pygdist.backends import Costs, HybridBackend
from pygdist.backends.hybrid import _chosen
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood
from pygdist.native import load
from pygdist.testing import RankPool, assert_exact

needs_native = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")

LAYERS = ["GCNConv", "GATConv", "SAGEConv-max", "GINEConv", "APPNP", "TAGConv", "SAGEConv-jk", "BatchNorm"]


@needs_native
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(
    "backend",
    [
        HybridBackend(cache_ratio=0.0), HybridBackend(cache_ratio=0.3), HybridBackend(cache_ratio=0.7),
        HybridBackend(cache_ratio=1.0), HybridBackend(costs=Costs(vertex=1.0, edge=1.0, value=6.0)),
    ],
    ids=["ratio-0", "ratio-0.3", "ratio-0.7", "ratio-1", "costs"],
)  # fmt: skip
def test_any_choice_equals_one_process(backend: HybridBackend, num_layers: int, pool: RankPool) -> None:
    assert_exact(backend, layers=LAYERS, world_sizes=[3], graphs=["power-law"], num_layers=num_layers, pool=pool)


def _near(rng: np.random.Generator, owned: int, halo: int, beyond: int) -> Neighbourhood:
    """Owned rows read the halo, the halo reads anything; rows beyond have no edges here."""
    num_rows = owned + halo + beyond
    degree = np.concatenate([rng.integers(0, 6, owned + halo), np.zeros(beyond, dtype=np.int64)])
    indptr = np.concatenate([[0], np.cumsum(degree)])
    return Neighbourhood(
        n_id=torch.arange(num_rows),
        owner=torch.zeros(num_rows, dtype=torch.int64),
        num_hops=3,
        indptr=torch.from_numpy(indptr),
        index=torch.from_numpy(rng.integers(0, num_rows, indptr[-1])),
        place=torch.arange(int(indptr[-1])),
    )


def _plainly(
    found: Neighbourhood, owned: int, halo: int, widths: tuple[int, ...], costs: Costs
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 4 as it is written, with sets."""
    indptr, index = found.indptr.tolist(), found.index.tolist()
    replicas: list[set[int]] = [set() for _ in widths]

    def below(row: int, level: int) -> list[set[int]]:
        """New rows at each level from ``level`` down: those of a row that is there are there."""
        rows = [set() for _ in range(level + 1)]
        rows[level] = {row} - replicas[level]
        for at in range(level, 0, -1):
            for one in rows[at]:
                rows[at - 1] |= {one, *index[indptr[one] : indptr[one + 1]]}
            rows[at - 1] = {one for one in rows[at - 1] if one >= owned} - replicas[at - 1]
        return rows

    def cost(rows: list[set[int]]) -> float:
        return sum(
            (costs.vertex + (indptr[row + 1] - indptr[row]) * costs.edge) * widths[at - 1]
            for at in range(1, len(rows))
            for row in rows[at]
        )

    chosen, seconds = np.zeros((len(widths), halo), dtype=bool), np.zeros((len(widths), 2))
    for hop, width in enumerate(widths):
        fetch = costs.value * width
        first = {row: cost(below(owned + row, hop)) for row in range(halo)}
        for row in sorted(range(halo), key=lambda row: first[row]):
            rows = below(owned + row, hop)
            again = cost(rows)
            if again < fetch:
                chosen[hop, row] = True
                seconds[hop, 0] += again
                for level, new in enumerate(rows):
                    replicas[level] |= new
        seconds[hop, 1] = fetch * (halo - chosen[hop].sum())
    return chosen, seconds


@needs_native
@pytest.mark.parametrize("widths", [(4,), (4, 3), (2, 5, 3)])
def test_the_choice_is_that_of_the_greedy_algorithm(widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(widths))
    some = 0
    for value in (0.0, 3.0, 10.0, 40.0, 1e9):
        found = _near(rng, owned=9, halo=17, beyond=12)
        costs = Costs(vertex=1.0, edge=0.5, value=value)
        chosen, seconds = _chosen(found, 9, 17, widths, costs, None, None)
        plain, expected = _plainly(found, 9, 17, widths, costs)
        # rows of equal cost may be taken in another order where costs beyond the limit are not told apart
        assert (chosen.astype(bool) == plain).all()
        assert seconds == pytest.approx(expected)
        some += 0 < chosen[-1].sum() < 17
    assert some or len(widths) == 1


@needs_native
def test_a_share_takes_the_cheapest() -> None:
    found = _near(np.random.default_rng(5), owned=9, halo=20, beyond=12)
    chosen, _ = _chosen(found, 9, 20, (3, 3), None, 0.25, None)
    assert chosen.sum(axis=1).tolist() == [5, 5]
    degree = found.indptr.diff()[9:29].numpy()
    assert degree[chosen[1] == 1].max() <= degree[chosen[1] == 0].min()


@needs_native
def test_no_more_than_the_memory_holds() -> None:
    found = _near(np.random.default_rng(5), owned=9, halo=20, beyond=12)
    costs = Costs(vertex=0.0, edge=0.0, value=1.0)
    every, _ = _chosen(found, 9, 20, (3, 3), costs, None, None)
    some, _ = _chosen(found, 9, 20, (3, 3), costs, None, 20 * 12 * 3 / 2**30)
    assert (every.sum(), some.sum()) == (40, 20)
    none, _ = _chosen(found, 9, 20, (3, 3), costs, None, 0.0)
    assert none.sum() == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "does not measure costs by itself yet: give it cache_ratio, or costs"),
        ({"cache_ratio": 1.5}, "cache_ratio is 1.5, expected a share"),
        ({"cache_ratio": 0.5, "memory_gib": -1}, "memory_gib is -1"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, float], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        HybridBackend(**arguments)


def test_costs_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="costs: expected seconds"):
        Costs(vertex=-1.0, edge=0.0, value=0.0)
