"""Layers and models that users write with all that PyG's message passing offers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCN, BatchNorm, GATConv, GCNConv, GroupAddRev, MessagePassing, SAGEConv, TAGConv
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, degree, softmax

from pygdist.backends import Backend, TensorBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step


class Own(MessagePassing):
    """A linear map, then a sum of whatever."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x))
        return out


class Unannotated(Own):
    """Asks for what PyG makes of the edges, without saying of which type it is."""

    def message(self, x_j, x_i, index, ptr, size_i):  # type: ignore[no-untyped-def]
        return softmax((x_j + x_i).tanh(), index, ptr, size_i) * x_j


class Updating(Own):
    """Asks for its own rows after the sum."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + 2 * x


class Named(Own):
    """Names arguments as others name theirs."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        options: dict[str, Any] = {"name": "rows", "own": 3.0, "inner": True, "kwargs": None}
        out: Tensor = self.propagate(edge_index, x=self.lin(x), **options)
        return out

    def message(self, x_j: Tensor, name: str, own: float, inner: bool, kwargs: None) -> Tensor:
        assert name == "rows"
        return own * x_j if inner and kwargs is None else x_j


class Stacked(Own):
    """Has features of a node in two dimensions, and a gradient that is the same along the last."""

    def __init__(self) -> None:
        super().__init__(node_dim=0)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        out: Tensor = self.propagate(edge_index, x=torch.stack([h, h.tanh()], dim=2)).sum(dim=2)
        return out


class Remaining(Own):
    """Adds self-loops where there are none, with weights."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = (edge_index[0] == edge_index[1]).to(x) + 0.5
        edge_index, weight = add_remaining_self_loops(edge_index, weight, 3.0, x.size(0))
        out: Tensor = self.propagate(edge_index, x=self.lin(x), weight=weight)
        return out

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class Chain(nn.Module):
    """One layer after the other; some of them may make no hop, or run once more in the backward pass."""

    def __init__(self, *layers: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, edge_index)
            else:
                x = checkpoint(layer, x, edge_index, use_reentrant=self.reentrant)
        return x


class Normed(Chain):
    """Begins with a norm over nodes, and ends with one."""

    def __init__(self, *layers: nn.Module, first: int, last: int) -> None:
        super().__init__(*layers)
        self.first, self.last = BatchNorm(first), BatchNorm(last)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(super().forward(self.first(x), edge_index))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unannotated": Unannotated,
    "update": Updating,
    "names": Named,
    "stacked": Stacked,
    "remaining loops": Remaining,
    "no product": lambda: GCN(5, 6, num_layers=2, out_channels=3, aggr="median"),
    "no hop": lambda: Chain(GCNConv(5, 6), TAGConv(6, 6, K=0), GCNConv(6, 3)),
    "checkpoints": lambda: Chain(SAGEConv(5, 5), Chain(TAGConv(5, 6), GCNConv(6, 3), reentrant=False)),
    "reentrant checkpoints": lambda: Chain(SAGEConv(5, 5), Chain(TAGConv(5, 6), GCNConv(6, 3), reentrant=True)),
    "checkpoints with norms": lambda: Chain(
        SAGEConv(5, 6), Chain(Normed(GCNConv(6, 4), first=6, last=4), GATConv(4, 3), reentrant=False)
    ),
    "reversible": lambda: Chain(SAGEConv(5, 6), GroupAddRev(GATConv(3, 3), num_groups=2), GCNConv(6, 3)),
}


BACKENDS: dict[str, Callable[[], Backend]] = {
    name: partial(resolve_backend, name) for name in ("comm", "tensor", "cache", "hybrid")
}
BACKENDS["tensor in little memory"] = lambda: TensorBackend(memory_gib=192 / 2**20)


def _model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def _step(rank: int, world_size: int, store: str, backend: str, name: str) -> tuple[Any, Tensor]:
    shard, bound = Shard.load(store, rank), BACKENDS[backend]()
    communicator = Communicator(dist.new_group())
    bound.bind(shard, communicator)
    model = distribute(_model(MODELS[name]), backend=bound)
    return distributed_step(model, shard, communicator), shard.owned_id


def _store(folder: Path, world_size: int) -> str:
    data, parts = random_graph("isolated")
    write_store(data, parts[world_size], folder, num_parts=world_size, method="", arguments={}, notes=[])
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", list(MODELS))
def test_layers_of_ones_own_equal_one_process(name: str, backend: str, tmp_path: Path, pool: RankPool) -> None:
    expected = reference_step(_model(MODELS[name]), random_graph("isolated")[0])
    for found, rows in pool.run(_step, 3, _store(tmp_path / "parts", 3), backend, name):
        assert max(one.absolute for one in largest_differences(found, expected, rows).values()) < 1e-10


def _updated_in_chunks(rank: int, world_size: int, store: str, memory_gib: float) -> tuple[Any, Tensor, int]:
    shard, bound = Shard.load(store, rank), TensorBackend(memory_gib=memory_gib)
    communicator = Communicator(dist.new_group())
    bound.bind(shard, communicator)
    model = distribute(_model(Updating), backend=bound)
    step = distributed_step(model, shard, communicator)
    return step, shard.owned_id, communicator.meter.read().sent_messages


def test_update_gets_its_own_rows_in_several_chunks(tmp_path: Path, pool: RankPool) -> None:
    store = _store(tmp_path / "parts", 3)
    expected = reference_step(_model(Updating), random_graph("isolated")[0])
    messages = []
    for memory_gib in (1.0, 24 / 2**20):
        ranks = pool.run(_updated_in_chunks, 3, store, memory_gib)
        for found, rows, _ in ranks:
            assert max(one.absolute for one in largest_differences(found, expected, rows).values()) < 1e-10
        messages.append(min(sent for *_, sent in ranks))
    assert messages[1] > 2 * messages[0]


# -- what a rank cannot know -------------------------------------------------------------------------------------------


class Unsaid(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, add_self_loops(edge_index)[0])


class UnsaidRemaining(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, add_remaining_self_loops(edge_index)[0])


class LookedUp(Own):
    """Looks its neighbours' degrees up by itself."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        scale = degree(col, x.size(0), dtype=x.dtype).clamp(min=1).rsqrt()
        out: Tensor = self.propagate(edge_index, x=self.lin(x), norm=scale[row] * scale[col])
        return out

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


REFUSED: dict[Callable[[], nn.Module], str] = {
    Unsaid: "add_self_loops without num_nodes",
    UnsaidRemaining: "add_remaining_self_loops without num_nodes",
    LookedUp: r"LookedUp ran on a small graph on one process, and failed on a part of it: IndexError: index \d+ is "
    r"out of bounds.*test_own_layers.py:\d+\)\. .*Pass values of an edge's source to propagate",
}


def _refused(rank: int, world_size: int, store: str, backend: str) -> list[str]:
    shard, bound, said = Shard.load(store, rank), resolve_backend(backend), []
    bound.bind(shard, Communicator(dist.new_group()))
    for make in REFUSED:
        model = distribute(_model(make), backend=bound)
        with pytest.raises(InputError) as caught:
            model(shard.x, shard.adjacency)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("backend", ["comm", "tensor"])
def test_what_asks_for_rows_of_others_is_told_how(backend: str, tmp_path: Path, pool: RankPool) -> None:
    for said in pool.run(_refused, 2, _store(tmp_path / "parts", 2), backend):
        for one, pattern in zip(said, REFUSED.values(), strict=True):
            assert re.match(pattern, one), one


def test_errors_of_ones_own_stay_as_they_are(tmp_path: Path) -> None:
    shard, backend = Shard.load(_store(tmp_path / "parts", 1), 0), resolve_backend("single")
    backend.bind(shard, Communicator())
    model = distribute(_model(Own), backend=backend)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(shard.x[:, :2], shard.adjacency)
