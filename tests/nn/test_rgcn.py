"""R-GCN on a heterogeneous graph in parts: the numbers of one process, relation by relation."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.nn import RGCNConv

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, load_graph, write_store
from pygdist.nn.rgcn import RGCN
from pygdist.routing import distribute
from pygdist.testing import RankPool
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step


def test_a_stack_has_at_least_one_layer() -> None:
    with pytest.raises(InputError, match="RGCN: num_layers is 0, expected at least 1"):
        RGCN(4, 4, num_layers=0, out_channels=4, num_relations=2)


def _graph() -> Data:
    data = load_graph("mag-like", scale=0.001, reverse=True)
    data.x = data.x.double()
    return data


def _step(rank: int, world_size: int, store: str, backend: str) -> float:
    data, shard = _graph(), Shard.load(store, rank)
    torch.manual_seed(0)
    plain = RGCN(132, 6, num_layers=2, out_channels=349, num_relations=8, num_bases=3).double()
    bound = resolve_backend(backend)
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    found = distributed_step(model, shard, bound.communicator)
    worst = largest_differences(found, reference_step(plain, data), shard.owned_id)
    return max(one.absolute for one in worst.values())


@pytest.mark.slow
@pytest.mark.parametrize("dealt", ["in turns", "in a row"])  # in a row, ranks lack relations that others have
@pytest.mark.parametrize("backend", ["comm", "cache", "tensor"])
def test_a_graph_of_several_types_equals_one_process(backend: str, dealt: str, tmp_path: Path, pool: RankPool) -> None:
    data = _graph()
    nodes, num_nodes = torch.arange(int(data.num_nodes or 0)).numpy(), int(data.num_nodes or 0)
    part = nodes * 7 % 3 if dealt == "in turns" else nodes * 3 // num_nodes
    write_store(data, part, tmp_path / "parts", num_parts=3, method="", arguments={}, notes=[])
    assert max(pool.run(_step, 3, str(tmp_path / "parts"), backend)) < 1e-10


def _chosen(rank: int, world_size: int, store: str) -> list[object]:
    """Whether the layer looked at its own edges, and PyG's setting afterwards."""
    shard, bound = Shard.load(store, rank), resolve_backend("comm")
    bound.bind(shard, Communicator(dist.new_group()))
    layer = RGCNConv(132, 6, num_relations=8).double()
    distribute(layer, backend=bound, check=False)
    layer(shard.x, shard.adjacency, shard.edge_type)
    return [hasattr(layer, "_use_segment_matmul_heuristic_output"), torch_geometric.backend.use_segment_matmul]


def test_ranks_do_not_choose_by_their_own_edges_how_many_hops_they_make(tmp_path: Path, pool: RankPool) -> None:
    """With pyg-lib RGCNConv may make one hop for all relations, if a rank's largest is small."""
    data = _graph()
    part = torch.arange(int(data.num_nodes or 0)).numpy() % 2
    write_store(data, part, tmp_path / "parts", num_parts=2, method="", arguments={}, notes=[])
    plain = RGCNConv(132, 6, num_relations=8).double()
    plain(data.x, data.edge_index, data.edge_type)
    assert hasattr(plain, "_use_segment_matmul_heuristic_output")
    assert pool.run(_chosen, 2, str(tmp_path / "parts")) == [[False, None], [False, None]]
