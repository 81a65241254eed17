"""Edges that are held out: the same for any number of parts, both directions together, and none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_geometric.utils import to_undirected

from pygdist.errors import InputError
from pygdist.graph import Shard, corrupted_sources, hold_out, supervised, write_store
from pygdist.testing import random_graph


def _shards(folder: Path, world_size: int) -> list[Shard]:
    data, parts = random_graph("power-law", num_nodes=200)
    data.edge_index = to_undirected(data.edge_index)
    for name in ("edge_weight", "edge_attr", "edge_type"):
        data[name] = None
    write_store(data, parts[world_size], folder, num_parts=world_size, method="", arguments={}, notes=[])
    return [Shard.load(folder, rank) for rank in range(world_size)]


def _edges(shard: Shard, name: str) -> set[tuple[int, int]]:
    if name == "train":
        ends = shard.n_id[shard.adjacency.csr().index], shard.n_id[shard.adjacency.csr().row_index()]
    else:
        source, target, _ = getattr(shard, f"{name}_edges")
        ends = shard.n_id[source], shard.n_id[target]
    return set(zip(*(part.tolist() for part in ends), strict=True))


def test_the_same_edges_are_held_out_for_any_number_of_parts(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 3):
        shards = _shards(tmp_path / str(world_size), world_size)
        split = [hold_out(shard, (0.1, 0.2), seed=4) for shard in shards]
        whole = set().union(*(_edges(shard, "train") for shard in shards))
        kinds = {name: set().union(*(_edges(one, name) for one in split)) for name in ("train", "val", "test")}
        assert whole == kinds["train"] | kinds["val"] | kinds["test"]
        assert sum(map(len, kinds.values())) == len(whole)
        for name, share in (("val", 0.1), ("test", 0.2)):
            assert {(target, source) for source, target in kinds[name]} == kinds[name]
            assert len(kinds[name]) / len(whole) == pytest.approx(share, abs=0.05)
            assert all(source != target for source, target in kinds[name])
        found.append(kinds)
    assert found[0] == found[1]
    other = hold_out(_shards(tmp_path / "1", 1)[0], (0.1, 0.2), seed=5)
    assert _edges(other, "val") != found[0]["val"]


def test_what_belongs_to_edges_stays_with_them(tmp_path: Path) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path, num_parts=2, method="", arguments={}, notes=[])
    for rank in range(2):
        shard = hold_out(Shard.load(tmp_path, rank), (0.2, 0.2))
        csr = shard.adjacency.csr()
        assert torch.equal(data.edge_index[0][shard.e_id], shard.n_id[csr.index])
        assert torch.equal(data.edge_index[1][shard.e_id], shard.n_id[csr.row_index()])
        assert shard.edge_weight is not None
        assert torch.equal(shard.edge_weight.double(), data.edge_weight[shard.e_id].double())
        assert shard.test_edges is not None
        source, target, e_id = shard.test_edges
        assert torch.equal(data.edge_index[:, e_id], torch.stack([shard.n_id[source], shard.n_id[target]]))
        loops = csr.index == csr.row_index()
        assert torch.equal(supervised(shard), ~loops)
        assert loops.any()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (-0.1, 0.2), (0.1,)])
def test_shares_that_leave_nothing_are_refused(shares: tuple[float, ...], tmp_path: Path) -> None:
    shard = _shards(tmp_path, 1)[0]
    with pytest.raises(InputError, match=r"edge_split: .* expected two shares of the edges"):
        hold_out(shard, shares)


def test_other_sources_are_even_and_change_from_epoch_to_epoch() -> None:
    edges = torch.arange(100_000)
    first, second = (corrupted_sources(edges, 100, seed=0, epoch=epoch) for epoch in (0, 1))
    assert torch.equal(first[5:9], corrupted_sources(edges[5:9], 100, seed=0, epoch=0))
    assert 0.005 < float((first == second).double().mean()) < 0.02
    counts = torch.bincount(first, minlength=100)
    assert counts.numel() == 100
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150
