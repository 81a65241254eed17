"""Integer features of nodes and edges are integers on every backend, as in plain PyG: ids, categories, flags."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GATConv, GINEConv, MessagePassing, SAGEConv, SimpleConv

from pygdist.backends import ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, prepare, write_store
from pygdist.native import load
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph
from tests.backends.training import epoch, same

BACKENDS = ["comm", "cache", "hybrid", "tensor", "replica"]
LARGE = 2**53 + 1  # no float64


class Embedded(nn.Module):
    """Embeds categories of nodes and edges, as OGB's encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.others, self.edges = nn.Embedding(5, 4), nn.Embedding(2, 4), nn.Embedding(5, 4)
        self.first, self.last = GINEConv(nn.Linear(4, 4)), SAGEConv(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, edge_attr = (x - LARGE).long(), (edge_attr - LARGE).long()
        h = self.nodes(x[:, 0]) + self.others(x[:, 1])
        h = self.first(h, edge_index, self.edges(edge_attr).sum(1))
        out: Tensor = self.last(h.relu(), edge_index)
        return out


class InMessage(MessagePassing):
    """Sends the integers themselves, and embeds them where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lin = nn.Embedding(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return self.lin(out)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.embedding((x_j - LARGE).long()).sum(1) + (edge_attr - LARGE).sum(1, keepdim=True)


class Flags(MessagePassing):
    """Sends flags."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.lin = nn.Linear(2, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x > LARGE + 2, edge_attr=edge_attr > LARGE + 1)
        return self.lin(out)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return (x_j ^ edge_attr[:, :1]).double()


class Summed(nn.Module):
    """Sums integers over neighbours, then computes with floats."""

    def __init__(self, aggr: str, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.dtype = dtype
        self.sum, self.gcn, self.gat = SimpleConv(aggr=aggr), GCN(2, 4, 2, 3), GATConv(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.gat(
            self.gcn(self.sum((x - LARGE).to(self.dtype), edge_index).double(), edge_index), edge_index
        )
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedded": Embedded,
    "in message": InMessage,
    "flags": Flags,
    "sum": lambda: Summed("sum"),
    "uint8": lambda: Summed("mean", torch.uint8),
    "int16": lambda: Summed("min", torch.int16),
}


NO_COLUMNS = ("in message", "flags")  # the backend tries layers on floats


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def _graph() -> tuple[Data, Any]:
    data, part = random_graph("directed")
    torch.manual_seed(1)
    x, edge_attr = (torch.randint(LARGE, LARGE + 5, (n, 2)) for n in (data.x.size(0), data.num_edges))
    x[:, 1].clamp_(max=LARGE + 1)
    return prepare(Data(x=x, edge_index=data.edge_index, edge_attr=edge_attr, y=data.y))[0], part


def _train(rank: int, world_size: int, folder: str, backend_name: str) -> dict[str, tuple[Tensor, list[list[Tensor]]]]:
    communicator, found = Communicator(dist.new_group()), {}
    shard = Shard.load(f"{folder}/{'replicas' if backend_name == 'replica' else 'nodes'}", rank)
    assert shard.edge_attr is not None
    for name in MODELS:
        backend = ReplicaBackend(hops=4) if backend_name == "replica" else resolve_backend(backend_name)
        backend.bind(shard, communicator)
        if backend_name == "tensor" and name in NO_COLUMNS:
            with pytest.raises(InputError, match=r"tried on a few nodes|mixes columns"):
                distribute(_model(name), backend=backend)
            continue
        model = distribute(_model(name), backend=backend)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without having been compared")
            steps = [epoch(model, shard.x, shard.adjacency, shard.edge_attr, summed=True) for _ in range(2)]
        found[name] = shard.owned_id, steps
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Parts for two ranks, of both placements."""
    folder = tmp_path_factory.mktemp("integers")
    data, part = _graph()
    for name, hops in (("nodes", 1), ("replicas", 4)):
        write_store(data, part[2], folder / name, num_parts=2, method="test", arguments={}, num_hops=hops)
    return str(folder)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.skipif(name == "hybrid" and load() is None, reason="no native library"))
        for name in BACKENDS
    ],
)
def test_integers_train_as_on_one_process(backend: str, parts: str, pool: RankPool) -> None:
    data, _ = _graph()
    ranks = pool.run(_train, 2, parts, backend)
    for name in ranks[0]:
        model = _model(name)
        for step in range(2):
            out, *gradients = epoch(model, data.x, data.edge_index, data.edge_attr)
            for found in ranks:
                rows, steps = found[name]
                same(steps[step], [out[rows], *gradients])
