"""``cache``: nothing travels once the inputs are there, and no row is computed that no later layer needs."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GCN, BatchNorm, GCNConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops

from pygdist.backends import Backend, CacheBackend, HybridBackend
from pygdist.backends.recomputing.backend import RecomputingBackend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.hops.arguments import tensors_of
from pygdist.native import load
from pygdist.routing import distribute, undistribute
from pygdist.testing import RankError, RankPool, assert_exact, random_graph
from pygdist.testing.exactness import distributed_step, largest_differences, reference_step
from pygdist.testing.graphs import GRAPHS

needs_native = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")


def _bound(folder: str, rank: int) -> tuple[CacheBackend, Shard, Communicator]:
    communicator = Communicator(dist.new_group())
    shard = Shard.load(folder, rank)
    backend = CacheBackend()
    backend.bind(shard, communicator)
    return backend, shard, communicator


def _epochs(rank: int, world_size: int, folder: str) -> tuple[list[int], list[int]]:
    backend, shard, communicator = _bound(folder, rank)
    torch.manual_seed(0)
    model = distribute(GCN(5, 6, num_layers=3, out_channels=3).double(), backend=backend, check=False)
    sent, calls = [], []
    for _ in range(3):
        communicator.meter.reset()
        model(shard.x, shard.adjacency, edge_weight=shard.edge_weight).sum().backward()
        traffic = communicator.meter.read()
        sent.append(traffic.sent_bytes)
        calls.append(traffic.calls)
    return sent, calls


def test_nothing_travels_after_the_first_epoch(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    for sent, calls in pool.run(_epochs, 3, str(tmp_path / "parts")):
        assert sent[0] > 0
        assert (sent[1:], calls[1:]) == ([0, 0], [0, 0])


class Seen(SAGEConv):
    """Notes how many rows it is given, and how many edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen = (x.size(0), edge_index.size(1))  # of the last call: before, hops are counted on a small graph
        return super().forward(x, edge_index)


def _rows(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    backend, shard, _ = _bound(folder, rank)
    torch.manual_seed(0)
    layers = [Seen(5, 6), Seen(6, 6), Seen(6, 3)]
    model = distribute(_Chain(layers).double(), backend=backend, check=False)
    out = model(shard.x, shard.adjacency)
    assert out.shape == (shard.num_owned, 3)
    return [layer.seen for layer in layers]


class _Chain(nn.Module):
    def __init__(self, layers: list[Seen]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def test_each_layer_gets_the_rows_that_it_and_later_ones_need(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("isolated", num_nodes=60)
    write_store(data, parts[4], tmp_path / "parts", num_parts=4, method="x", arguments={}, notes=[])
    source, target = data.edge_index
    for rank, seen in enumerate(pool.run(_rows, 4, str(tmp_path / "parts"))):
        out = torch.from_numpy(parts[4]) == rank  # nodes whose row is needed after the last layer
        for rows, edges in reversed(seen):
            assert edges == int(out[target].sum())
            out = out.index_put((source[out[target]],), torch.tensor(True))
            assert rows == int(out.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_layers", "graphs"),
    [
        (1, ("directed", "empty-part")),
        (3, ("power-law", "isolated", "no-train-part")),
        pytest.param(1, GRAPHS, marks=pytest.mark.exhaustive),
        pytest.param(3, GRAPHS, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_models_of_other_depths(num_layers: int, graphs: tuple[str, ...], pool: RankPool) -> None:
    layers = ["GCNConv", "GATConv", "SAGEConv-max", "GINEConv", "TAGConv", "GCN2Conv", "BatchNorm", "SAGEConv-jk"]
    assert_exact("cache", layers=layers, world_sizes=[3], graphs=graphs, num_layers=num_layers, pool=pool)


class Depths(nn.Module):
    """Three layers, and what becomes of their rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.third = GCNConv(5, 5), GCNConv(5, 5), GCNConv(5, 5)
        self.norm = BatchNorm(5)
        self.between: list[int] = []

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        one = self.norm(self.first(x, edge_index)).relu()
        if self.kind == "skips one":  # the second layer stands beside the first, not behind it
            return self.third(x + one * self.second(x, edge_index), edge_index)
        if self.kind == "twice the same":
            return self.third(self.second(one, edge_index), edge_index), self.second(one, edge_index)
        if self.kind == "own edges":
            return self.third(self.second(one, edge_index.flip(0).flip(0)), edge_index)
        two = self.second(one, edge_index).relu()
        self.between = [one.size(0), two.size(0)]
        if self.kind == "earlier rows":  # the last layer needs no more rows of them than of the second's
            return self.third(one, edge_index)
        if self.kind == "all depths":
            return [one, (two, {"out": self.third(two, edge_index)})]
        if self.kind == "in training only" and self.training:
            two = two + one
        out = self.third(two, edge_index)
        return torch.cat([x, one, two, out], dim=1) if self.kind == "concatenated" else out


def _depths(rank: int, world_size: int, folder: str, kind: str) -> tuple[float, list[int], tuple[int, ...]]:
    backend, shard, _ = _bound(folder, rank)
    data, _ = random_graph("power-law", num_nodes=200)
    torch.manual_seed(0)
    model = Depths(kind).double()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        whole = twin(data.x, data.edge_index)
    ours = distribute(model, backend=backend, check=False)(shard.x, shard.adjacency)
    pairs = zip(tensors_of(ours), tensors_of(whole), strict=True)
    apart = max(float((one - two[shard.owned_id]).detach().abs().max()) for one, two in pairs)
    return apart, model.between, next(iter(backend._on_graph.rows.values())).computed


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "chain",
        "earlier rows",
        "skips one",
        "twice the same",
        "own edges",
        "all depths",
        "in training only",
        "concatenated",
    ],
)
def test_rows_of_several_depths(kind: str, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    for apart, between, computed in pool.run(_depths, 3, str(tmp_path / "parts"), kind):
        assert apart < 1e-12
        assert computed[-3] > computed[-2] > computed[-1]
        if kind in {"chain", "earlier rows"}:  # what stands between layers works on no row that no later layer needs
            assert between == list(computed[1:3])
        elif between:
            assert between == [computed[0]] * 2


class Changing(nn.Module):
    """A chain of layers at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(5, 5), GCNConv(5, 5)
        self.own_edges = False

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return self.second(x, edge_index.flip(0).flip(0) if self.own_edges else edge_index)


def _changing(rank: int, world_size: int, folder: str) -> None:
    backend, shard, _ = _bound(folder, rank)
    model = Changing().double()
    distribute(model, backend=backend, check=False)
    model(shard.x, shard.adjacency)
    model.own_edges = True
    with pytest.raises(InputError, match=r"GCNConv gets edges that the model made.*call undistribute"):
        model(shard.x, shard.adjacency)
    model.own_edges = False
    model(shard.x, shard.adjacency)


def test_what_is_no_chain_any_more_says_so(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    pool.run(_changing, 3, str(tmp_path / "parts"))


class Noisy(nn.Module):
    """Its first layer gets other rows in each pass, or the same."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.first, self.second = nn.Dropout(dropout), GCNConv(5, 2), GCNConv(2, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(self.dropout(x), edge_index), edge_index)


def _widths(rank: int, world_size: int, folder: str, dropout: float) -> tuple[int, ...]:
    backend, shard, _ = _bound(folder, rank)
    distribute(model := Noisy(dropout).double(), backend=backend, check=False)
    model(shard.x, shard.adjacency)
    (found,) = backend._on_graph.rows
    return found


@pytest.mark.parametrize(("dropout", "widths"), [(0.0, (5, 2)), (0.5, (2, 2))])
def test_widths_are_those_of_later_passes(
    dropout: float, widths: tuple[int, ...], tmp_path: Path, pool: RankPool
) -> None:
    """Rows that stay the same are aggregated before the layer's weight and kept; others on its narrower side."""
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    assert pool.run(_widths, 2, str(tmp_path / "parts"), dropout) == [widths] * 2


class Branching(nn.Module):
    """Puts out, and asks for, more than it did at first."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(1, 5)
        self.layers = nn.ModuleList([GCNConv(5, 5) for _ in range(3)])
        self.hidden, self.depth = False, 2

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor, wanted: Tensor, edges: bool = False) -> Any:
        x = x + self.kinds(kind)
        rows = []
        for layer in self.layers[: self.depth]:
            x = layer(x, edge_index)
            rows.append(x)
        if edges:
            return {"hidden": rows[0], "out": x}
        return (rows[0], x) if self.hidden else x[wanted]


def _branching(rank: int, world_size: int, folder: str) -> None:
    backend, shard, _ = _bound(folder, rank)
    data, _ = random_graph("power-law", num_nodes=200)
    torch.manual_seed(0)
    model = Branching().double()
    twin = copy.deepcopy(model)
    distribute(model, backend=backend, check=False)
    whole, own = torch.zeros(200, dtype=torch.long), torch.zeros(shard.num_owned, dtype=torch.long)
    wanted = torch.arange(shard.num_owned - 1, 0, -2)
    everywhere = torch.arange(200)

    def check(ours: Any, theirs: Any, rows: Tensor) -> None:
        for one, two in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            torch.testing.assert_close(one, two[rows], rtol=0, atol=1e-12)

    args = (shard.x, shard.adjacency, own, wanted)
    model(*args)
    ((facts, *_),) = [list(entry.facts.values()) for entry in backend._models.values()]
    assert facts.shrinks  # whatever ids are asked for
    check(model(*args), twin(data.x, data.edge_index, whole, everywhere), shard.owned_id[wanted])
    check(model(*args, edges=True), twin(data.x, data.edge_index, whole, everywhere, True), shard.owned_id)
    model.hidden = twin.hidden = True
    check(model(*args), twin(data.x, data.edge_index, whole, everywhere), shard.owned_id)
    model.depth = 1
    check(model(*args)[1], twin(data.x, data.edge_index, whole, everywhere)[0], shard.owned_id)
    model.depth = twin.depth = 3  # the third hop fetches all that it reads
    check(model(*args), twin(data.x, data.edge_index, whole, everywhere), shard.owned_id)
    undistribute(model)
    distribute(model, backend=backend, check=False)
    check(model(*args), twin(data.x, data.edge_index, whole, everywhere), shard.owned_id)
    with pytest.raises(InputError, match=r"GCNConv runs outside a forward pass of the model"):
        model.layers[0](shard.x, shard.adjacency)


def test_models_that_do_more_than_at_first(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    pool.run(_branching, 3, str(tmp_path / "parts"))


def _inferred(rank: int, world_size: int, folder: str, ratio: float) -> None:
    shard, backend = Shard.load(folder, rank), HybridBackend(cache_ratio=ratio)
    backend.bind(shard, Communicator(dist.new_group()))
    model = distribute(pyg.GraphSAGE(5, 6, num_layers=2, out_channels=3).double(), backend=backend, check=False)
    with torch.inference_mode():
        model(shard.x, shard.adjacency)
    model(shard.x, shard.adjacency).sum().backward()


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_training_uses_what_inference_mode_began(ratio: float, tmp_path: Path, pool: RankPool) -> None:
    if load() is None and ratio < 1:
        pytest.skip("hybrid plans in the native library")
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    pool.run(_inferred, 3, str(tmp_path / "parts"), ratio)


def _sequential(rank: int, world_size: int, folder: str) -> float:
    backend, shard, _ = _bound(folder, rank)
    data, _ = random_graph("directed")
    torch.manual_seed(0)
    steps = [(pyg.GCNConv(5, 6), "x, e, w -> x"), nn.ReLU(), (pyg.GCNConv(6, 3), "x, e, w -> x")]
    model = pyg.Sequential("x, e, w", steps).double()
    whole = model(data.x, data.edge_index, data.edge_weight).detach()
    ours = distribute(model, backend=backend, check=False)(shard.x, shard.adjacency, shard.edge_weight)
    return float((ours - whole[shard.owned_id]).detach().abs().max())


def test_weights_of_edges_among_arguments_without_names(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert max(pool.run(_sequential, 3, str(tmp_path / "parts"))) < 1e-12


def _divided(rank: int, world_size: int, folder: str) -> bool:
    backend, shard, _ = _bound(folder, rank)
    torch.manual_seed(0)
    model = Divided().double()
    distribute(model, backend=backend, check=False)(shard.x, shard.adjacency).sum().backward()
    return all(bool(one.grad.isfinite().all()) for one in model.parameters() if one.grad is not None)


class Divided(nn.Module):
    """Makes NaN of rows of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.last = GCNConv(5, 5), nn.Linear(5, 5, bias=False), GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        between = self.linear(self.first(x, edge_index))
        return self.last(x + between / between.norm(dim=1, keepdim=True), edge_index)


def test_rows_that_nobody_needs_make_no_nan(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert all(pool.run(_divided, 3, str(tmp_path / "parts")))


class Weighted(GCN):
    """Scales classes by a tensor that says nothing of nodes."""

    def forward(self, x: Tensor, edge_index: Tensor, class_weight: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, edge_index)
        return out * class_weight.sum()


def _as_long_as_one_rank(rank: int, world_size: int, folder: str) -> tuple[float, int]:
    backend, shard, communicator = _bound(folder, rank)
    model = distribute(Weighted(5, 6, num_layers=2, out_channels=3).double(), backend=backend, check=False)
    length = int(communicator.gather([shard.num_owned])[0])
    weight = torch.arange(length, dtype=torch.float64)
    out = model(shard.x, shard.adjacency, weight)
    plain = model(shard.x, shard.adjacency, weight.sum()[None])
    return float((out - plain).abs().max()), int(length == shard.num_owned)


def test_an_argument_as_long_as_one_rank_s_nodes_holds_no_row_per_node(tmp_path: Path, pool: RankPool) -> None:
    data, _ = random_graph("isolated", num_nodes=60)
    part = (torch.arange(60) > 10).long() + (torch.arange(60) > 30).long()
    write_store(data, part, tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    found = pool.run(_as_long_as_one_rank, 3, str(tmp_path / "parts"))
    assert [same for _, same in found] == [1, 0, 0]
    assert max(difference for difference, _ in found) == 0


class Weighs(MessagePassing):
    """A user's layer, whose weights of edges have a name of his own."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.lin = nn.Linear(width, out)

    def forward(self, x: Tensor, edge_index: Tensor, norm: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x), norm=norm)
        return out

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm[:, None] * x_j


class Unusual(nn.Module):
    """What models may do with edges and layers besides calling one after the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        layer = Weighs if kind == "own names" else partial(GCNConv, normalize=False)
        self.first, self.second = layer(5, 6), layer(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        if self.kind == "normalised":
            edge_index, edge_weight = gcn_norm(edge_index, edge_weight, x.size(0))
        elif self.kind == "self-loops":
            edge_index, edge_weight = add_self_loops(edge_index, edge_weight, 0.5, num_nodes=x.size(0))
        elif self.kind == "twice":
            x = x + 0.3 * x.square()  # the same in every epoch
            again = self.first(x, edge_index, edge_weight).tanh()
            return self.second(self.first(x, edge_index, edge_weight) - 0.5 * again, edge_index, edge_weight)
        out: Tensor = self.second(self.first(x, edge_index, edge_weight).tanh(), edge_index, edge_weight)
        return out


def _unusual(rank: int, world_size: int, folder: str, kind: str, backend: Backend) -> float:
    data, _ = random_graph("directed")
    shard = Shard.load(folder, rank)
    backend.bind(shard, Communicator(dist.new_group()))
    torch.manual_seed(0)
    plain = Unusual(kind).double()
    model = distribute(copy.deepcopy(plain), backend=backend, check=False)
    found = largest_differences(
        distributed_step(model, shard, backend.communicator), reference_step(plain, data), shard.owned_id
    )
    return max(one.absolute for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normalised", "self-loops", "own names", "twice"])
@pytest.mark.parametrize(
    "backend", [CacheBackend(), pytest.param(HybridBackend(cache_ratio=0.4), marks=needs_native)], ids=["cache", "some"]
)
def test_unusual_models(kind: str, backend: Backend, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[3], tmp_path / "parts", num_parts=3, method="x", arguments={}, notes=[])
    assert max(pool.run(_unusual, 3, str(tmp_path / "parts"), kind, backend)) < 1e-10


class Products(TorchDispatchMode):
    """Rows of each dense product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() in ("aten::mm", "aten::addmm"):
            self.rows.append(out.size(0))
        return out


def _product_rows(rank: int, world_size: int, folder: str, name: str) -> tuple[list[int], tuple[int, ...]]:
    backend, shard, _ = _bound(folder, rank)
    torch.manual_seed(0)
    model = distribute(getattr(pyg, name)(5, 6, num_layers=2, out_channels=3).double(), backend=backend, check=False)
    for _ in range(2):
        model(shard.x, shard.adjacency).sum().backward()
    with Products() as products:
        model(shard.x, shard.adjacency)  # in training: of features that stay the same the sums are kept
    assert backend._on_graph.rows
    return products.rows, next(iter(backend._on_graph.rows.values())).computed


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN"])
def test_weights_meet_no_row_that_no_later_layer_needs(name: str, tmp_path: Path, pool: RankPool) -> None:
    """Features of two hops around are there to be summed up; what is made of the sums is needed of one hop around."""
    data, parts = random_graph("power-law", num_nodes=200)
    write_store(data, parts[4], tmp_path / "parts", num_parts=4, method="x", arguments={}, notes=[])
    for rows, computed in pool.run(_product_rows, 4, str(tmp_path / "parts"), name):
        assert computed[0] >= computed[1] > computed[2]
        assert max(rows) <= computed[1]
        assert rows[-1] in computed[1:]


class FetchesAll(RecomputingBackend):
    """Computes no row of another rank: a choice of its own, and nothing else."""

    name = ""

    def choose(self, around: Any, widths: tuple[int, ...], probe: Any) -> list[Tensor]:
        return [torch.zeros(around.n_id.numel(), dtype=torch.bool) for _ in widths]


def test_rows_that_a_subclass_does_not_choose_are_fetched(pool: RankPool) -> None:
    assert_exact(FetchesAll(), layers=["GCNConv", "GATConv"], world_sizes=[2], graphs=["directed"], pool=pool)


class UpdatesEdgesLast(MessagePassing):
    """Puts out a number for each edge after its last hop, from attributes or from rows of nodes."""

    def __init__(self, of_nodes: bool) -> None:
        super().__init__()
        self.of_nodes = of_nodes

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        out = self.propagate(edge_index, x=x)
        return out, self.edge_updater(edge_index, edge_attr=edge_attr, row=out if self.of_nodes else None)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def edge_update(self, edge_attr: Tensor, row_j: Tensor | None = None) -> Tensor:
        return 2 * edge_attr if row_j is None else row_j[:, :1] * edge_attr


def _edges_last(rank: int, world_size: int, folder: str, of_nodes: bool) -> bool:
    backend, shard, _ = _bound(folder, rank)
    model = distribute(UpdatesEdgesLast(of_nodes), backend=backend, check=False)
    attr = torch.ones(shard.adjacency.size(1), 1, dtype=shard.x.dtype)
    if of_nodes:
        with pytest.raises(InputError, match="updates edges from rows of nodes after the model's last hop"):
            model(shard.x, shard.adjacency, attr)
        return True
    out, edges = model(shard.x, shard.adjacency, attr)
    return out.size(0) == shard.num_owned and bool((edges == 2).all())


@pytest.mark.parametrize("of_nodes", [False, True])
def test_edges_that_are_updated_after_the_last_hop(of_nodes: bool, tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    assert all(pool.run(_edges_last, 2, str(tmp_path / "parts"), of_nodes))


def _changed_by_one(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rank 0 alone changes a row in place, then asks for the gradient of its rows."""
    backend, shard, _ = _bound(folder, rank)
    torch.manual_seed(0)
    model, x = distribute(GCN(5, 6, num_layers=2, out_channels=3).double(), backend=backend), shard.x.clone()
    model(x, shard.adjacency)
    if rank == 0:
        x[0] += 1
    out = model(x, shard.adjacency).detach()
    model(x.requires_grad_(rank == 0), shard.adjacency).sum().backward()
    return shard.owned_id, x.detach(), out


def test_rows_that_one_rank_changes_travel_again(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    results = pool.run(_changed_by_one, 2, str(tmp_path / "parts"))
    x = data.x.clone()
    for ids, rows, _ in results:
        x[ids] = rows
    torch.manual_seed(0)
    expected = GCN(5, 6, num_layers=2, out_channels=3).double()(x, data.edge_index)
    for ids, _, out in results:
        torch.testing.assert_close(out, expected[ids], rtol=0, atol=1e-12)


class Weights(nn.Module):
    """Puts out its attention, and takes weights of edges by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pyg.GATConv(5, 4), pyg.GraphConv(4, 3)

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Any:
        hidden, (_, alpha) = self.first(x, edge_index, return_attention_weights=True)
        return self.second(hidden.relu(), edge_index, w), alpha


def _weights(rank: int, world_size: int, folder: str, copies: bool) -> tuple[Tensor, Tensor, Tensor]:
    backend, shard, _ = _bound(folder, rank)
    torch.manual_seed(0)
    model = distribute(Weights().double(), backend=backend, check=False)
    assert shard.edge_weight is not None
    out, alpha = model(shard.x, shard.adjacency, shard.edge_weight.clone() if copies else shard.edge_weight)
    return shard.owned_id, out.detach(), alpha.detach()


def test_attention_that_is_put_out_is_that_of_edges_into_own_nodes(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    torch.manual_seed(0)
    out, alpha = Weights().double()(data.x, data.edge_index, data.edge_weight)
    results = pool.run(_weights, 2, str(tmp_path / "parts"), False)
    assert sum(len(one) for _, _, one in results) == len(alpha)
    assert float(sum(one.square().sum() for _, _, one in results)) == pytest.approx(
        float(alpha.detach().square().sum())
    )
    for ids, rows, _ in results:
        torch.testing.assert_close(rows, out[ids], rtol=0, atol=1e-12)


def test_weights_where_each_node_has_one_edge_are_told_from_rows_of_nodes(tmp_path: Path, pool: RankPool) -> None:
    data, parts = random_graph("directed")
    count = data.num_nodes
    data.edge_index = torch.stack([torch.arange(count).roll(7), torch.arange(count)])
    for name in ("edge_weight", "edge_attr", "edge_type"):
        data[name] = data[name][:count]
    write_store(data, parts[2], tmp_path / "parts", num_parts=2, method="x", arguments={}, notes=[])
    torch.manual_seed(0)
    out, _ = Weights().double()(data.x, data.edge_index, data.edge_weight)
    for ids, rows, _ in pool.run(_weights, 2, str(tmp_path / "parts"), False):
        torch.testing.assert_close(rows, out[ids], rtol=0, atol=1e-12)
    with pytest.raises(RankError, match="argument 'w' of the model may hold rows of nodes or of edges"):
        pool.run(_weights, 2, str(tmp_path / "parts"), True)
