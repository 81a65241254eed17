"""Hops in blocks: the numbers of PyG's own path, in memory that a budget bounds, in both passes."""

from __future__ import annotations

import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import (
    MLP,
    CGConv,
    EdgeConv,
    FAConv,
    GATConv,
    GATv2Conv,
    MessagePassing,
    NNConv,
    RGATConv,
    TransformerConv,
)
from typing_extensions import override

from pygdist import Shard, distribute, undistribute
from pygdist.backends import CommBackend, Savings, SingleBackend
from pygdist.comm import Communicator
from pygdist.graph import write_store
from pygdist.hops import blocks
from pygdist.hops.hop import Hop
from pygdist.nn.inputs import arguments_of, edge_inputs
from pygdist.testing import LAYERS, RankPool, assert_exact, random_graph
from pygdist.testing.layers import build

TINY = Savings(block_mib=2e-3, fused_attention=False)
MIB = 2**20

# Layers of the suite whose hops PyG fuses on one process, and one whose aggregation pads
WHOLE = {
    "APPNP", "ARMAConv", "AntiSymmetricConv", "ClusterGCNConv", "GCN2Conv", "GCNConv", "GCNConv-cached",
    "GCNConv-derived", "GCNConv-improved", "GCNConv-no-loops", "GINConv", "GatedGraphConv", "GraphConv",
    "GraphConv-max", "LGConv", "MFConv", "MixHopConv", "PDNConv", "RGCNConv", "SAGEConv-detached", "SAGEConv-jk",
    "SAGEConv-lstm", "SAGEConv-max", "SAGEConv-mean", "SAGEConv-min", "SGConv", "SGConv-cached", "SSGConv",
    "SimpleConv", "TAGConv", "BatchNorm", "BatchNorm1d", "DiffGroupNorm", "GraphNorm", "GraphSizeNorm", "InstanceNorm",
    "LayerNorm-graph", "MeanSubtractionNorm", "PairNorm", "PairNorm-rows", "HeteroBatchNorm", "HeteroLayerNorm",
    "InstanceNorm1d", "InstanceNorm1d-channels", "LabelPropagation", "SAGEConv-patches", "SAGEConv-uneven",
    "SignedConv", "WLConvContinuous",
}  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The bounds of the blocks of each hop that runs in blocks."""
    bounds: list[list[int]] = []
    cut = blocks.destination_blocks

    def spy(*args: Any) -> list[int]:
        bounds.append(cut(*args))
        return bounds[-1]

    monkeypatch.setattr(blocks, "destination_blocks", spy)
    return bounds


@pytest.fixture
def graph(tmp_path: Any) -> tuple[Data, Shard]:
    data, part = random_graph("isolated")
    write_store(data, part[1], tmp_path / "store", num_parts=1, method="test", arguments={})
    return data, Shard.load(tmp_path / "store", 0)


def _blocked(model: nn.Module, shard: Shard | None = None, savings: Savings = TINY) -> nn.Module:
    backend = SingleBackend()
    if shard is not None:
        backend.bind(shard, Communicator())
    return distribute(model, backend=backend, savings=savings, check=False)


def _gradients(model: nn.Module, loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in gradients]


def _same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def _called(model: nn.Module, graph: Any, x: Tensor, edges: Tensor) -> Tensor:
    """Return the output of a model for other rows than the graph's."""
    args, inputs = arguments_of(model, SimpleNamespace(**{**edge_inputs(model, graph), "x": x}), edges)
    out: Tensor = model(*args, **inputs)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_the_same_in_blocks(name: str, graph: tuple[Data, Shard], counted: list[list[int]]) -> None:
    data, shard = graph
    reference = build(name, 5, 3)
    x = data.x.clone().requires_grad_()
    expected = _called(reference, data, x, data.edge_index)
    weight = torch.randn_like(expected)
    gradients = _gradients(reference, (expected * weight).sum(), x)
    model = _blocked(build(name, 5, 3), shard)
    out = _called(model, shard, x, shard.adjacency)
    assert (name in WHOLE) == (not counted)
    assert all(len(bounds) > 3 for bounds in counted)
    _same([out, *_gradients(model, (out * weight).sum(), x)], [expected, *gradients])
    reference.eval()
    model.eval()
    with torch.no_grad():
        _same(
            [_called(model, shard, x, shard.adjacency)],
            [_called(reference, data, x, data.edge_index)],
        )


@pytest.mark.parametrize(
    "layer",
    [
        FAConv(5),
        GATConv(5, 3, heads=2),
        GATv2Conv(5, 3, heads=2),
        TransformerConv(5, 3, heads=2),
        RGATConv(5, 3, num_relations=2, heads=2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_attention_weights_are_those_of_the_edges_as_given(
    layer: Any, graph: tuple[Data, Shard], counted: list[list[int]]
) -> None:
    data, _ = graph
    order = torch.randperm(data.num_edges)
    edge_index, layer = data.edge_index[:, order], layer.double()
    inputs: dict[str, Any] = {"x": data.x, "edge_index": edge_index, "return_attention_weights": True}
    if isinstance(layer, FAConv):
        inputs["x_0"] = data.x
    if isinstance(layer, RGATConv):
        inputs["edge_type"] = data.edge_type[order]
    out, (edges, alpha) = layer(**inputs)
    gradients = _gradients(layer, out.square().sum() + alpha.square().sum())
    _blocked(layer)
    ours, (our_edges, our_alpha) = layer(**inputs)
    assert counted
    order = own = torch.arange(edges.size(1))
    if isinstance(layer, FAConv):  # a layer that normalises its edges has them sorted since, blocks or not
        order, own = (torch.argsort(some[1] * data.num_nodes + some[0]) for some in (edges, our_edges.as_tensor()))
    assert torch.equal(our_edges[:, own], edges[:, order])
    _same([ours, our_alpha[own]], [out, alpha[order]])
    _same(_gradients(layer, ours.square().sum() + our_alpha.square().sum()), gradients)
    assert getattr(layer, "_alpha", None) is None, "the second computation must leave nothing on the layer"


class Counting(CommBackend):
    """Notices if layers are given all of their messages at once."""

    name = ""
    messages: int | None = None

    @override
    def propagate(self, hop: Hop) -> Tensor:
        layer: Any = hop.layer
        message = type(layer).message

        def spy(own: Any, **kwargs: Any) -> Tensor:
            self.messages = (self.messages or 0) + 1
            return message(own, **kwargs)

        type(layer).message = spy
        try:
            return super().propagate(hop)
        finally:
            type(layer).message = message

    @override
    def unbind(self) -> None:
        # whole: two or four layers, in training and in evaluation, each tried out twice before
        assert self.messages is None or self.messages > 24, f"{self.messages} messages are no blocks"
        self.messages = None
        super().unbind()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_equal_one_process_in_blocks_through_ddp(world_size: int, pool: RankPool) -> None:
    layers = ["CGConv", "EdgeConv", "GATv2Conv-edges", "TransformerConv", "PNAConv", "ARMAConv", "FiLMConv"]
    assert_exact(
        Counting(), layers=layers, world_sizes=[world_size], graphs=["directed", "power-law"], savings=TINY, pool=pool
    )


def test_ranks_without_edges_and_layers_that_pad_beside_blocks(pool: RankPool) -> None:
    layers = ["EdgeConv", "GATConv", "SAGEConv-lstm", "RGCNConv", "BatchNorm"]
    assert_exact("comm", layers=layers, world_sizes=[2, 3], graphs=["empty-part"], savings=TINY, pool=pool)


class Dropping(MessagePassing):
    """Dropout inside the message, whose pattern the two computations must share."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=x)
        return out

    def message(self, x_j: Tensor) -> Tensor:
        return functional.dropout(self.lin(x_j), 0.5, training=self.training)


def test_dropout_has_one_pattern_in_both_computations(graph: tuple[Data, Shard], counted: list[list[int]]) -> None:
    data, _ = graph
    layer = _blocked(Dropping().double())
    x = data.x.clone().requires_grad_()

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        out: Tensor = layer(x, data.edge_index).tanh().sum()
        return out

    value = loss(x)
    torch.manual_seed(4)  # another state than at the forward pass
    layer.eval()  # as a training loop may do before it calls backward
    (gradient,) = torch.autograd.grad(value, x)
    layer.train()
    assert counted
    direction = torch.randn_like(x)
    with torch.no_grad():
        slope = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


class Peak(TorchDispatchMode):
    """The most memory that tensors made inside have held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.refs: dict[int, Any] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():
                self.add(value.untyped_storage())
        return out

    def add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.refs:

            def gone(_: Any) -> None:
                self.live -= size
                del self.refs[key]

            self.refs[key] = weakref.ref(storage, gone)
            self.live += size
            self.peak = max(self.peak, self.live)


def _peaks(layer: nn.Module, x: Tensor, edge_index: Tensor, **inputs: Tensor) -> tuple[float, float]:
    layer(x, edge_index, **inputs)  # trials are over
    with Peak() as memory:
        out = layer(x, edge_index, **inputs).square().sum()
        forward, memory.peak = memory.peak, memory.live
        out.backward()
    return forward / MIB, memory.peak / MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: CGConv(16, 4),
        lambda: EdgeConv(MLP([32, 64, 16], norm=None)),
        lambda: NNConv(16, 16, nn.Linear(4, 256)),
        lambda: TransformerConv(16, 16, heads=2, edge_dim=4),
    ],
    ids=["CGConv", "EdgeConv", "NNConv", "TransformerConv"],
)
@pytest.mark.parametrize("ordered", [True, False], ids=["sorted", "unsorted"])
def test_the_budget_bounds_memory_in_both_passes(make: Any, ordered: bool) -> None:
    num_nodes, num_edges = 300, 20_000
    torch.manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, num_edges))
    if ordered:
        edge_index = edge_index[:, edge_index[1].argsort()]
    x, layer = torch.randn(num_nodes, 16, requires_grad=True), make()
    inputs = {} if isinstance(layer, EdgeConv) else {"edge_attr": torch.randn(num_edges, 4)}
    whole = _peaks(_blocked(layer, savings=Savings(block_mib=0, fused_attention=False)), x, edge_index, **inputs)
    undistribute(layer)
    budget = 1.0
    ours = _peaks(_blocked(layer, savings=Savings(block_mib=budget, fused_attention=False)), x, edge_index, **inputs)
    # beside the budget: ids and arguments of edges, in two orders, one attention weight per head, and rows of nodes
    beside = (num_edges * (2 * 8 + 2 * 8 + 2 * 4 * 4) + 10 * x.nbytes) / MIB
    assert min(whole) > 7 * budget
    assert max(ours) < budget + beside


@pytest.mark.parametrize(("mib", "in_blocks"), [(2e-3, True), (0, False), (None, False), (100, False)])
def test_blocks_are_made_only_where_the_budget_asks(
    mib: float | None, in_blocks: bool, graph: tuple[Data, Shard], counted: list[list[int]]
) -> None:
    layer = _blocked(build("EdgeConv", 5, 3), savings=Savings(block_mib=mib))
    layer(graph[0].x, graph[0].edge_index)
    assert bool(counted) == in_blocks


def test_destinations_are_cut_where_edges_allow() -> None:
    #       0  1  2  3  4  5  6
    in_degrees = torch.tensor([0, 2, 1, 9, 0, 1, 0])
    targets = torch.arange(7).repeat_interleave(in_degrees)
    assert blocks.destination_blocks(targets, 7, 3) == [0, 3, 5, 7]
    assert blocks.destination_blocks(targets, 7, 1) == [0, 2, 3, 5, 7]
    assert blocks.destination_blocks(targets, 7, 10) == [0, 3, 7]
    assert blocks.destination_blocks(targets, 7, 13) == [0, 7]


@pytest.mark.parametrize("kind", ["unsorted", "no-edge", "one-edge", "one-destination", "hub"])
def test_odd_graphs_are_the_same_in_blocks(kind: str) -> None:
    torch.manual_seed(0)
    edge_index = torch.randint(20, (2, 200))
    if kind == "no-edge":
        edge_index = edge_index[:, :0]
    if kind == "one-edge":
        edge_index = edge_index[:, :1]
    if kind == "one-destination":
        edge_index[1] = 4
    if kind == "hub":
        edge_index[1, :150] = 7
    x = torch.randn(20, 5, dtype=torch.float64, requires_grad=True)
    for layer in (CGConv(5, aggr="max"), GATConv(5, 3), GATv2Conv(5, 3, heads=2)):
        layer = layer.double()
        out = layer(x, edge_index)
        gradients = _gradients(layer, out.square().sum(), x)
        _blocked(layer)
        ours = layer(x, edge_index)
        _same([ours, *_gradients(layer, ours.square().sum(), x)], [out, *gradients])


class Odd(MessagePassing):
    """Whatever a user's message may do with rows that a block does not hold."""

    def __init__(self, kind: str) -> None:
        super().__init__(aggr="sum")
        self.kind = kind
        self.lin = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.edges: Tensor | None = None
        self.mean: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.edges = torch.arange(edge_index.size(1))[:, None].to(x)
        degree = torch.arange(x.size(0))[:, None].to(x)
        out: Tensor = self.propagate(edge_index, x=x, degree=degree, table=x.new_ones(1, 5))
        mean, self.mean = self.mean, None
        return out if mean is None else out + mean

    def message(self, x_j: Tensor, degree: Tensor, table: Tensor, edge_index_j: Tensor) -> Tensor:
        return x_j * degree[edge_index_j] + table


class FromLayer(Odd):
    def message(self, x_j: Tensor) -> Tensor:
        assert self.edges is not None
        return x_j * self.edges


class OnLayer(Odd):
    def message(self, x_j: Tensor) -> Tensor:
        self.mean = x_j.mean()
        return x_j


class Normed(Odd):
    def message(self, x_j: Tensor) -> Tensor:
        return self.inside(x_j)

    def inside(self, x_j: Tensor) -> Tensor:
        out: Tensor = self.norm(x_j)
        return out


class Drawing(Odd):
    """A backward pass that runs blocks again would draw other numbers."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * (1 + 0 * random.random())


class Updating(Odd):
    """One that can be cut: its update asks for rows of nodes."""

    def message(self, x_j: Tensor, table: Tensor) -> Tensor:
        return self.lin(x_j + table)

    def update(self, inputs: Tensor, degree: Tensor) -> Tensor:
        return inputs * degree


class Gated(Odd):
    """Looks up a parameter by the destinations of edges, which blocks number anew."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.gate = nn.Parameter(torch.linspace(-1.0, 1.0, 64))

    def message(self, x_j: Tensor, index: Tensor) -> Tensor:
        return x_j * self.gate[index][:, None]


class OverAllEdges(Odd):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.softmax(0)


class InADictionary(Odd):
    """Reads what a later call replaces before the backward pass."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.state = {"gate": torch.full((1,), float(len(x)), dtype=x.dtype)}
        return super().forward(x, edge_index)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.state["gate"]


@pytest.mark.parametrize(
    "cls", [Odd, FromLayer, OnLayer, Normed, Drawing, Gated, OverAllEdges, InADictionary, Updating]
)
def test_what_a_block_cannot_hold_runs_whole(
    cls: type[Odd], graph: tuple[Data, Shard], counted: list[list[int]]
) -> None:
    data, shard = graph
    layer = cls("").double()
    for module in (layer, layer.eval()):
        expected = module(data.x, data.edge_index)
        _blocked(layer, shard)
        _same([module(shard.x, shard.adjacency)], [expected])
        undistribute(layer)
    assert bool(counted) == (cls is Updating)


def test_hooks_see_the_whole_hop(graph: tuple[Data, Shard], counted: list[list[int]]) -> None:
    data, _ = graph
    layer: Any = _blocked(EdgeConv(MLP([10, 3], norm=None)).double())
    seen = []
    layer.register_message_forward_hook(lambda layer, inputs, out: seen.append(out.size(0)))
    layer(data.x, data.edge_index)
    assert seen == [data.num_edges]
    assert not counted


def test_decomposed_layers_keep_their_numbers(graph: tuple[Data, Shard], counted: list[list[int]]) -> None:
    data, _ = graph
    layer = Dropping().double().eval()
    layer.lin = nn.Identity()
    x = data.x.clone().requires_grad_()
    expected = layer(x, data.edge_index)
    layer.decomposed_layers = 5
    _blocked(layer)
    out = layer(x, data.edge_index)
    assert counted
    _same(
        [out, *torch.autograd.grad(out.square().sum(), x)], [expected, *torch.autograd.grad(expected.square().sum(), x)]
    )


def test_a_hop_that_cannot_be_cut_says_what_it_takes(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    layer = build("EdgeConv", 5, 3)
    module = next(module for module in layer.modules() if isinstance(module, MessagePassing))
    module.register_message_forward_hook(lambda *_: None)
    model = _blocked(layer, shard)
    with pytest.warns(UserWarning, match="EdgeConv computes all messages at once, 0 MiB or more"):
        model(shard.x, shard.adjacency)
