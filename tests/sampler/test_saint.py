"""GraphSAINT: who is drawn how often, and that the normalisation undoes it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from torch_geometric.data import Data

from pygdist.errors import InputError
from pygdist.kernels import CSR
from pygdist.native import library
from pygdist.sampler import SaintEdgeBatches, SaintNodeBatches, SaintWalkBatches
from pygdist.sampler.saint import _SaintBatches, norms
from tests.sampler.oracle import edges_of, part_of, random_graph

pytestmark = pytest.mark.skipif(library.load() is None, reason="the native library was not built here")

KINDS = {
    "node": SaintNodeBatches(12, num_steps=2000, sample_coverage=400),
    "edge": SaintEdgeBatches(8, num_steps=2000, sample_coverage=400),
    "walk": SaintWalkBatches(2, 6, num_steps=2000, sample_coverage=400),
}
every = pytest.mark.parametrize("kind", KINDS)


def _probabilities(kind: str, csr: CSR) -> np.ndarray:
    """How often each node is drawn, from the definitions."""
    count = csr.num_rows
    to = np.zeros((count, count))
    np.add.at(to, (edges_of(csr)[1].numpy(), edges_of(csr)[0].numpy()), 1)
    if kind == "node":
        drawn = to.sum(0) + 1
    elif kind == "edge":
        loops = to + np.eye(count)
        of_edge = loops * (1 / loops.sum(1)[:, None] + 1 / loops.sum(0)[None])
        drawn = of_edge.sum(1) + of_edge.sum(0)
    else:
        degree = to.sum(1)
        step = np.where(degree[:, None] > 0, to / np.maximum(degree, 1)[:, None], np.eye(count))
        start = np.full(count, 1 / count)
        drawn = start + start @ step + start @ step @ step
    return np.asarray(drawn / drawn.sum())


@pytest.mark.slow
@every
def test_nodes_are_drawn_as_often_as_defined(kind: str) -> None:
    csr = random_graph(30, 200)
    draw = KINDS[kind]._draw(csr)
    rng = np.random.default_rng(5)
    wanted = _probabilities(kind, csr)
    # draws of one walk or edge depend on each other: one of each, by turns, is independent
    found = np.zeros(30)
    for number in range(12000):
        nodes = draw(rng)
        found[nodes[(number * 7) % len(nodes)]] += 1
    if kind == "edge":  # which of an edge's two ends comes first depends on how it was drawn
        found = np.bincount(np.concatenate([draw(rng) for _ in range(750)]), minlength=30) * 1.0
    assert stats.chisquare(found, wanted * found.sum()).pvalue > 1e-4
    assert found.min() > 0  # those without edges, too


@every
@pytest.mark.parametrize("permuted", [True, False], ids=["perm", "no-perm"])
def test_norms_equal_the_slow_counts(kind: str, permuted: bool) -> None:
    csr = random_graph(40, 300, permuted=permuted)
    edges = edges_of(csr).t().tolist()
    draw = KINDS[kind]._draw(csr)
    nodes, pairs = Counter[int](), Counter[int]()
    samples = held = 0
    while held < 40 * 3:
        mine = set(draw(np.random.default_rng((7, 0, 0, samples))).tolist())
        nodes.update(mine)
        pairs.update(e for e, (u, v) in enumerate(edges) if u in mine and v in mine)
        samples, held = samples + 1, held + len(mine)
    node_norm, edge_norm = norms(csr, draw, 3, num_train=9, seed=7)
    assert node_norm.tolist() == pytest.approx([samples / max(nodes[v], 1) / 9 for v in range(40)])
    wanted = [max(nodes[v], 1) / max(pairs[e], 1) for e, (_, v) in enumerate(edges)]
    assert min(pairs[e] for e in range(len(edges))) == 0, "some are never sampled together"
    assert edge_norm.tolist() == pytest.approx(wanted)
    assert node_norm.dtype == edge_norm.dtype == torch.float32


@pytest.mark.slow
@every
def test_losses_and_sums_are_those_of_the_part_on_average(kind: str) -> None:
    csr = random_graph(40, 300)
    part = part_of(csr)
    losses, rows = torch.rand(40) + torch.arange(40), part.x.double() + 1
    edges = edges_of(csr)
    whole = torch.zeros(40, 5, dtype=torch.float64).index_add_(0, edges[1], rows[edges[0]])
    estimates, plain, times = [], [], torch.zeros(40)
    sums, raw = torch.zeros(2, 40, 5, dtype=torch.float64)
    for batch in KINDS[kind].loader(part, csr, seed=2):
        mine = losses[batch.n_id]
        estimates.append(float((batch.node_norm * mine)[batch.train_mask].sum()))
        plain.append(float(mine[batch.train_mask].mean()) if bool(batch.train_mask.any()) else 0.0)
        messages = batch.edge_norm.view(-1, 1) * rows[batch.n_id[batch.edge_index[0]]]
        sums.index_add_(0, batch.n_id[batch.edge_index[1]], messages)
        raw.index_add_(0, batch.n_id[batch.edge_index[1]], rows[batch.n_id[batch.edge_index[0]]])
        times[batch.n_id] += 1
    wanted = float(losses[part.train_mask].mean())
    spread = float(np.std(estimates)) / len(estimates) ** 0.5
    assert abs(np.mean(estimates) - wanted) < 4 * spread + 0.01 * wanted
    if kind != "edge":  # without the norm it is far off where some nodes are drawn much more often
        assert abs(np.mean(plain) - wanted) > abs(np.mean(estimates) - wanted)
    often = times > 300
    assert int(often.sum()) > 10
    error, without = (
        float((found / times.view(-1, 1) - whole)[often].norm() / whole[often].norm()) for found in (sums, raw)
    )
    assert error < 0.06 < 0.3 < without


def test_the_normalisation_may_be_left_out() -> None:
    csr = random_graph()
    (batch,) = SaintNodeBatches(5, num_steps=1, sample_coverage=0).loader(part_of(csr), csr, seed=0)
    assert "node_norm" not in batch
    assert "edge_norm" not in batch
    assert 1 <= batch.num_nodes <= 5


def test_a_walk_goes_where_messages_come_from() -> None:
    csr = CSR.from_coo(torch.tensor([1, 2]), torch.tensor([0, 1]), num_rows=4, num_cols=4)  # 0 -> 1 -> 2, and 3
    part = Data(x=torch.zeros(4, 1), train_mask=torch.ones(4, dtype=torch.bool))
    found = set()
    for batch in SaintWalkBatches(2, 1, num_steps=60, sample_coverage=0).loader(part, csr, seed=0):
        found.add(tuple(batch.n_id.tolist()))
    assert found == {(0,), (0, 1), (0, 1, 2), (3,)}


@pytest.mark.parametrize("kind", [SaintNodeBatches, SaintEdgeBatches, SaintWalkBatches])
def test_mistakes_are_named(kind: type[_SaintBatches], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="batch_size is 0, expected at least 1"):
        kind(batch_size=0)
    with pytest.raises(InputError, match="num_steps is 0, expected at least 1"):
        kind(num_steps=0)
    with pytest.raises(InputError, match="sample_coverage is -1, expected at least 0"):
        kind(sample_coverage=-1)
    if kind is SaintWalkBatches:
        with pytest.raises(InputError, match="walk_length is 0, expected at least 1"):
            SaintWalkBatches(walk_length=0)
    monkeypatch.setattr("pygdist.native.library.load", lambda: None)
    csr = random_graph()
    with pytest.raises(InputError, match=rf"{kind.__name__} needs pygdist's native library"):
        kind().loader(part_of(csr), csr, seed=0)
