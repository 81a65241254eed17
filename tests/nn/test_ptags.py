"""P-TAGS layers are PyG layers: Listing 1 is GraphSAGE, and every exact backend gives the numbers of one process."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv, Sequential

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.nn import PTAGSConv
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step


class PTAGSGraphSAGE(PTAGSConv):
    """Listing 1 of the paper."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="mean")
        self.fc_neigh = nn.Linear(in_channels, out_channels)
        self.fc_self = nn.Linear(in_channels, out_channels, bias=False)

    def transform(self, x: Tensor, aggregated: Tensor) -> Tensor:
        out: Tensor = self.fc_neigh(aggregated) + self.fc_self(x)
        return out

    def apply_rows(self, out: Tensor) -> Tensor:
        return out.relu()


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [(PTAGSGraphSAGE(5, 6), "x, edge_index -> x"), (PTAGSGraphSAGE(6, 4), "x, edge_index -> x")]
    model: nn.Module = Sequential("x, edge_index", layers).double()
    return model


def test_listing_is_sage_conv() -> None:
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    listing, conv = PTAGSGraphSAGE(5, 4).double(), SAGEConv(5, 4).double()
    for one, other in ((listing.fc_neigh, conv.lin_l), (listing.fc_self, conv.lin_r)):
        one.load_state_dict(other.state_dict())
    expected = conv(data.x, data.edge_index).relu()
    torch.testing.assert_close(listing(data.x, data.edge_index), expected, rtol=1e-12, atol=1e-12)


def _step(rank: int, world_size: int, store: str, backend: str) -> float:
    data, _ = random_graph("power-law")
    del data.edge_weight, data.edge_attr
    plain, shard, bound = _model(), Shard.load(store, rank), resolve_backend(backend)
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    found = distributed_step(model, shard, bound.communicator)
    worst = largest_differences(found, reference_step(plain, data), shard.owned_id)
    return max(one.absolute for one in worst.values())


@pytest.mark.parametrize("backend", ["comm", "tensor"])
def test_ranks_give_the_numbers_of_one_process(backend: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law")
    del data.edge_weight, data.edge_attr
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="", arguments={}, notes=[])
    assert max(pool.run(_step, 3, str(tmp_path / "parts"), backend)) < 1e-10
