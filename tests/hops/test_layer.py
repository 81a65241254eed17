"""What is fused, kept or reordered only where nobody changed what it stands for."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GraphConv, MessagePassing, SAGEConv, aggr
from torch_geometric.utils import degree

from pygdist import InputError, Shard, distribute, undistribute
from pygdist.backends import Savings, SingleBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.hops.layer import _HOOKED
from pygdist.hops.rebinding import calls_by_name, rebound
from pygdist.testing import random_graph


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Data, Shard]:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={}, notes=[])
    return data, Shard.load(tmp_path / "store", 0)


def bound(shard: Shard) -> SingleBackend:
    backend = SingleBackend()
    backend.bind(shard, Communicator())
    return backend


class Rectified(GCNConv):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j.relu()


class Doubled(SAGEConv):
    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: int | None = None) -> Tensor:
        return 2 * super().aggregate(inputs, index, ptr, dim_size)


class WeightInUpdate(MessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Tensor:
        out: Tensor = edge_index.matmul(x)
        return out

    def update(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.lin(inputs)
        return out


class OtherwiseFused(SAGEConv):
    """PyG calls the fused form for sparse matrices alone."""

    def message_and_aggregate(self, adj_t: Any, x: Any) -> Tensor:
        out: Tensor = 2 * adj_t.set_value(None).matmul(x[0])
        return out


def own_message() -> MessagePassing:
    layer = GATConv(5, 3)
    layer.message = types.MethodType(lambda self, x_j, alpha: 2 * alpha.unsqueeze(-1) * x_j, layer)
    return layer


def another_aggregation() -> MessagePassing:
    layer = SAGEConv(5, 3)
    layer.aggr_module = aggr.MaxAggregation()
    return layer


def biased() -> MessagePassing:
    layer = GCNConv(5, 8)
    layer.lin = nn.Linear(5, 8)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rectified(5, 3),
        lambda: Doubled(5, 3),
        WeightInUpdate,
        lambda: OtherwiseFused(5, 3),
        own_message,
        another_aggregation,
        biased,
    ],
    ids=[
        "message",
        "aggregate",
        "update",
        "fused",
        "message-of-one-layer",
        "aggregation-of-one-layer",
        "biased-weight",
    ],
)
def test_a_changed_layer_trains_as_it_is(make: Callable[[], MessagePassing], graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    torch.manual_seed(0)
    plain = make().double()
    layer = make().double()
    layer.load_state_dict(plain.state_dict())
    distribute(layer, backend=bound(shard), check=False)
    # a small rate: steps that overshoot let the outputs grow, and rounding with them
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.001) for module in (layer, plain))
    for _ in range(3):
        out, expected = layer(shard.x, shard.adjacency), plain(data.x, data.edge_index)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        for value, optimizer in ((out, ours), (expected, theirs)):
            optimizer.zero_grad()
            value.square().sum().backward()
            optimizer.step()


def test_weights_that_the_adjacency_carries_are_part_of_what_is_kept(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    weight = torch.rand(shard.adjacency.size(1), dtype=torch.float64)
    weighted = shard.adjacency.with_value(weight)
    layer = distribute(GraphConv(5, 8).double(), backend=bound(shard), check=False)
    before = layer(shard.x, weighted)
    weight.mul_(2)
    assert not torch.allclose(layer(shard.x, weighted), before)


def test_weights_that_are_given_other_memory_are_noticed(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    weight, x = torch.rand(data.num_edges, dtype=torch.float64), data.x.clone().requires_grad_()
    layer = GCNConv(5, 3).double()
    routed = distribute(copy.deepcopy(layer), backend=bound(shard), check=False)
    for seed in range(3):
        weight.data = torch.rand(data.num_edges, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        local = weight[shard.e_id]
        mine, own = shard.x.clone().requires_grad_(), layer(x, data.edge_index, weight)
        out = routed(mine, shard.adjacency, local)
        torch.testing.assert_close(out, own, rtol=0, atol=1e-10)
        (found,), (expected,) = (torch.autograd.grad(y.square().sum(), rows) for y, rows in ((out, mine), (own, x)))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_frozen_table_that_moves_through_its_data_is_not_kept(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    table = nn.Parameter(shard.x.clone(), requires_grad=False)
    layer = distribute(GraphConv(5, 8).double(), backend=bound(shard), check=False)
    before = layer(table, shard.adjacency)
    table.data.mul_(2)
    assert not torch.allclose(layer(table, shard.adjacency), before)


def test_what_is_kept_is_not_handed_out(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    layer = distribute(GraphConv(5, 8, bias=False).double(), backend=bound(shard), check=False)
    found = [layer.propagate(shard.adjacency, x=(shard.x, shard.x), edge_weight=None) for _ in range(3)]
    assert len({id(tensor) for tensor in found}) == 3
    assert len({tensor.data_ptr() for tensor in found}) == 1


def test_threads_share_a_model(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    layer = distribute(GCNConv(5, 8).double(), backend=bound(shard), check=False)
    expected, names = layer(shard.x, shard.adjacency), list(layer.state_dict())
    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: layer(shard.x, shard.adjacency), range(60)))
    assert all(torch.equal(out, expected) for out in found)
    assert list(layer.state_dict()) == names


@pytest.mark.parametrize(
    "make",
    [
        lambda: GATv2Conv(5, 3),
        lambda: GATConv(5, 3),
        lambda: GATConv(5, 3, bias=False),
        lambda: GATConv(5, 3, edge_dim=2),
        lambda: SAGEConv(5, 3),
    ],
)
def test_autocast_gives_the_dtype_of_pyg(make: Callable[[], MessagePassing], graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = make()
    layer = distribute(copy.deepcopy(plain), backend=bound(shard), check=False)
    takes_edges = isinstance(plain, GATConv) and plain.edge_dim is not None
    attributes = torch.rand(data.num_edges, 2)
    inputs = {"edge_attr": attributes} if takes_edges else {}
    local = {"edge_attr": attributes[shard.e_id]} if takes_edges else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(data.x.float().requires_grad_(), data.edge_index, **inputs)
        out = layer(shard.x.float().requires_grad_(), shard.adjacency, **local)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.05, atol=0.05)
    out.float().sum().backward()


def test_one_backend_has_one_set_of_savings(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    backend = bound(shard)
    model = distribute(GCNConv(5, 3), backend=backend, check=False)
    with pytest.raises(InputError, match="give each model a backend of its own"):
        distribute(GCNConv(5, 3), backend=backend, savings=Savings(first_hop=False), check=False)
    undistribute(model)
    distribute(GCNConv(5, 3), backend=backend, savings=Savings(first_hop=False), check=False)


def test_leaving_a_backend_frees_what_it_kept(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    backend = bound(shard)
    model = distribute(GCNConv(5, 3).double(), backend=backend, check=False)
    model(shard.x, shard.adjacency)
    assert backend.kept_bytes > 0
    undistribute(model)
    assert backend.kept_bytes == 0


def test_kinds_of_normalisation_are_kept_within_bounds(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    backend = bound(shard)
    layers = [
        distribute(layer, backend=backend, check=False) for layer in (GCNConv(5, 3).double(), GATConv(5, 3).double())
    ]
    for _ in range(80):
        fresh = shard.adjacency.with_value(None)
        for layer in layers:
            layer(shard.x, fresh)
    assert 0 < len(backend.kept.gcn_norm._results.results) <= 64
    assert 0 < len(backend.kept.self_loops._edges.results) <= 16


#: Versions of PyG whose private names are those that ``pygdist/hops/layer.py`` uses.
PYG_VERSIONS = ("2.8.",)


def test_the_private_names_of_pyg_are_those_of_known_versions() -> None:
    version = torch_geometric.__version__
    assert version.startswith(PYG_VERSIONS), f"read hops/layer.py beside PyG {version}, then name it here"
    layer = GATConv(5, 3)
    names = {"_user_args", "_edge_user_args", "_fused_user_args", "_decomposed_layers", "inspector", "special_args"}
    names |= {f"_{name}_{kind}" for name in _HOOKED for kind in ("forward_pre_hooks", "forward_hooks")}
    assert {name for name in names if not hasattr(layer, name)} == set()
    assert {"_orig_propagate", "_jinja_propagate"} <= vars(GATConv).keys()
    assert hasattr(torch_geometric.backend, "use_segment_matmul")


@pytest.mark.parametrize("calls", [True, False])
def test_functions_that_were_made_from_text_have_no_module(calls: bool) -> None:
    text = (
        f"def help(index): return {'degree' if calls else 'len'}(index)\ndef forward(self, index): return help(index)"
    )
    namespace: dict[str, Any] = {"degree": degree, "__name__": None}
    exec(text, namespace)
    cls = type("Made", (nn.Module,), {"forward": namespace["forward"]})
    assert calls_by_name(cls, {degree: len}) is calls


_TEXT = """
import torch_geometric.utils as utils
from torch_geometric.utils import degree
SCALE, CALLS = 1.0, 0

def help(index):
    return utils.degree(index) * SCALE

def forward(self, index):
    global CALLS
    CALLS += 1
    return degree(index), help(index), SCALE, utils.EXTRA
"""


def test_replaced_functions_see_globals_as_they_are_and_what_they_write_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_geometric.utils, "EXTRA", 1, raising=False)
    namespace: dict[str, Any] = {"__name__": "made"}
    exec(_TEXT, namespace)
    cls = type("Made", (nn.Module,), {"forward": namespace["forward"]})
    other = rebound(cls, {degree: lambda index: 10})[0]()
    assert other.forward(None) == (10, 10.0, 1.0, 1)
    namespace["SCALE"] = 3.0
    monkeypatch.setattr(torch_geometric.utils, "EXTRA", 2)
    assert other.forward(None) == (10, 30.0, 3.0, 2)
    assert namespace["CALLS"] == 2
    namespace["CALLS"], namespace["degree"] = 7, len
    assert other.forward("four")[0] == 4
    assert namespace["CALLS"] == 8
