"""Edges that are held out: the same for any number of parts, both directions together, and none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import to_undirected

from pygdist.errors import InputError
from pygdist.graph import Shard, corrupted_sources, hold_out, known_pairs, supervised, write_store
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
    edges, nothing = torch.arange(100_000), torch.empty(0, dtype=torch.long)
    known = torch.tensor([0])  # of target 0 that node 0 is no other

    def drawn(e_id: Tensor, epoch: int) -> Tensor:
        return corrupted_sources(torch.ones_like(e_id), e_id, 100, known=known, seed=0, epoch=epoch)

    first, second = drawn(edges, 0), drawn(edges, 1)
    assert torch.equal(first[5:9], drawn(edges[5:9], 0))
    assert 0.005 < float((first == second).double().mean()) < 0.02
    counts = torch.bincount(first, minlength=100)
    assert counts.numel() == 100
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150
    assert corrupted_sources(nothing, nothing, 100, known=nothing, seed=0, epoch=0).numel() == 0


def test_pairs_that_stand_for_no_edge_are_none_for_any_number_of_parts(tmp_path: Path) -> None:
    found: list[dict[int, int]] = []
    for world_size in (1, 3):
        drawn, edges = dict[int, int](), set[tuple[int, int]]()
        shards = _shards(tmp_path / str(world_size), world_size)
        for shard in shards:
            edges |= _edges(shard, "train")
        for shard in (hold_out(shard, (0.1, 0.2), seed=4) for shard in shards):
            target, known = shard.adjacency.csr().row_index().long(), known_pairs(shard)
            assert shard.test_edges is not None
            target, e_id = torch.cat([target, shard.test_edges[1]]), torch.cat([shard.e_id, shard.test_edges[2]])
            others = corrupted_sources(target, e_id, 200, known=known, seed=0, epoch=2)
            pairs = list(zip(others.tolist(), shard.n_id[target].tolist(), strict=True))
            assert not edges.intersection(pairs)
            assert all(source != node for source, node in pairs)
            drawn |= dict(zip(e_id.tolist(), others.tolist(), strict=True))
        found.append(drawn)
    assert found[0] == found[1]
    plain = corrupted_sources(e_id * 0, e_id, 200, known=torch.tensor([200]), seed=0, epoch=2)
    assert 0 < int((plain != others).sum()) < len(e_id) / 2, "some had been edges"


def test_of_a_node_with_all_others_as_neighbours_an_edge_remains() -> None:
    def drawn(known: list[int]) -> int:
        given = {"known": torch.tensor(known), "seed": 0, "epoch": 0}
        return int(corrupted_sources(torch.tensor([0]), torch.tensor([7]), 5, **given))

    assert drawn([0, 1, 2, 3]) == 4, "the one that is left is found"
    with pytest.warns(UserWarning, match="some negative pairs are still edges"):
        assert drawn([0, 1, 2, 3, 4]) in range(5), "and none is looked for for ever"
