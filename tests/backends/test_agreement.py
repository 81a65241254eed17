"""What ranks must decide alike though one of them cannot see it: whether weights, rows or types of edges are others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import ChebConv, GCNConv, GraphConv, RGCNConv
from torch_geometric.utils import degree, remove_self_loops

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.graph import Shard, write_store
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from tests.turns import by_turns

pytestmark = pytest.mark.slow


class Dropped(nn.Module):
    """Of a rank without in-edges dropout gives the weights back."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GraphConv(5, 5), GraphConv(5, 5)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        weight = functional.dropout(edge_weight, 1e-9)  # others, with the same numbers
        for conv in self.convs:
            x = conv(x, edge_index, weight)
        return x


class Viewed(nn.Module):
    """Of a rank with one edge ``contiguous()`` gives the same memory, of others a copy."""

    def __init__(self, *, learned: bool, norm: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5) if learned else nn.Identity()
        self.conv = GCNConv(5, 5, add_self_loops=False) if norm else GraphConv(5, 5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.conv(self.lin(x), edge_index, edge_attr[:, 0].contiguous())
        return out


class WithoutLoops(nn.Module):
    """Of a rank without self-loops the edges are the same before and after they are removed."""

    def __init__(self, conv: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([conv(), conv()])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor, edge_attr: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
            edge_index, _ = remove_self_loops(edge_index)
        return x


class Averaged(nn.Module):
    """Divides by in-degrees of sources."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(5, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x / degree(edge_index[1], x.size(0)).clamp(min=1).view(-1, 1), edge_index)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropped": Dropped,
    "viewed": lambda: Viewed(learned=False, norm=False),
    "viewed-learned": lambda: Viewed(learned=True, norm=False),
    "viewed-normalised": lambda: Viewed(learned=True, norm=True),
    "loops-normalised": lambda: WithoutLoops(lambda: GCNConv(5, 5, add_self_loops=False)),
    "loops-laplacian": lambda: WithoutLoops(lambda: ChebConv(5, 5, K=2)),
    "loops-degrees": lambda: WithoutLoops(Averaged),
}


def _passes(rank: int, world_size: int, store: str, name: str, backend: str, data: Data) -> float:
    bound, shard, worst = resolve_backend(backend), Shard.load(store, rank), 0.0
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    for _ in range(4):
        out, expected = (
            one(part.x, edges, part.edge_weight, part.edge_attr)
            for one, part, edges in ((model, shard, shard.adjacency), (plain, data, data.edge_index))
        )
        out.sum().backward()
        worst = max(worst, float((out - expected[shard.owned_id]).abs().max()))
    return worst


@pytest.mark.parametrize("backend", ["comm", "hybrid", "tensor"])
@pytest.mark.parametrize(
    ("name", "edges_of_last"), [("dropped", 0), *((name, 1) for name in MODELS if name != "dropped")]
)
def test_weights_that_are_others_where_a_rank_sees_the_same(
    name: str, edges_of_last: int, backend: str, tmp_path: Path, pool: RankPool
) -> None:
    edges = [[0, 0, 1, 2, 3, 3, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3]]  # one self-loop, of the first rank
    edges = [row + [end] * edges_of_last for row, end in zip(edges, (3, 4), strict=True)]
    torch.manual_seed(1)
    weights = torch.rand(len(edges[0]), 2).double()
    data = Data(torch.randn(6, 5).double(), torch.tensor(edges), weights, edge_weight=weights[:, 1].contiguous())
    write_store(data, np.array([0, 0, 1, 1, 2, 2]), tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert max(pool.run(_passes, 3, str(tmp_path / "parts"), name, backend, data)) < 1e-10


class Clamped(nn.Module):
    """Rows and weights that only some ranks hold are others in each pass; on the rest they are the same tensors."""

    def __init__(self, *, learned: bool, norm: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5) if learned else nn.Identity()
        self.convs = nn.ModuleList([GCNConv(5, 5) if norm else GraphConv(5, 5) for _ in range(2)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        if bool((x < -1.0).any()):
            x = x.clamp(min=-1.0)
        if bool((edge_weight < 0.15).any()):
            edge_weight = edge_weight.clamp(min=0.15)
        x = self.lin(x)
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight)
        return x


def _clamped(rank: int, world_size: int, store: str, backend: str, options: dict[str, bool], data: Data) -> float:
    bound, shard, worst = resolve_backend(backend), Shard.load(store, rank), 0.0
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    plain = Clamped(**options).double()
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    for training in (True, True, True, False, False, True):
        with torch.set_grad_enabled(training):
            out = model(shard.x, shard.adjacency, shard.edge_weight)
        if training:
            out.sum().backward()
        expected = plain(data.x, data.edge_index, data.edge_weight)
        worst = max(worst, float((out - expected[shard.owned_id]).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("backend", "changes", "learned", "norm"),
    by_turns(2, ["comm", "cache", "hybrid", "tensor"], ["rows", "weights"], [True, False], [True, False]),
)
def test_what_a_model_changes_on_one_rank_alone(
    backend: str, changes: str, learned: bool, norm: bool, tmp_path: Path, pool: RankPool
) -> None:
    data, parts = random_graph("directed")
    first = torch.from_numpy(parts[2]) == 0
    if changes == "rows":
        data.edge_weight += 0.2
        data.x[first] = data.x[first].abs()
    else:
        data.x.abs_()
        data.edge_weight[first[data.edge_index[1]]] += 0.2
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    options = {"learned": learned, "norm": norm}
    assert max(pool.run(_clamped, 2, str(tmp_path / "parts"), backend, options, data)) < 1e-10


class Relations(nn.Module):
    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5) if learned else nn.Identity()  # rows that stay the same are aggregated once
        self.convs = nn.ModuleList([RGCNConv(5, 5, 3), RGCNConv(5, 5, 3)])

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.lin(x)
        for conv in self.convs:
            x = conv(x, edge_index, edge_type)
        return x


def _changing_types(rank: int, world_size: int, store: str, backend: str, kind: str, learned: bool) -> float:
    data, _ = random_graph(kind)
    bound, shard, worst = resolve_backend(backend), Shard.load(store, rank), 0.0
    bound.bind(shard, Communicator(dist.new_group(), check_order=True))
    torch.manual_seed(0)
    plain = Relations(learned=learned).double()
    model = distribute(copy.deepcopy(plain), backend=bound, check=False)
    # edges of the last rank keep their type, so that what it picks of the first relation stays the same
    end = 0 if backend == "delayed" else 1
    stays = torch.arange(data.num_nodes)[data.edge_index[end]] >= data.num_nodes // 2
    flipped = torch.where(stays, data.edge_type, (data.edge_type + 1) % 3)
    both = [(types, types[shard.e_id]) for types in (data.edge_type, flipped)]
    for turn in (0, 0, 0, 1, 1, 0, 1, 0, 2, 1):
        types, mine = both[turn % 2]
        out = model(shard.x, shard.adjacency, mine.clone() if turn == 2 else mine)
        out.sum().backward()
        with torch.no_grad():
            expected = plain(data.x, data.edge_index, types)
        worst = max(worst, float((out - expected[shard.owned_id]).abs().max()) if out.numel() else 0.0)
    return worst


@pytest.mark.parametrize(
    ("kind", "backend", "learned"),
    by_turns(2, ["directed", "empty-part"], ["comm", "cache", "tensor", "delayed"], [True, False]),
)
def test_types_of_edges_that_change_on_some_ranks(
    kind: str, backend: str, learned: bool, tmp_path: Path, pool: RankPool
) -> None:
    data, parts = random_graph(kind)
    by_id = parts[3] if kind == "empty-part" else np.arange(data.num_nodes) * 3 // data.num_nodes
    _write_parts(data, by_id, tmp_path / "parts", backend)
    assert max(pool.run(_changing_types, 3, str(tmp_path / "parts"), backend, kind, learned)) < 1e-10


def _write_parts(data: Data, by_id: np.ndarray, folder: Path, backend: str) -> None:
    """Write three parts for a backend; if nodes are split, a part has the out-edges of its nodes."""
    options: dict[str, Any] = {}
    if backend == "delayed":
        options = {"placement": "edges", "edge_part": by_id[data.edge_index[0].numpy()]}
    write_store(data, by_id, folder, num_parts=3, method="x", arguments={}, notes=[], **options)
