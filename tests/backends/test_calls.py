"""Models are called as people call theirs: with a ``Data``, dictionaries, tuples or keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GATConv, GCNConv

from pygdist.backends import Backend, ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.native import load
from pygdist.routing import distribute, undistribute
from pygdist.testing import RankPool, random_graph

BACKENDS = ["comm", "cache", "hybrid", "tensor", "replica"]
needs_planner = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
backends_ = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_planner if name == "hybrid" else ()) for name in BACKENDS]
)


class Pair(NamedTuple):
    """Features and edges."""

    x: Tensor
    edges: Tensor


class Net(nn.Module):
    """Two layers that take their graph in some form."""

    def __init__(self, take: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.first, self.last, self.take = GCNConv(5, 4), GCNConv(4, 3), take

    def forward(self, graph: Any) -> Tensor:
        x, edges = self.take(graph)
        out: Tensor = self.last(self.first(x, edges).relu(), edges)
        if isinstance(graph, Data):  # as many of PyG's examples do
            graph.x = out
        return out


CALLS: dict[str, tuple[Callable[[Any], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Any]]] = {
    "data": (lambda graph: (graph.x, graph.edge_index), lambda x, edges: Data(x=x, edge_index=edges, name="mine")),
    "dictionary": (lambda graph: (graph["x"], graph["edges"]), lambda x, edges: {"x": x, "edges": edges}),
    "nested": (lambda graph: (graph[0]["x"], graph[1][0]), lambda x, edges: ({"x": x}, [edges, None])),
    "named": (lambda graph: (graph.x, graph.edges), Pair),
}


def _outputs(rank: int, world_size: int, folder: str, backend_name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Each model's output in its second pass, compared with one process before its first, and the ids of its rows."""
    communicator, outputs = Communicator(dist.new_group()), {}
    shard = Shard.load(f"{folder}/{'replicas' if backend_name == 'replica' else 'nodes'}", rank)
    for name, (take, graph) in CALLS.items():
        backend = ReplicaBackend(hops=2) if backend_name == "replica" else resolve_backend(backend_name)
        backend.bind(shard, communicator)
        torch.manual_seed(0)
        model = distribute(Net(take).double(), backend=backend)
        for _ in range(2):
            out = model(graph=graph(shard.x, shard.adjacency))
        outputs[name] = shard.owned_id, out.detach()
    return outputs


@backends_
def test_a_model_may_take_its_graph_in_any_form(backend: str, parts: str, pool: RankPool) -> None:
    data, _ = random_graph("directed")
    for outputs in pool.run(_outputs, 2, parts, backend):
        for name, (take, graph) in CALLS.items():
            torch.manual_seed(0)
            expected = Net(take).double()(graph(data.x, data.edge_index))
            rows, out = outputs[name]
            assert torch.allclose(out, expected[rows], rtol=0, atol=1e-12), name


class ReadsGlobals(nn.Module):
    """Reads a graph that is not among its arguments, or its edges."""

    def __init__(self, x: Tensor, edges: Any) -> None:
        super().__init__()
        self.net, self.graph = GCN(5, 4, num_layers=2, out_channels=3), [x, edges]

    def forward(self, x: Tensor | None = None) -> Tensor:
        out: Tensor = self.net(self.graph[0] if x is None else x, self.graph[1])
        return out


def _bound(backend_name: str, folder: str, rank: int) -> tuple[Shard, Backend]:
    shard = Shard.load(f"{folder}/{'replicas' if backend_name == 'replica' else 'nodes'}", rank)
    backend = ReplicaBackend(hops=2) if backend_name == "replica" else resolve_backend(backend_name)
    backend.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    return shard, backend


def _reads_globals(
    rank: int, world_size: int, folder: str, backend_name: str, gets_x: bool
) -> tuple[Tensor, Tensor] | str:
    shard, backend = _bound(backend_name, folder, rank)
    model = distribute(ReadsGlobals(shard.x, shard.adjacency).double(), backend=backend)
    try:
        return shard.owned_id, model(*[shard.x][: int(gets_x)]).detach()
    except InputError as error:
        return str(error)


@backends_
@pytest.mark.parametrize("gets_x", [True, False], ids=["features", "nothing"])
def test_a_model_that_gets_no_edges_is_refused_where_they_must_be_others(
    gets_x: bool, backend: str, parts: str, pool: RankPool
) -> None:
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    expected = ReadsGlobals(data.x, data.edge_index).double()()
    for found in pool.run(_reads_globals, 2, parts, backend, gets_x):
        if backend in ("cache", "replica"):
            assert "shard.adjacency is not among those of ReadsGlobals; pass it as it is" in found
        else:
            rows, out = found
            assert torch.allclose(out, expected[rows], rtol=0, atol=1e-12)


class ByOthers(nn.Module):
    """Is called by methods of other names too, and keeps normalised edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GCNConv(5, 4, cached=True), GCNConv(4, 3, cached=True)

    def encode(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x, edges).relu(), edges)
        return out

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.encode(x, edges).tanh()


def _by_others(rank: int, world_size: int, folder: str, backend_name: str) -> tuple[Tensor, list[Tensor]] | str:
    """Return the ids of the rows, and outputs and gradients of calls of both kinds in turn."""
    shard, backend = _bound(backend_name, folder, rank)
    model, found = distribute(ByOthers().double(), backend=backend, check=False), []
    try:
        for call in (model, model.encode, model, model.encode, model):
            out = call(shard.x, shard.adjacency)
            model.zero_grad()
            out.square().sum().backward()
            grad = model.first.lin.weight.grad
            found += [out.detach(), backend.communicator.sum_over_ranks(grad, label="gradients")]
    except InputError as error:
        return str(error)
    return shard.owned_id, found


@backends_
def test_other_methods_than_forward_run_where_rows_are_fetched(backend: str, parts: str, pool: RankPool) -> None:
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    model = ByOthers().double()
    for found in pool.run(_by_others, 2, parts, backend):
        if backend in ("cache", "replica"):
            assert "GCNConv runs outside a forward pass of the model, as in model.encode(...)" in found
            continue
        rows, results = found
        for at, call in enumerate((model, model.encode, model, model.encode, model)):
            out = call(data.x, data.edge_index)
            model.zero_grad()
            out.square().sum().backward()
            assert torch.allclose(results[2 * at], out[rows], rtol=0, atol=1e-12)
            assert torch.allclose(results[2 * at + 1], model.first.lin.weight.grad, rtol=0, atol=1e-10)


class OfIds(nn.Module):
    """Does not run on two nodes, as in a rehearsal; of two ranks, one alone does not."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.net, self.rank = GCN(5, 4, num_layers=2, out_channels=3), rank

    def forward(self, x: Tensor, ids: Tensor, edges: Tensor) -> Tensor:
        if len(ids) < 3 and self.rank == 1:
            raise LookupError("no ids")
        out: Tensor = self.net(x, edges)
        return out


def _of_ids(rank: int, world_size: int, folder: str, backend_name: str) -> tuple[Tensor, Tensor] | str:
    shard, backend = _bound(backend_name, folder, rank)
    model = distribute(OfIds(rank).double(), backend=backend, check=False)
    try:
        return shard.owned_id, model(shard.x, shard.owned_id + 1, shard.adjacency).detach()
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("backend", ["cache", pytest.param("hybrid", marks=needs_planner)])
def test_a_model_that_fails_on_few_nodes_is_refused_or_its_rows_are_fetched(
    backend: str, parts: str, pool: RankPool
) -> None:
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    expected, failed = OfIds().double()(data.x, torch.ones(3), data.edge_index), 0
    for found in pool.run(_of_ids, 2, parts, backend):
        if backend == "cache":
            assert "backend 'cache' " in found
            failed += "where OfIds ends with LookupError: no ids (" in found
        else:
            rows, out = found
            assert torch.allclose(out, expected[rows], rtol=0, atol=1e-12)
    assert failed == (backend == "cache")


#: Models whose gradients are penalised; the gradient of a sum of attention depends on the features that went in.
PENALISED: dict[str, Callable[[], nn.Module]] = {"linear": lambda: GCNConv(5, 3), "attention": lambda: GATConv(5, 3)}


def _penalised(rank: int, world_size: int, folder: str, backend_name: str) -> dict[str, str]:
    shard, backend = _bound(backend_name, folder, rank)
    said = {}
    for name, make in PENALISED.items():
        backend.bind(shard, backend.communicator)
        x = shard.x.clone().requires_grad_()
        try:
            out = distribute(make().double(), backend=backend, check=False)(x, shard.adjacency)
            (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.sum() + first.square().sum()).backward()
            said[name] = "no error"
        except InputError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("backend", ["comm", "cache", "tensor", pytest.param("hybrid", marks=needs_planner)])
def test_second_derivatives_are_refused_on_all_ranks(backend: str, parts: str, pool: RankPool) -> None:
    """One process has them; gradients that were exchanged between ranks would count as constants."""
    for said in pool.run(_penalised, 2, parts, backend):
        for name in PENALISED:
            assert "pygdist computes first derivatives alone" in said[name], name


class Embedded(nn.Module):
    """Learns a row for each node, and looks the rows up by ids, or takes all of them."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(num_nodes, 5), GCN(5, 4, num_layers=2, out_channels=3)

    def forward(self, ids: Tensor | None, edges: Tensor) -> Tensor:
        out: Tensor = self.net(self.table.weight if ids is None else self.table(ids), edges)
        return out


def _embeds(rank: int, world_size: int, folder: str, backend_name: str) -> tuple[str, Tensor, Tensor, Tensor]:
    """Return the error for the table, then the rows' ids, the output for ids, and the sum of the table's gradients."""
    shard, backend = Shard.load(f"{folder}/nodes", rank), resolve_backend(backend_name)
    backend.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = Embedded(shard.num_nodes).double()
    distribute(model, backend=backend, check=False)
    with pytest.raises(InputError) as refused:
        model(None, shard.adjacency)
    undistribute(model)
    distribute(model, backend=backend)
    out = model(shard.owned_id, shard.adjacency)
    out.square().sum().backward()
    gradient = model.table.weight.grad
    dist.all_reduce(gradient)
    return str(refused.value), shard.owned_id, out.detach(), gradient


@pytest.mark.parametrize("backend", ["comm", "tensor", "cache", pytest.param("hybrid", marks=needs_planner)])
def test_rows_of_an_embedding_are_looked_up_by_ids(backend: str, parts: str, pool: RankPool) -> None:
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    plain = Embedded(data.num_nodes).double()
    expected = plain(torch.arange(data.num_nodes), data.edge_index)
    expected.square().sum().backward()
    for refused, rows, out, gradient in pool.run(_embeds, 2, parts, backend):
        assert "give the model the ids of its nodes, and look their rows up" in refused
        assert torch.allclose(out, expected[rows], rtol=0, atol=1e-10)
        assert torch.allclose(gradient, plain.table.weight.grad, rtol=0, atol=1e-10)


def _passes(rank: int, world_size: int, folder: str) -> list[int]:
    shard, backend = _bound("hybrid", folder, rank)
    model, counts = distribute(OfIds().double(), backend=backend, check=False), []
    for step in range(3):
        model(shard.x + step, shard.owned_id + 1, shard.adjacency).sum().backward()
        counts.append(len(backend.fetcher._pieces))
    return counts


@needs_planner
def test_a_model_that_cannot_be_tried_keeps_its_edges_in_groups_once(parts: str, pool: RankPool) -> None:
    for first, *later in pool.run(_passes, 2, parts):
        assert later == [first] * 2
