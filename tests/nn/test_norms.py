"""Norms over all ranks where the exactness suite does not go: evaluation, special cases, errors."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch_geometric.nn import BatchNorm, EdgeConv, GraphNorm, LayerNorm, MeanAggregation, MeanSubtractionNorm, PairNorm

from pygdist import InputError, Shard, distribute
from pygdist.backends import CommBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.testing import RankPool, random_graph


def _check_modes(rank: int, world_size: int, store: str) -> None:
    """Several steps of training, then evaluation; cumulative averages, no affine map, no running statistics."""
    data, _ = random_graph("empty-part")
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        plain = nn.BatchNorm1d(5, **options).double()  # type: ignore[arg-type]
        ours = distribute(nn.Sequential(copy.deepcopy(plain)), backend=backend, check=False)
        for scale in (1.0, 3.0, -2.0):
            assert torch.allclose(ours(shard.x * scale), plain(data.x * scale)[shard.owned_id], rtol=0, atol=1e-10)
        plain.eval(), ours.eval()
        assert torch.allclose(ours(shard.x), plain(data.x)[shard.owned_id], rtol=0, atol=1e-10)
        for name, value in plain.state_dict().items():
            assert torch.allclose(ours.state_dict()[f"0.{name}"].double(), value.double(), rtol=0, atol=1e-12), name


def test_batch_norm_in_training_and_evaluation(pool: RankPool, tmp_path: Path) -> None:
    data, part = random_graph("empty-part")
    write_store(data, part[3], tmp_path / "store", num_parts=3, method="test", arguments={})
    pool.run(_check_modes, 3, str(tmp_path / "store"))


class Doubled(nn.BatchNorm1d):
    """A user's norm, which calls its parent's forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Channels(nn.Module):
    """Rows as channels of one image, in two or three dimensions."""

    def __init__(self, dim: int, **options: bool) -> None:
        super().__init__()
        self.dim, self.norm = dim, nn.InstanceNorm1d(5, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x.t() if self.dim == 2 else x.t()[None])
        return out.view(5, -1).t()


def _check_layouts(rank: int, world_size: int, store: str) -> None:
    """Instance norms see rows, images of nodes, or channels over all nodes; a rank has as many nodes as channels."""
    data, _ = random_graph("directed")
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group(), check_order=True))
    images = data.x[:, :, None] * torch.arange(1.0, 4).double()
    norms: list[tuple[nn.Module, torch.Tensor]] = [
        (Doubled(5), data.x),
        (nn.InstanceNorm1d(5), data.x),
        (nn.InstanceNorm1d(5, affine=True), images),
        (nn.InstanceNorm2d(5), images[..., None].expand(-1, -1, -1, 2)),
        *((Channels(dim, affine=True, track_running_stats=track), data.x) for dim in (2, 3) for track in (True, False)),
    ]
    for plain, x in norms:
        plain.double()
        ours = distribute(nn.Sequential(copy.deepcopy(plain)), backend=backend, check=False)
        for training in (True, True, False):
            plain.train(training), ours.train(training)
            mine = ours(x[shard.owned_id])
            assert torch.allclose(mine, plain(x)[shard.owned_id], rtol=0, atol=1e-10), (plain, training)
        for name, value in plain.state_dict().items():
            assert torch.allclose(ours.state_dict()[f"0.{name}"].double(), value.double(), rtol=0, atol=1e-12), name


@pytest.mark.filterwarnings("ignore:input's size at dim=0")
def test_layouts_of_instance_norms_and_a_norm_of_the_users(pool: RankPool, tmp_path: Path) -> None:
    data, _ = random_graph("directed")
    part = np.minimum(np.arange(data.num_nodes) // 5, 2)  # five nodes, which is also the width of rows
    write_store(data, part, tmp_path / "store", num_parts=3, method="test", arguments={})
    pool.run(_check_layouts, 3, str(tmp_path / "store"))


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return Shard.load(tmp_path / "store", 0)


def test_what_needs_several_graphs_is_refused(shard: Shard) -> None:
    backend = CommBackend()
    backend.bind(shard, Communicator())
    norm = distribute(GraphNorm(5).double(), backend=backend, check=False)
    with pytest.raises(InputError, match=r"DistributedGraphNorm: a 'batch' vector"):
        norm(shard.x, torch.zeros(37, dtype=torch.int64))
    with pytest.raises(InputError, match=r"expected rows of nodes \(n, channels\), got \(37, 5, 1\)"):
        distribute(nn.BatchNorm1d(5).double(), backend=backend, check=False)(shard.x[..., None])
    rows = LayerNorm(5, mode="node").double()
    expected = rows(shard.x)
    assert torch.equal(distribute(rows, backend=backend, check=False)(shard.x), expected)


def test_what_instance_norms_cannot_tell_or_keep_is_refused(shard: Shard) -> None:
    backend = CommBackend()
    backend.bind(shard, Communicator())
    tracking = distribute(nn.InstanceNorm1d(5, track_running_stats=True).double(), backend=backend, check=False)
    with pytest.raises(InputError, match="use track_running_stats=False"):
        tracking(shard.x[..., None].expand(-1, -1, 3))
    backend.bind(shard.replace(num_nodes=10, num_owned=5), Communicator())
    square = distribute(nn.InstanceNorm1d(5).double(), backend=backend, check=False)
    with pytest.raises(InputError, match=r"shape \(5, 5\), and no rank knows which of its dimensions is that of nodes"):
        square(shard.x[:5])
    image = distribute(nn.InstanceNorm2d(5).double(), backend=backend, check=False)
    with pytest.raises(InputError, match="a norm over nodes got 1 rows, but this rank has 5 nodes"):
        image(shard.x[:5].t()[None, ..., None].expand(-1, -1, -1, 2))


def test_norms_of_single_rows_may_be_inside_a_message(pool: RankPool, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[2], tmp_path / "store", num_parts=2, method="test", arguments={})
    pool.run(_check_message, 2, str(tmp_path / "store"))


def _check_message(rank: int, world_size: int, store: str) -> None:
    data, _ = random_graph("directed")
    shard, backend = Shard.load(store, rank), CommBackend()
    backend.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    layer = EdgeConv(nn.Sequential(nn.Linear(10, 4), nn.InstanceNorm1d(4))).double()
    expected = layer(data.x, data.edge_index)[shard.owned_id]
    distribute(layer, backend=backend)
    assert torch.allclose(layer(shard.x, shard.adjacency), expected, rtol=0, atol=1e-10)


def test_a_weight_without_a_bias(shard: Shard) -> None:
    backend, plain = CommBackend(), nn.BatchNorm1d(5).double()
    backend.bind(shard, Communicator())
    nn.init.normal_(plain.weight)
    plain.bias = None  # as torch's own option does
    expected = copy.deepcopy(plain)(shard.x)
    assert torch.allclose(distribute(plain, backend=backend, check=False)(shard.x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [PairNorm(), LayerNorm(5, mode="graph"), MeanSubtractionNorm(), GraphNorm(5), MeanAggregation()],
    ids=lambda norm: type(norm).__name__,
)
def test_sums_over_many_nodes_fit_half_precision(norm: nn.Module, dtype: torch.dtype, shard: Shard) -> None:
    x = (torch.rand(40_000, 5, dtype=torch.float64) + 5).to(dtype)  # their sum is above 65504
    backend = CommBackend()
    backend.bind(shard.replace(num_nodes=len(x), num_owned=len(x)), Communicator())
    expected = copy.deepcopy(norm).double()(x.double())
    out = distribute(copy.deepcopy(norm), backend=backend, check=False)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.03)


def test_a_graph_of_one_node(shard: Shard) -> None:
    backend = CommBackend()
    backend.bind(shard.replace(num_nodes=1, num_owned=1), Communicator())
    x = shard.x[:1]
    plain = BatchNorm(5, allow_single_element=True).double()
    assert torch.equal(distribute(copy.deepcopy(plain), backend=backend, check=False)(x), plain(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        distribute(BatchNorm(5).double(), backend=backend, check=False)(x)
