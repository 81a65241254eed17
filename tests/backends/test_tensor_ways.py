"""Each row of the tables at the top of ``tensor.py``: which way a layer and its hops run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_geometric.nn import APPNP, GAT, GCN, GATConv, GATv2Conv, GCNConv, TransformerConv

from pygdist.backends import TensorBackend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.nn.decoupled import decouple
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

LIMIT = 1e-3  # GiB


def _noting(way: str) -> Callable[..., Any]:
    def run(self: Ways, *args: Any, **kwargs: Any) -> Any:
        self.taken.append(way)
        return getattr(TensorBackend, way)(self, *args, **kwargs)

    return run


class Ways(TensorBackend):
    """Notes the ways that it takes."""

    name = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.taken: list[str] = []

    _decoupled_attention, _decoupled_sums = _noting("_decoupled_attention"), _noting("_decoupled_sums")
    _on_slices, _transformer, _attention = _noting("_on_slices"), _noting("_transformer"), _noting("_attention")
    _product, _messages = _noting("_product"), _noting("_messages")


def _taken(rank: int, world_size: int, store: str, make: Callable[[], torch.nn.Module], limit: float | None) -> Any:
    torch.manual_seed(0)
    shard, backend = Shard.load(store, rank), Ways(memory_gib=limit)
    backend.bind(shard, Communicator(dist.new_group()))
    distribute(make().double(), backend=backend, check=False)(shard.x, shard.adjacency)
    return backend.taken


def decoupled_attention() -> torch.nn.Module:
    return decouple(GAT(5, 4, num_layers=2, out_channels=3))


def decoupled_sums() -> torch.nn.Module:
    return decouple(GCN(5, 4, num_layers=2, out_channels=3))


def sums_of_columns() -> torch.nn.Module:
    return APPNP(K=2, alpha=0.1)


def product() -> torch.nn.Module:
    return GCNConv(5, 3)


def dot_products() -> torch.nn.Module:
    return TransformerConv(5, 3)


def scores() -> torch.nn.Module:
    return GATConv(5, 3)


def messages() -> torch.nn.Module:
    return GATv2Conv(5, 3)


@pytest.mark.parametrize(
    ("make", "world_size", "limit", "expected"),
    [
        (decoupled_attention, 2, None, ["_decoupled_attention"]),
        (decoupled_sums, 2, None, ["_decoupled_sums"]),
        (sums_of_columns, 2, None, ["_on_slices"]),
        (sums_of_columns, 2, LIMIT, ["_product", "_product"]),
        (sums_of_columns, 1, None, []),
        (product, 2, None, ["_product"]),
        (product, 1, None, []),
        (product, 1, LIMIT, ["_product"]),
        (dot_products, 2, None, ["_transformer"]),
        (scores, 2, None, ["_attention"]),
        (messages, 2, None, ["_messages"]),
    ],
)
def test_the_way_that_is_taken(
    make: Callable[[], torch.nn.Module],
    world_size: int,
    limit: float | None,
    expected: list[str],
    tmp_path: Path,
    pool: RankPool,
) -> None:
    data, parts = random_graph("power-law")
    write_store(data, parts[world_size], tmp_path / "parts", num_parts=world_size, method="x", arguments={}, notes=[])
    assert pool.run(_taken, world_size, str(tmp_path / "parts"), make, limit) == [expected] * world_size
