"""Layers that aggregate on the cheaper side of their weight: PyG's numbers, fewer columns, and nothing else changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCN, MLP, ARMAConv, GCNConv, GINConv, GraphConv, SAGEConv, SGConv, TAGConv
from torch_geometric.nn.dense import Linear

from pygdist import Shard
from pygdist.backends import Savings
from pygdist.graph import Adjacency
from pygdist.testing import RankPool, assert_exact
from tests.backends.training import NOTHING, Columns, epoch, gradients, one_rank, same, single

WIDTHS = {"narrow-to-wide": (5, 9), "wide-to-narrow": (5, 2), "same": (5, 5)}

# name -> layer of given widths; the layers that take edge weights
CASES: dict[str, Any] = {
    "GCN": lambda i, o: GCNConv(i, o),
    "GCN-no-bias": lambda i, o: GCNConv(i, o, bias=False),
    "GCN-cached": lambda i, o: GCNConv(i, o, cached=True),
    "GCN-improved": lambda i, o: GCNConv(i, o, improved=True),
    "GCN-no-loops": lambda i, o: GCNConv(i, o, add_self_loops=False),
    "GCN-not-normalised": lambda i, o: GCNConv(i, o, normalize=False),
    "GCN-mean": lambda i, o: GCNConv(i, o, aggr="mean"),
    "GCN-max": lambda i, o: GCNConv(i, o, aggr="max"),
    "SG": lambda i, o: SGConv(i, o, K=3),
    "SG-no-bias": lambda i, o: SGConv(i, o, bias=False),
    "SG-cached": lambda i, o: SGConv(i, o, K=2, cached=True),
    "SG-no-loops": lambda i, o: SGConv(i, o, add_self_loops=False),
    "SG-max": lambda i, o: SGConv(i, o, aggr="max"),
    "TAG": lambda i, o: TAGConv(i, o),
    "TAG-one": lambda i, o: TAGConv(i, o, K=1, bias=False),
    "TAG-none": lambda i, o: TAGConv(i, o, K=0),
    "TAG-not-normalised": lambda i, o: TAGConv(i, o, K=2, normalize=False),
    "TAG-max": lambda i, o: TAGConv(i, o, K=2, aggr="max"),
    "ARMA": lambda i, o: ARMAConv(i, o),
    "ARMA-stacks": lambda i, o: ARMAConv(i, o, num_stacks=3, num_layers=3),
    "ARMA-shared": lambda i, o: ARMAConv(i, o, num_stacks=2, num_layers=3, shared_weights=True),
    "ARMA-linear": lambda i, o: ARMAConv(i, o, num_stacks=2, num_layers=2, act=None, bias=False),
    "ARMA-max": lambda i, o: ARMAConv(i, o, aggr="max"),
    "Graph": lambda i, o: GraphConv(i, o),
    "Graph-mean": lambda i, o: GraphConv(i, o, aggr="mean"),
    "Graph-no-bias": lambda i, o: GraphConv(i, o, bias=False),
    "Graph-max": lambda i, o: GraphConv(i, o, aggr="max"),
    "GIN": lambda i, o: GINConv(nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o)), train_eps=True),
    "GIN-MLP": lambda i, o: GINConv(MLP([i, o, o], norm="layer_norm", act_first=True), eps=0.3),
    "GIN-one-layer": lambda i, o: GINConv(MLP([i, o], bias=False)),
    "GIN-other": lambda i, o: GINConv(nn.Sequential(nn.ReLU(), nn.Linear(i, o))),
    "SAGE": lambda i, o: SAGEConv(i, o),
    "SAGE-sum": lambda i, o: SAGEConv(i, o, aggr="sum", bias=False),
    "SAGE-normalize": lambda i, o: SAGEConv(i, o, normalize=True),
    "SAGE-project": lambda i, o: SAGEConv(i, o, project=True),
    "SAGE-no-root": lambda i, o: SAGEConv(i, o, root_weight=False),
    "SAGE-max": lambda i, o: SAGEConv(i, o, aggr="max"),
    "SAGE-many": lambda i, o: SAGEConv(i, o, aggr=["mean", "sum"]),
}
WEIGHTED = [name for name in CASES if not name.startswith(("GIN", "SAGE"))]


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Data, Shard]:
    return one_rank(tmp_path, "isolated")


def _layer(make: Any, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    layer: nn.Module = make(inputs, outputs).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.4)
    return layer


def _results(layer: nn.Module, x: Tensor, edges: Tensor, weight: tuple[Tensor, ...], *, grad: bool) -> list[Tensor]:
    x = x.clone().requires_grad_() if grad else x
    weight = tuple(value.clone().requires_grad_() for value in weight) if grad else weight
    out = layer(x, edges, *weight)
    return [out, *gradients(layer, out, *((x, *weight) if grad else ()))]


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pyg(name: str, widths: tuple[int, int], graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    plain = _layer(CASES[name], *widths)
    model = single(copy.deepcopy(plain), shard)
    for grad in (False, True):
        if "cached" in name:
            plain.reset_parameters()
            model.load_state_dict(plain.state_dict())
            model._cached_edge_index = model._cached_x = None
        for _ in range(3):
            expected = _results(plain, data.x, data.edge_index, (), grad=grad and name != "SG-cached")
            same(_results(model, shard.x, shard.adjacency, (), grad=grad and name != "SG-cached"), expected)
    with torch.inference_mode():
        same([model(shard.x, shard.adjacency)], [plain(data.x, data.edge_index)])


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True], ids=["given", "learned"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", [name for name in WEIGHTED if "cached" not in name])
def test_edge_weights_are_used_as_pyg_does(
    name: str, widths: tuple[int, int], learned: bool, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(CASES[name], *widths)
    model = single(copy.deepcopy(plain), shard)
    for _ in range(3):
        expected = _results(plain, data.x, data.edge_index, (data.edge_weight,), grad=learned)
        same(_results(model, shard.x, shard.adjacency, (shard.edge_weight,), grad=learned), expected)


def test_learned_edge_weights_of_fixed_rows_are_aggregated_on_the_narrow_side(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    model, weight = single(_layer(GCNConv, 5, 2), shard), shard.edge_weight.clone().requires_grad_()
    for _ in range(2):
        with Columns() as columns:
            model(shard.x, shard.adjacency, weight)
        assert columns.take() == [2]


# columns of the forward pass where the rows need a gradient: PyG's, and here
SIDES = {
    "GCN": ([9, 2], [5, 2]),
    "SG": ([5] * 3, [2] * 3),
    "TAG": ([5] * 3, [2] * 3),
    "SAGE": ([5, 5], [5, 2]),
    "Graph": ([5, 5], [5, 2]),
}


@pytest.mark.parametrize("name", ["GCN", "SAGE", "Graph"])
def test_the_narrow_side_is_aggregated(name: str, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    for savings, expected in ((NOTHING, SIDES[name][0]), (Savings(), SIDES[name][1])):
        found = []
        for widths in (WIDTHS["narrow-to-wide"], WIDTHS["wide-to-narrow"]):
            model = single(_layer(CASES[name], *widths), shard, savings)
            with Columns() as columns:
                model(shard.x.clone().requires_grad_(), shard.adjacency)
            found += columns.take()
        assert found == expected


# columns of a sum over rows that need no gradient and of its backward pass, in training and without
@pytest.mark.parametrize(
    ("outputs", "trained", "evaluated"), [(9, [5], [5]), (5, [5], [5]), (3, [5], [3]), (2, [2, 2], [2])]
)
@pytest.mark.parametrize("name", ["GCN", "SG", "TAG-one", "SAGE", "Graph", "GIN"])
def test_a_sum_without_a_backward_pass_may_be_wider(
    name: str, outputs: int, trained: list[int], evaluated: list[int], graph: tuple[Data, Shard]
) -> None:
    _, shard = graph
    make = (lambda i, o: SGConv(i, o, K=1)) if name == "SG" else CASES[name]
    model = single(_layer(make, 5, outputs), shard, Savings(first_hop=False))
    with Columns() as columns:
        model(shard.x, shard.adjacency).sum().backward()
        assert columns.take() == trained
        with torch.no_grad():
            model(shard.x, shard.adjacency)
        assert columns.take() == evaluated


def test_only_what_is_learned_has_a_backward_pass(graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    for frozen, weighted, expected in ((False, False, [5]), (True, False, [3]), (False, True, [3])):
        layer = _layer(GCNConv, 5, 3)
        layer.requires_grad_(not frozen)
        model = single(layer, shard, Savings(first_hop=False))
        weight = shard.edge_weight.clone().requires_grad_() if weighted else None
        with Columns() as columns:
            model(shard.x, shard.adjacency, weight)
        assert columns.take() == expected


@pytest.mark.parametrize("name", ["SG", "TAG"])
def test_every_hop_is_over_the_narrow_side(name: str, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    for savings, expected in ((NOTHING, SIDES[name][0]), (Savings(), SIDES[name][1])):
        model = single(_layer(CASES[name], 5, 2), shard, savings)
        with Columns() as columns:
            model(shard.x.clone().requires_grad_(), shard.adjacency)
        assert columns.take() == expected


@pytest.mark.parametrize("name", ["GCN-max", "SG-max", "TAG-max", "SAGE-max", "SAGE-project", "Graph-max"])
def test_what_is_not_linear_keeps_its_side(name: str, graph: tuple[Data, Shard]) -> None:
    _, shard = graph
    for widths in WIDTHS.values():
        found = []
        for cheaper in (False, True):
            model = single(_layer(CASES[name], *widths), shard, Savings(cheaper_side=cheaper, first_hop=False))
            with Columns() as columns:
                model(shard.x.clone().requires_grad_(), shard.adjacency)
            found.append(columns.take())
        assert found[0] == found[1]


def test_a_two_layer_gcn_aggregates_80_columns_an_epoch(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    x = torch.randn(37, 128, dtype=torch.float64)
    torch.manual_seed(0)
    plain = GCN(128, 128, 2, 40).double()
    for savings, expected in ((Savings(), [128 + 80, 80, 80]), (NOTHING, [336, 336, 336])):
        reference, model = copy.deepcopy(plain), single(copy.deepcopy(plain), shard, savings)
        found = []
        for _ in range(3):
            with Columns() as columns:
                ours = epoch(model, x, shard.adjacency)
            same(ours, epoch(reference, x, data.edge_index))
            found.append(sum(columns.take()))
        assert found == expected


# --- nothing else changes ---------------------------------------------------------------------------------------------

HOOKED = {"GCN": "lin", "SG": "lin", "SAGE": "lin_l", "Graph": "lin_rel", "TAG": "lins.0"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_on_the_linear_layer_see_what_pyg_shows_them(
    name: str, widths: tuple[int, int], kind: str, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(CASES[name], *widths)
    model = single(copy.deepcopy(plain), shard)
    seen: list[list[Tensor]] = [[], []]
    for layer, found in zip((plain, model), seen, strict=True):

        def hook(module: nn.Module, *values: Any, found: list[Tensor] = found) -> None:
            found.extend(value.clone() for part in values for value in (part if isinstance(part, tuple) else (part,)))

        getattr(layer.get_submodule(HOOKED[name]), f"register_{kind}")(hook)
    for _ in range(2):
        expected = _results(plain, data.x, data.edge_index, (), grad=True)
        same(_results(model, shard.x, shard.adjacency, (), grad=True), expected)
    assert len(seen[0]) > 1
    same(seen[1], seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["propagate", "message", "aggregate"])
@pytest.mark.parametrize("name", ["GCN", "SG", "SAGE", "Graph", "TAG"])
def test_hooks_on_the_hop_run_in_every_epoch_and_see_what_pyg_shows_them(
    name: str, part: str, graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    for widths in WIDTHS.values():
        plain = _layer(CASES[name], *widths)
        model = single(copy.deepcopy(plain), shard)
        seen: list[list[Tensor]] = [[], []]
        for layer, found in zip((plain, model), seen, strict=True):

            def hook(module: nn.Module, inputs: Any, out: Tensor, found: list[Tensor] = found) -> None:
                found.append(out.clone())

            getattr(layer, f"register_{part}_forward_hook")(hook)
        for _ in range(3):
            expected = _results(plain, data.x, data.edge_index, (), grad=False)
            same(_results(model, shard.x, shard.adjacency, (), grad=False), expected)
        assert len(seen[0]) >= 3
        if part == "message" and name in ("GCN", "SG"):  # their loops are sorted in among the edges here
            seen = [[value.sort(dim=0).values for value in found] for found in seen]
        same(seen[1], seen[0])


class Lora(Linear):
    """A linear layer with an adapter."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, **options)
        self.adapter = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.adapter(x).tanh()
        return out


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["GCN", "SG", "SAGE", "Graph"])
def test_a_linear_layer_replaced_by_the_user_runs_as_it_is(
    name: str, widths: tuple[int, int], graph: tuple[Data, Shard]
) -> None:
    data, shard = graph

    def make(*sizes: int) -> nn.Module:
        layer: nn.Module = CASES[name](*sizes)
        setattr(layer, HOOKED[name], Lora(*sizes))
        return layer

    plain = _layer(make, *widths)
    model = single(copy.deepcopy(plain), shard)
    for grad in (False, True):
        expected = _results(plain, data.x, data.edge_index, (), grad=grad)
        same(_results(model, shard.x, shard.adjacency, (), grad=grad), expected)


@pytest.mark.parametrize("name", ["GCN", "SG", "SAGE", "Graph", "TAG", "ARMA"])
def test_state_and_parameters_keep_their_names_while_the_layer_runs(
    name: str, graph: tuple[Data, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shard = graph
    matmul = Adjacency.matmul
    for widths in WIDTHS.values():
        model = single(_layer(CASES[name], *widths), shard)
        names = [list(model.state_dict()), [key for key, _ in model.named_parameters()], list(model.__dict__)]
        seen = []

        def spy(*args: Any, model: nn.Module = model, seen: list[Any] = seen, **kwargs: Any) -> Tensor:
            seen.append([list(model.state_dict()), [key for key, _ in model.named_parameters()]])
            return matmul(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Adjacency, "matmul", spy)
            model(shard.x.clone().requires_grad_(), shard.adjacency)
        assert seen
        assert all(found == names[:2] for found in seen)
        assert [list(model.state_dict()), [key for key, _ in model.named_parameters()], list(model.__dict__)] == names


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", ["GCN", "SG", "SAGE", "Graph", "TAG", "ARMA"])
def test_an_error_in_the_hop_leaves_the_layer_as_it_was(
    name: str, widths: tuple[int, int], graph: tuple[Data, Shard], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, shard = graph
    plain = _layer(CASES[name], *widths)
    model = single(copy.deepcopy(plain), shard)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Adjacency, "matmul", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(shard.x.clone().requires_grad_(), shard.adjacency)
    for grad in (True, False):
        expected = _results(plain, data.x, data.edge_index, (), grad=grad)
        same(_results(model, shard.x, shard.adjacency, (), grad=grad), expected)


class OwnMessage(GCNConv):
    """Messages that are not linear."""

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j.square()

    def message_and_aggregate(self, adj_t: Any, x: Tensor) -> Tensor:
        return super().message_and_aggregate(adj_t, x.square())


class OwnForward(SAGEConv):
    """A forward that looks at what its parent gives."""

    def forward(self, x: Any, edge_index: Tensor, size: Any = None) -> Tensor:
        self.rows = self.propagate(edge_index, x=(x, x), size=size)
        return self.lin_l(self.rows).square()


class Scaled(GraphConv):
    """Learns a factor of the neighbours' sum, and drops parts of it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.factor = nn.Parameter(torch.ones(1))

    def message_and_aggregate(self, edge_index: Any, x: Any, edge_weight: Tensor | None) -> Tensor:
        out: Tensor = super().message_and_aggregate(edge_index, x, edge_weight)
        return nn.functional.dropout(out * self.factor, 0.5, self.training)

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: Any = None) -> Tensor:
        out: Tensor = super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
        return nn.functional.dropout(out * self.factor, 0.5, self.training)


class OwnUpdate(SAGEConv):
    """An update with a parameter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.factor = nn.Parameter(torch.ones(1))

    def update(self, inputs: Tensor) -> Tensor:
        return (inputs * self.factor).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("cls", [OwnMessage, OwnForward, OwnUpdate, Scaled])
def test_a_subclass_with_code_of_its_own_runs_as_written(
    cls: Any, widths: tuple[int, int], graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(cls, *widths)
    model = single(copy.deepcopy(plain), shard)
    for number in range(4):
        torch.manual_seed(number)
        expected = epoch(plain, data.x, data.edge_index)
        torch.manual_seed(number)
        same(epoch(model, shard.x, shard.adjacency), expected)
        plain.eval(), model.eval()
        for _ in range(2):
            with torch.no_grad():
                same([model(shard.x, shard.adjacency)], [plain(data.x, data.edge_index)])
        plain.train(), model.train()


def test_arguments_by_position_and_by_name_mean_what_they_mean_in_pyg(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    for make, plain_args, ours_args in (
        (SAGEConv, ((37, 37),), ((37, 37),)),
        (GraphConv, (data.edge_weight, (37, 37)), (shard.edge_weight, (37, 37))),
    ):
        plain = _layer(make, 5, 2)
        model = single(copy.deepcopy(plain), shard, Savings(first_hop=False))
        same([model(shard.x, shard.adjacency, *ours_args)], [plain(data.x, data.edge_index, *plain_args)])
        same([model(x=shard.x, edge_index=shard.adjacency, size=None)], [plain(data.x, data.edge_index)])
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            model(shard.x, shard.adjacency, nonsense=1)


@pytest.mark.parametrize("name", ["SAGE", "SAGE-no-root", "Graph", "Graph-mean"])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_rows_of_two_kinds_are_aggregated_as_pyg_does(
    name: str, widths: tuple[int, int], graph: tuple[Data, Shard]
) -> None:
    data, shard = graph
    plain = _layer(CASES[name], *widths)
    model = single(copy.deepcopy(plain), shard)
    for pair in ((data.x, data.x.cos()), (data.x, None)):
        for _ in range(2):
            same([model(pair, shard.adjacency)], [plain(pair, data.edge_index)])


def test_rows_of_two_kinds_are_refused_in_pygs_words(graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    model = single(GCNConv(5, 2).double(), shard)
    with pytest.raises(ValueError, match="GCNConv' received a tuple of node features"):
        model((data.x, data.x), shard.adjacency)


@pytest.mark.parametrize("name", ["GCN", "SG", "SAGE", "Graph"])
def test_lazy_layers_are_made_by_their_first_rows(name: str, graph: tuple[Data, Shard]) -> None:
    data, shard = graph
    for outputs in (2, 9):
        plain, lazy = _layer(CASES[name], 5, outputs), single(CASES[name](-1, outputs).double(), shard)
        lazy(shard.x, shard.adjacency)
        lazy.load_state_dict(plain.state_dict())
        for _ in range(2):
            expected = _results(plain, data.x, data.edge_index, (), grad=False)
            same(_results(lazy, shard.x, shard.adjacency, (), grad=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", HOOKED)
def test_a_linear_layer_replaced_by_one_with_a_bias_adds_it_where_pyg_does(
    name: str, widths: tuple[int, int], graph: tuple[Data, Shard]
) -> None:
    data, shard = graph

    def make(*sizes: int) -> nn.Module:
        layer: nn.Module = CASES[name](*sizes)
        if name == "TAG":
            layer.lins[1] = nn.Linear(*sizes)
        else:
            setattr(layer, HOOKED[name], nn.Linear(*sizes))
        return layer

    plain = _layer(make, *widths)
    model = single(copy.deepcopy(plain), shard)
    for grad in (False, True):
        expected = _results(plain, data.x, data.edge_index, (), grad=grad)
        same(_results(model, shard.x, shard.adjacency, (), grad=grad), expected)


LINEAR = ["ARMAConv", "GCNConv", "GCNConv-cached", "GINConv", "GraphConv", "SAGEConv-mean", "SGConv", "TAGConv"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "savings", [NOTHING, Savings(first_hop=False), Savings(cheaper_side=False)], ids=["none", "sides", "first-hops"]
)
def test_each_saving_by_itself_is_exact_on_two_ranks(savings: Savings, pool: RankPool) -> None:
    kinds = ["isolated", "empty-part"]
    assert_exact("comm", layers=LINEAR, world_sizes=[2], graphs=kinds, savings=savings, pool=pool)
