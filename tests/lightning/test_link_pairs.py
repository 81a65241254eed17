"""Pairs of a vertex-cut, whose edges go to the owners of their targets: those of one process, each on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from pygdist.comm import Communicator, NodeDirectory
from pygdist.graph import Shard, hold_out, supervised
from pygdist.lightning.link_pairs import LinkPairs, Pairs
from pygdist.testing import RankPool, random_graph
from tests.backends.vertex_cuts import write_random_cut

KINDS = ("train", "val", "test")


def _found(rank: int, world_size: int, store: str) -> dict[str, list[tuple[int, ...]]]:
    """Edges by kind (source, target, number), known pairs, nodes, and edges of the part, of a rank; by global ids."""
    whole = Shard.load(store, rank)
    shard, communicator = hold_out(whole, (0.2, 0.2), seed=1), Communicator(dist.new_group(), check_order=True)
    directory = NodeDirectory(shard.owned_id, shard.num_nodes, communicator)
    pairs = LinkPairs.of(shard, directory, splits_nodes=True)

    def listed(held: Pairs | None) -> list[tuple[int, ...]]:
        assert held is not None
        place = held.target * shard.num_edges + held.e_id
        assert torch.equal(place, place.sort().values), "by target, then by number"
        rows = shard.owned_id.double()[:, None]
        sources = torch.cat([rows, communicator.exchange_rows(rows, held.plan)])[held.source, 0].long()
        return _tuples(sources, shard.owned_id[held.target], held.e_id)

    target, source = pairs.known // shard.num_nodes, pairs.known % shard.num_nodes
    assert torch.equal(pairs.known, pairs.known.sort().values)
    return {
        **{kind: listed(getattr(pairs, kind)) for kind in KINDS},
        "known": _tuples(source, shard.owned_id[target]),
        "part": _tuples(whole.e_id[supervised(whole)]),
        "owned": _tuples(shard.owned_id),
    }


def _tuples(*columns: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in torch.stack([column.long() for column in columns], dim=1).tolist()]


@pytest.mark.parametrize(("kind", "empty"), [("empty-part", "owned"), ("no-train-part", "part")])
def test_each_pair_is_on_one_rank_as_in_one_process(kind: str, empty: str, pool: RankPool, tmp_path: Path) -> None:
    """One part owns no node, or holds no edge but self-loops."""
    graph, _ = random_graph(kind)
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    data = Data(x=graph.x, edge_index=graph.edge_index[:, order])
    (expected,) = pool.run(_found, 1, write_random_cut(tmp_path, kind, 1, data))
    source, target = data.edge_index
    edges = _tuples(source, target, torch.arange(source.numel()))
    learned = [one for one in edges if one[0] != one[1]]
    assert len(learned) < len(edges), "some are self-loops, of which nothing is learned"
    assert len({one[:2] for one in learned}) < len(learned), "and some come twice"
    assert sorted(one for name in KINDS for one in expected[name]) == sorted(learned)
    assert all(expected[name] for name in KINDS)
    assert sorted(expected["known"]) == sorted([one[:2] for one in learned] + [(node, node) for node in range(37)])

    found = pool.run(_found, 3, write_random_cut(tmp_path, kind, 3, data))
    assert not found[2][empty]
    for name in (*KINDS, "known"):
        assert sorted(one for rank in found for one in rank[name]) == sorted(expected[name]), name
    for rank in found:
        assert {one[1] for name in (*KINDS, "known") for one in rank[name]} <= {node for (node,) in rank["owned"]}
