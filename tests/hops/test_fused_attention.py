"""Attention layers by kernels: PyG's numbers, weights and options, without a tensor of edges x heads x channels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    MessagePassing,
    SAGEConv,
    SGConv,
    TransformerConv,
)

from pygdist import Shard, distribute
from pygdist.backends import Savings, SingleBackend
from pygdist.comm import Communicator
from pygdist.graph import Adjacency
from pygdist.hops.hop import Hop
from pygdist.testing import RankPool, assert_exact
from tests.backends.training import Shapes, epoch, gradients, one_rank, same, single

LAYERS = [GATConv, GATv2Conv, TransformerConv]
UNFUSED = Savings(fused_attention=False, block_mib=0)


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Data, Shard]:
    return one_rank(tmp_path, "isolated")  # has self-loops and duplicates


def _layer(cls: Any, *sizes: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer: nn.Module = cls(*(sizes or (5, 4)), **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5)
    return layer


def _results(layer: nn.Module, x: Any, edges: Tensor, *edge_attr: Tensor, **options: Any) -> list[Tensor]:
    leaf = tuple(part.clone().requires_grad_() for part in (x if isinstance(x, tuple) else (x,)))
    attr = tuple(part.clone().requires_grad_() for part in edge_attr)
    out = layer(leaf if isinstance(x, tuple) else leaf[0], edges, *attr, **options)
    return [out, *gradients(layer, out, *leaf, *attr)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads": {"heads": 3},
    "mean": {"heads": 3, "concat": False},
    "one-mean": {"concat": False},
    "no-bias": {"heads": 3, "bias": False},
}
LOOPED: dict[str, dict[str, Any]] = {
    "no-loops": {"heads": 3, "add_self_loops": False},
    "slope": {"heads": 2, "negative_slope": 0.7},
    "residual": {"heads": 3, "residual": True},
    "residual-mean": {"heads": 3, "residual": True, "concat": False},
}
CASES = [
    *[(cls, name, options) for cls in LAYERS for name, options in OPTIONS.items()],
    *[(cls, name, options) for cls in (GATConv, GATv2Conv) for name, options in LOOPED.items()],
    (GATv2Conv, "shared", {"heads": 2, "share_weights": True}),
    (TransformerConv, "beta", {"heads": 3, "beta": True}),
    (TransformerConv, "no-root", {"heads": 3, "root_weight": False}),
]


def _names(cases: list[Any]) -> list[str]:
    return [f"{cls.__name__}-{name}" for cls, name, _ in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name", "options"), CASES, ids=_names(CASES))
def test_values_and_gradients_are_those_of_pyg(
    cls: Any, name: str, options: dict[str, Any], graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(cls, **options)
    model = single(copy.deepcopy(plain), shard)
    for _ in range(2):
        same(_results(model, shard.x, shard.adjacency), _results(plain, data.x, data.edge_index))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same([model(shard.x, shard.adjacency)], [plain(data.x, data.edge_index)])
    same(epoch(model, shard.x, shard.adjacency), epoch(plain, data.x, data.edge_index))


EDGES = [
    *[(cls, "edges", {"heads": 3, "edge_dim": 4}) for cls in LAYERS],
    *[(cls, "one", {"edge_dim": 1}) for cls in (GATConv, GATv2Conv)],
    *[
        (cls, f"fill-{fill}", {"heads": 2, "edge_dim": 4, "fill_value": fill})
        for cls in (GATConv, GATv2Conv)
        for fill in (0.5, "add")
    ],
    *[(cls, "no-loops", {"edge_dim": 4, "add_self_loops": False}) for cls in (GATConv, GATv2Conv)],
]


@pytest.mark.parametrize(("cls", "name", "options"), EDGES, ids=_names(EDGES))
def test_edge_attributes_enter_as_in_pyg(
    cls: Any, name: str, options: dict[str, Any], graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(cls, **options)
    model = single(copy.deepcopy(plain), shard)
    attr, ours = (data.edge_attr, shard.edge_attr) if name != "one" else (data.edge_weight, shard.edge_weight)
    same(_results(model, shard.x, shard.adjacency, ours), _results(plain, data.x, data.edge_index, attr))
    if cls is TransformerConv:
        with pytest.raises(AssertionError):
            model(shard.x, shard.adjacency)
        return
    # the others may be called without
    same(_results(model, shard.x, shard.adjacency), _results(plain, data.x, data.edge_index))


@pytest.mark.parametrize("edges", [False, True], ids=["rows", "edges"])
@pytest.mark.parametrize("cls", LAYERS)
def test_the_weights_that_are_returned_are_those_of_the_same_edges(
    cls: Any, edges: bool, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(cls, heads=3, edge_dim=4 if edges else None)
    model = single(copy.deepcopy(plain), shard)
    attr, ours = ((data.edge_attr,), (shard.edge_attr,)) if edges else ((), ())
    out, (pairs, alpha) = plain(data.x, data.edge_index, *attr, return_attention_weights=True)
    mine, (my_pairs, my_alpha) = model(shard.x, shard.adjacency, *ours, return_attention_weights=True)
    same([mine, _by_pair(my_pairs, my_alpha)], [out, _by_pair(pairs, alpha)])
    if isinstance(plain, TransformerConv):
        assert model._alpha is None


def _by_pair(pairs: Tensor, alpha: Tensor) -> Tensor:
    """(src, dst, weights) of each edge, sorted."""
    pairs = pairs.as_tensor() if isinstance(pairs, Adjacency) else pairs
    rows = torch.cat([pairs.t().double(), alpha.detach()], dim=1)
    return torch.tensor(sorted(rows.tolist()), dtype=torch.float64)


@pytest.mark.parametrize("cls", LAYERS)
def test_two_kinds_of_rows_attend_as_in_pyg(cls: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = _layer(cls, (5, 6), 4, heads=2)
    model = single(copy.deepcopy(plain), shard)
    pair = (data.x, torch.randn(37, 6, dtype=torch.float64))
    same(_results(model, pair, shard.adjacency), _results(plain, pair, data.edge_index))


def test_rows_without_a_destination_side_attend_as_in_pyg(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = _layer(GATConv, (5, 6), 4, heads=2, add_self_loops=False)
    model = single(copy.deepcopy(plain), shard)
    same([model((shard.x, None), shard.adjacency)], [plain((data.x, None), data.edge_index)])


@pytest.mark.parametrize("cls", LAYERS)
def test_dropout_acts_on_the_weights_in_training_only(cls: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = _layer(cls, heads=2, dropout=0.5)
    model = single(copy.deepcopy(plain), shard)
    torch.manual_seed(0)
    first, second = (model(shard.x, shard.adjacency) for _ in range(2))
    assert not torch.allclose(first, second)
    epoch(model, shard.x, shard.adjacency)
    model.load_state_dict(plain.state_dict())
    plain.eval(), model.eval()
    expected = plain(data.x, data.edge_index)
    same([model(shard.x, shard.adjacency)], [expected])
    assert not torch.allclose(first, expected)


@pytest.mark.slow
@pytest.mark.parametrize("cls", LAYERS)
def test_dropout_keeps_the_mean(cls: Any, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model = single(_layer(cls, heads=2, dropout=0.5), shard)
    torch.manual_seed(0)
    with torch.no_grad():
        mean = torch.stack([model(shard.x, shard.adjacency) for _ in range(1000)]).mean(dim=0)
        model.eval()
        expected = model(shard.x, shard.adjacency)
    assert (mean - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("plainly", ["propagate", "edge_updater", "both"])
def test_a_backend_may_pass_plain_edges_on(plainly: str, graph: tuple[Data, Shard]) -> None:
    data, shard = graph

    class Plain(SingleBackend):
        """Gives one hop or both of them no adjacency."""

        def propagate(self, hop: Hop) -> Tensor:
            return hop.run(hop.plain_edges) if plainly in (hop.name, "both") else hop.run()

    expected = _layer(GATConv, heads=2)
    backend = Plain()
    backend.bind(shard, Communicator())
    model = distribute(copy.deepcopy(expected), backend=backend, check=False)
    same(_results(model, shard.x, shard.adjacency), _results(expected, data.x, data.edge_index))


@pytest.mark.parametrize("options", [{"bias": False}, {}, {"bias": False, "concat": False}])
def test_what_follows_may_work_in_place(options: dict[str, Any], graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain_layer = _layer(GATConv, heads=2, **options)
    layer = single(copy.deepcopy(plain_layer), shard)
    found = []
    for one, x, edges in ((plain_layer, data.x, data.edge_index), (layer, shard.x, shard.adjacency)):
        leaf = x.clone().requires_grad_()
        out = torch.relu_(one(leaf, edges))
        found.append([out, *gradients(one, out, leaf)])
    same(found[1], found[0])


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [False, True], ids=["rows", "edges"])
@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("fused", [True, False])
def test_no_tensor_of_edges_by_heads_by_channels_is_made(
    cls: Any, fused: bool, edges: bool, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    heads, channels = 3, 7
    options = {} if cls is TransformerConv else {"add_self_loops": False}
    model = single(
        _layer(cls, 5, channels, heads=heads, edge_dim=4 if edges else None, **options),
        shard,
        None if fused else UNFUSED,
    )
    inputs = (shard.edge_attr,) if edges else ()
    x = shard.x.clone().requires_grad_()
    with Shapes() as shapes:
        model(x, shard.adjacency, *inputs).square().sum().backward()
    large = [
        shape
        for shape in shapes.found
        if shape.numel() >= data.num_edges * heads * channels and data.num_edges in shape
    ]
    # channels of edge attributes are added to the rows of GATv2 and Transformer layers
    assert bool(large) == (not fused or (edges and cls is not GATConv))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gat_holds_nothing_as_long_as_the_edges(dropout: float, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    model = single(_layer(GATConv, heads=2, add_self_loops=False, dropout=dropout), shard)
    x = shard.x.clone().requires_grad_()
    model(x, shard.adjacency).sum().backward()  # what is kept of the edges is made in the first pass
    with Shapes() as shapes:
        model(x, shard.adjacency).square().sum().backward()
    # dropout acts on the weight of each edge, which is there then
    assert any(data.num_edges in shape for shape in shapes.found) == (dropout > 0)


# --- what is not PyG's own runs as written ----------------------------------------------------------------------------


class OwnMessage(GATConv):
    """A message of its own."""

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha.unsqueeze(-1) * x_j.square()


class OwnScore(GATv2Conv):
    """Scores of its own."""

    def edge_update(self, x_j: Tensor, x_i: Tensor, index: Tensor, ptr: Any, dim_size: Any) -> Tensor:
        return (x_i * x_j * self.att).sum(dim=-1).tanh()


class OwnUpdate(TransformerConv):
    """An update of its own."""

    def update(self, inputs: Tensor) -> Tensor:
        return inputs.tanh()


class Halved:
    """Hops of its own."""

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return super().propagate(edge_index, size=size, **kwargs) / 2  # type: ignore[misc, no-any-return]

    def edge_updater(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return super().edge_updater(edge_index, size=size, **kwargs) / 2  # type: ignore[misc, no-any-return]


@pytest.mark.parametrize("base", [*LAYERS, GCNConv, SAGEConv, GINConv, SGConv])
def test_hops_of_its_own_run(base: Any, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    cls = type(f"Halved{base.__name__}", (Halved, base), {"__module__": __name__})
    plain = _layer(cls, nn.Linear(5, 4)) if base is GINConv else _layer(cls)
    model = single(copy.deepcopy(plain), shard)
    same(_results(model, shard.x, shard.adjacency), _results(plain, data.x, data.edge_index))


class Subclass(GATConv):
    """One that changes nothing of the hop."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * 2


@pytest.mark.parametrize(
    ("cls", "options", "own"),
    [
        (OwnMessage, {}, True),
        (OwnScore, {}, True),
        (OwnUpdate, {}, True),
        (Subclass, {}, False),
        (GATConv, {"aggr": "max"}, True),
        (GATv2Conv, {"aggr": "mean"}, True),
        (TransformerConv, {"aggr": "max"}, True),
    ],
)
def test_what_is_not_pygs_own_hop_takes_pygs_path(
    cls: Any, options: dict[str, Any], own: bool, graph: tuple[Data, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, shard = graph
    plain = _layer(cls, heads=2, **options)
    model = single(copy.deepcopy(plain), shard)
    same(_results(model, shard.x, shard.adjacency), _results(plain, data.x, data.edge_index))
    called = _messages_of(model, monkeypatch)
    model(shard.x, shard.adjacency)
    assert bool(called) == own


def _messages_of(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes each call of PyG's lift of rows to edges."""
    called: list[int] = []
    lift = MessagePassing._lift

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        called.append(1)
        out: Tensor = lift(*args, **kwargs)
        return out

    monkeypatch.setattr(MessagePassing, "_lift", spy)
    return called


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("part", ["message", "aggregate", "propagate", "edge_update"])
def test_hooks_see_what_pyg_shows_them(cls: Any, part: str, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    if cls is TransformerConv and part == "edge_update":
        pytest.skip("the layer has no edge_update")
    options = {} if cls is TransformerConv else {"add_self_loops": False}
    plain = _layer(cls, heads=2, **options)
    model = single(copy.deepcopy(plain), shard)
    seen: list[list[Tensor]] = [[], []]
    for layer, found in zip((plain, model), seen, strict=True):

        def hook(module: nn.Module, inputs: Any, out: Tensor, found: list[Tensor] = found) -> None:
            found.append(out)

        getattr(layer, f"register_{part}_forward_hook")(hook)
    same(_results(model, shard.x, shard.adjacency), _results(plain, data.x, data.edge_index))
    assert len(seen[0]) == 1
    same(seen[1], seen[0])


def test_hooks_on_the_edge_layer_run(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = _layer(GATConv, heads=2, edge_dim=4)
    model = single(copy.deepcopy(plain), shard)
    seen: list[int] = []
    for layer in (plain, model):
        layer.lin_edge.register_forward_hook(lambda module, inputs, out: (seen.append(out.size(0)), out * 2)[1])
    same([model(shard.x, shard.adjacency, shard.edge_attr)], [plain(data.x, data.edge_index, data.edge_attr)])
    assert seen[-2:] == [seen[-1]] * 2


# --- ranks ------------------------------------------------------------------------------------------------------------

ATTENTION = ["GATConv", "GATConv-edges", "GATv2Conv", "GATv2Conv-edges", "TransformerConv"]


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_exact_on_two_ranks(fused: bool, pool: RankPool) -> None:
    kinds = ["directed", "isolated", "empty-part"]
    savings = Savings(fused_attention=fused)
    assert_exact("comm", layers=ATTENTION, world_sizes=[2], graphs=kinds, savings=savings, pool=pool)
