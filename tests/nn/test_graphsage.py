"""GraphSAGE with the GCN aggregator: the paper's formula, and its exactness on split nodes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.nn.graphsage import GraphSAGEGCN
from pygdist.routing import distribute
from pygdist.testing import RankPool
from pygdist.testing.exactness import Step, distributed_step, largest_differences, reference_step
from pygdist.testing.graphs import random_graph
from tests.backends.vertex_cuts import write_random_cut


def _dense(model: GraphSAGEGCN, x: Tensor, edge_index: Tensor) -> Tensor:
    """Compute the formula with a dense adjacency; a node with a loop counts once."""
    among = torch.zeros(len(x), len(x), dtype=x.dtype).index_put((edge_index[1], edge_index[0]), x.new_ones(()), True)
    among.fill_diagonal_(1)
    for number, layer in enumerate(model.convs):
        x = layer.lin_l(among @ x / among.sum(1, keepdim=True))
        x = x.relu() if number < len(model.convs) - 1 else x
    return x


def test_a_node_is_averaged_with_its_neighbours() -> None:
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    model = GraphSAGEGCN(data.x.size(1), 6, num_layers=3, out_channels=3).double()
    assert sum(parameter.numel() for parameter in model.parameters()) == 6 * 6 + 6 * 7 + 3 * 7
    assert torch.allclose(model(data.x, data.edge_index), _dense(model, data.x, data.edge_index), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["comm", "cache", "hybrid", "tensor", "delayed"])
def test_three_ranks_compute_the_same(backend: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    torch.manual_seed(0)
    model = GraphSAGEGCN(data.x.size(1), 6, num_layers=2, out_channels=3).double()
    expected = reference_step(copy.deepcopy(model), data)
    if backend == "delayed":
        store = write_random_cut(tmp_path, "directed", 3)
    else:
        store = str(tmp_path / "parts")
        write_store(data, parts[3], Path(store), num_parts=3, method="test", arguments={}, notes=[])
    for worst in pool.run(_step, 3, store, backend, model, expected):
        assert worst < 1e-10


def _step(rank: int, world_size: int, store: str, backend: str, model: GraphSAGEGCN, expected: Step) -> float:
    shard, bound = Shard.load(store, rank), resolve_backend(backend)
    bound.bind(shard, Communicator(dist.new_group()))
    found = distributed_step(distribute(model, backend=bound, check=False), shard, bound.communicator)
    return max(one.absolute for one in largest_differences(found, expected, shard.owned_id).values())
