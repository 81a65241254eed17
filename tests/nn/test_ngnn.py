"""NGNN: what its layers do, and that ranks run it like any PyG model; SGC needs no class of ours."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_geometric.nn import SAGEConv, SGConv

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.nn.ngnn import NGNN
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step

MODELS = ("gcn", "sage", "gat", "sgc")


def _model(name: str, in_channels: int = 5) -> nn.Module:
    torch.manual_seed(0)
    if name == "sgc":
        return SGConv(in_channels, 4, K=2).double()
    return NGNN(in_channels, 6, num_layers=3, out_channels=4, conv=name, ngnn_layers=2).double()  # type: ignore[arg-type]


def _step(rank: int, world_size: int, store: str, name: str) -> float:
    data, _ = random_graph("power-law")
    del data.edge_weight, data.edge_attr
    plain, shard, bound = _model(name), Shard.load(store, rank), resolve_backend("comm")
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    found = distributed_step(model, shard, bound.communicator)
    worst = largest_differences(found, reference_step(plain, data), shard.owned_id)
    return max(one.absolute for one in worst.values())


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_numbers_of_one_process(name: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law")
    del data.edge_weight, data.edge_attr
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="", arguments={}, notes=[])
    assert max(pool.run(_step, 3, str(tmp_path / "parts"), name)) < 1e-10


def test_a_hidden_layer_is_a_layer_and_feed_forward_layers() -> None:
    data, _ = random_graph("directed")
    model = NGNN(5, 6, num_layers=2, out_channels=4, ngnn_layers=2).double()
    x = model.convs[0](data.x, data.edge_index).relu()
    linears = [one for one in model.inside.modules() if isinstance(one, nn.Linear)]
    assert len(linears) == 2
    for linear in linears:
        x = (x @ linear.weight.t() + linear.bias).relu()
    torch.testing.assert_close(model(data.x, data.edge_index), model.convs[1](x, data.edge_index))


def test_without_feed_forward_layers_it_is_the_plain_model() -> None:
    model = NGNN(5, 6, num_layers=3, out_channels=4, ngnn_layers=0)
    assert [type(one) for one in model.convs] == [SAGEConv] * 3
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.convs.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_the_width_of_the_input_may_be_left_open(name: str) -> None:
    data, _ = random_graph("directed")
    assert _model(name, -1)(data.x, data.edge_index).shape == (37, 4)


def test_dropout_is_for_training() -> None:
    data, _ = random_graph("directed")
    model = NGNN(5, 6, num_layers=2, out_channels=4, dropout=0.5).double()
    assert not torch.equal(model(data.x, data.edge_index), model(data.x, data.edge_index))
    model.eval()
    assert torch.equal(model(data.x, data.edge_index), model(data.x, data.edge_index))


def test_mistakes_are_named() -> None:
    with pytest.raises(InputError, match="conv is 'cheb', expected one of gcn, sage, gat"):
        NGNN(5, 6, 2, 4, conv="cheb")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="num_layers is 0, expected at least 1; ngnn_layers is 1, at least 0"):
        NGNN(5, 6, 0, 4)
    with pytest.raises(InputError, match="ngnn_layers is -1, at least 0"):
        NGNN(5, 6, 2, 4, ngnn_layers=-1)
