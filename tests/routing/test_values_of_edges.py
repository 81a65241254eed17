"""Values that a model holds for each edge are in the order of the user's edges: exact on one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv
from typing_extensions import override

from pygdist.backends import resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.routing import distribute
from pygdist.testing import RankPool, random_graph

_EDGES = random_graph("directed")[0].num_edges
WEIGHTS = torch.rand(_EDGES, dtype=torch.float64)
GRAPH = Data(edge_weight=WEIGHTS, x=torch.ones(3, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64))


class Net(nn.Module):
    """A layer, and what a subclass does with values of edges."""

    def __init__(self, num_edges: int) -> None:
        super().__init__()
        self.num_edges, self.conv = num_edges, GCNConv(5, 3)
        self.hold(torch.rand(num_edges, generator=torch.Generator().manual_seed(3), dtype=torch.float64))

    def hold(self, values: Tensor) -> None:
        """Keep values."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, self.weight(edge_index))
        return out

    def weight(self, edge_index: Tensor) -> Tensor | None:
        """Return weights of edges."""
        raise NotImplementedError


class Parameter(Net):
    def hold(self, values: Tensor) -> None:
        self.values = nn.Parameter(values)

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.values.exp()


class Buffer(Net):
    def hold(self, values: Tensor) -> None:
        self.register_buffer("values", values)

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.values  # type: ignore[return-value]


class Attribute(Net):
    def hold(self, values: Tensor) -> None:
        self.values = {"of edges": [values]}

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.values["of edges"][0]


class Mask(Net):
    def hold(self, values: Tensor) -> None:
        self.mask = values > 0.5

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index[:, self.mask])
        return out


class Table(Net):
    def hold(self, values: Tensor) -> None:
        self.table = nn.Embedding.from_pretrained(values.view(-1, 1))

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.table.weight.view(-1)


class Listed(Net):
    def hold(self, values: Tensor) -> None:
        self.lists = nn.ParameterList([values])

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.lists[0].abs()


class Heads(Net):
    def hold(self, values: Tensor) -> None:
        self.heads = torch.stack([values, values])

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.heads.sum(0)


class Global(Net):
    def weight(self, edge_index: Tensor) -> Tensor:
        return (lambda: WEIGHTS)()


class OfGraph(Net):
    def weight(self, edge_index: Tensor) -> Tensor:
        return (lambda: GRAPH.edge_weight)()


class SizeOfGraph(Net):
    """Reads no value of an edge."""

    def weight(self, edge_index: Tensor) -> None:
        assert GRAPH.num_nodes == 3


class Function(Net):
    def hold(self, values: Tensor) -> None:
        self.function = lambda: values

    def weight(self, edge_index: Tensor) -> Tensor:
        return self.function()


HELD: dict[str, type[Net]] = {
    "values": Parameter, "inner.values": Buffer, "of edges": Attribute, "mask": Mask, "table.weight": Table,
    "lists.0": Listed, "heads": Heads, "WEIGHTS": Global, "GRAPH.edge_weight": OfGraph,
    "function": Function,
}  # fmt: skip


class Outer(nn.Module):
    """Holds a model within."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.inner(x, edge_index)
        return out


def _model(kind: type[Net], num_edges: int) -> nn.Module:
    torch.manual_seed(0)
    model = kind(num_edges).double()
    return Outer(model) if kind is Buffer else model


def _refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    shard, communicator, said = Shard.load(folder, rank), Communicator(dist.new_group()), {}
    for name, kind in HELD.items():
        backend = resolve_backend("comm")
        backend.bind(shard, communicator)
        model = distribute(_model(kind, shard.num_edges), backend=backend)
        with pytest.raises(InputError) as caught:
            model(shard.x, shard.adjacency)
        said[name] = str(caught.value)
    backend = resolve_backend("comm")
    backend.bind(shard, communicator)
    distribute(_model(SizeOfGraph, shard.num_edges), backend=backend)(shard.x, shard.adjacency)
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_of_edges_are_refused(world_size: int, pool: RankPool, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    data = Data(x=data.x, edge_index=data.edge_index.flip(1))
    write_store(data, part[world_size], tmp_path / "parts", num_parts=world_size, method="test", arguments={})
    for said in pool.run(_refused, world_size, str(tmp_path / "parts")):
        for name, text in said.items():
            tensor = "values" if name in ("of edges", "function") else name
            assert f"'{tensor}'" in text
            assert f"has a value for each of the graph's {data.num_edges} edges" in text
            assert ("data.sort(sort_by_row=False)" in text) == (world_size == 1)
            assert "\n" not in text


@pytest.mark.parametrize("name", HELD)
def test_edges_that_are_sorted_keep_their_order(name: str, tmp_path: Path) -> None:
    data, part = random_graph("directed")
    data = data.sort(sort_by_row=False)
    write_store(data, part[1], tmp_path / "parts", num_parts=1, method="test", arguments={})
    shard, backend = Shard.load(tmp_path / "parts", 0), resolve_backend("single")
    backend.bind(shard, Communicator())
    expected = _model(HELD[name], data.num_edges)(data.x, data.edge_index)
    model = distribute(_model(HELD[name], data.num_edges), backend=backend)
    torch.testing.assert_close(model(shard.x, shard.adjacency), expected, rtol=0, atol=1e-12)


class Sized(nn.Module):
    """Has weights as wide as the graph has edges, of layers of torch and PyG."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.gcn, self.numbers = nn.Linear(5, width), GCN(width, 4, 2, 3), [width, None]
        self.edges = torch.zeros(2, width, dtype=torch.long)

    @property
    def WEIGHTS(self) -> None:
        """Named as a global that its class does not read."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        assert self.WEIGHTS is None
        out: Tensor = self.gcn(self.lin(x), edge_index)
        return out


@pytest.mark.parametrize("make", [Sized, lambda width: Outer(Sized(width))])
def test_layers_as_wide_as_there_are_edges_run(make: Callable[[int], nn.Module], tmp_path: Path) -> None:
    data, part = random_graph("directed")
    data = Data(x=data.x, edge_index=data.edge_index.flip(1))
    write_store(data, part[1], tmp_path / "parts", num_parts=1, method="test", arguments={})
    shard, backend = Shard.load(tmp_path / "parts", 0), resolve_backend("single")
    backend.bind(shard, Communicator())
    model = distribute(make(data.num_edges).double(), backend=backend)
    assert model(shard.x, shard.adjacency).shape == (len(data.x), 3)
