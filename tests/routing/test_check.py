"""The check before training refuses what a rank cannot compute, accepts what it can, and leaves no trace."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, MessagePassing, SAGEConv, global_add_pool, global_mean_pool
from torch_geometric.transforms import ToUndirected, VirtualNode
from torch_geometric.utils import degree, dropout_edge, scatter, to_undirected
from typing_extensions import override

from pygdist.backends import Backend, ReplicaBackend, resolve_backend
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard, write_store
from pygdist.native import load
from pygdist.nn.decoupled import decouple
from pygdist.nn.inputs import edge_inputs
from pygdist.nn.ngnn import NGNN
from pygdist.routing import causes, distribute, edges, undistribute
from pygdist.routing import check as checks
from pygdist.routing.miniature import awkward_graph
from pygdist.testing import LAYERS, RankPool, random_graph
from pygdist.testing.layers import build

BACKENDS = ["comm", "cache", "hybrid", "tensor", "replica"]
OVER_NODES, BY_NUMBER, ELSEWHERE = causes.OVER_NODES, causes.BY_NUMBER, causes.ELSEWHERE


class Then(nn.Module):
    """A layer, and a function of its rows."""

    def __init__(self, after: Callable[..., Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.after = GCNConv(5, 3) if layer is None else layer, after

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.after(self.conv(x, edge_index), edge_index)


class Attention(nn.Module):
    """Every node attends to every node."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention = GCNConv(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.conv(x, edge_index)[None]
        return self.attention(out, out, out)[0][0]


class OfSources(MessagePassing):
    """Divides each message by what its source has, looked up by hand."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end, self.lin = end, nn.Linear(5, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        count = degree(edge_index[self.end], x.size(0), dtype=x.dtype).clamp(min=1)
        out: Tensor = self.propagate(edge_index, x=self.lin(x), scale=1 / count[edge_index[0]])
        return out

    @override
    def message(self, x_j: Tensor, scale: Tensor) -> Tensor:
        return x_j * scale.view(-1, 1)


class OutDegree(MessagePassing):
    """Divides each message by the out-degree of its source."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.propagate(edge_index, x=self.lin(x), num=x.size(0))
        return out

    @override
    def message(self, x_j: Tensor, edge_index: Tensor, num: int) -> Tensor:
        return x_j / degree(edge_index[0], num, dtype=x_j.dtype)[edge_index[0]].view(-1, 1)


class Regularised(pyg.aggr.Aggregation):
    """An aggregation that takes off the mean of all messages."""

    @override
    def forward(self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2) -> Tensor:
        out: Tensor = self.reduce(x, index, ptr, dim_size, dim, reduce="sum")
        return out - x.mean(0)


class OfEdges(nn.Module):
    """Edges count by their place among all edges."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GraphConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, torch.arange(edge_index.size(1)).to(x).sin())
        return out


class Mirrored(nn.Module):
    """Makes the graph undirected."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, to_undirected(edge_index, num_nodes=x.size(0)))
        return out


class Before(nn.Module):
    """A layer after a function of the rows and the edges."""

    def __init__(self, before: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], layer: Any = SAGEConv) -> None:
        super().__init__()
        self.conv, self.before = layer(5, 3), before

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(*self.before(x, edge_index))
        return out[: x.size(0)]


def _mirrored(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.cat([edge_index, edge_index.flip(0)], 1)


def _nearest(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Join each node to the one that is most like it."""
    return x, torch.stack([torch.cdist(x, x).fill_diagonal_(1e9).argmin(1), torch.arange(x.size(0))])


def _with_virtual_node(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """Join a node to all others."""
    nodes, added = torch.arange(x.size(0)), torch.full((x.size(0),), x.size(0))
    joined = torch.stack([torch.cat([nodes, added]), torch.cat([added, nodes])])
    return torch.cat([x, x.new_zeros(1, x.size(1))]), torch.cat([edge_index, joined], 1)


def _transformed(x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
    data = VirtualNode()(Data(x=x, edge_index=edge_index, num_nodes=x.size(0)))
    assert data.x is not None
    assert data.edge_index is not None
    return data.x, data.edge_index


class BetweenColumns(MessagePassing):
    """Joins each feature to the next one."""

    def __init__(self) -> None:
        super().__init__(node_dim=1)
        self.lin = nn.Linear(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        features = torch.arange(4, device=x.device)
        return x + self.propagate(torch.stack([features, features + 1]), x=x) + 0 * self.lin(x).mean(1, True)


class Prototypes(nn.Module):
    """Learns a few rows, each of which attends to all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rows = GCNConv(5, 3), nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.conv(x, edge_index)
        weight = (out @ self.rows.t()).softmax(0)
        return out + weight @ (weight.t() @ out)


class Sequence(nn.Module):
    """Reads the nodes one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = GCNConv(5, 3), nn.GRU(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.gru(self.conv(x, edge_index))[0]
        return out


def _unit_gradient(x: Tensor, _: Tensor) -> Tensor:
    """Gives all nodes together a gradient of length one."""
    x.register_hook(lambda gradient: gradient / gradient.norm()) if x.requires_grad else None
    return x


def _without_edges(ends: slice) -> Callable[[Tensor, Tensor], Tensor]:
    """Double the nodes that are at none of these ends of edges."""

    def doubled(x: Tensor, edge_index: Tensor) -> Tensor:
        factor = x.new_full((x.size(0), 1), 2.0)
        factor[edge_index[ends].flatten()] = 1.0
        return x * factor

    return doubled


def _noise(x: Tensor, _: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)


#: Models that a rank cannot run on its part, and what the message says of them.
WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mean": (lambda: Then(lambda x, _: x + x.mean(0, keepdim=True).sigmoid()), OVER_NODES),
    "softmax": (lambda: Then(lambda x, _: x.softmax(0)), OVER_NODES),
    "maximum": (lambda: Then(lambda x, _: x / x.abs().amax()), OVER_NODES),
    "functional-norm": (lambda: Then(lambda x, _: functional.batch_norm(x, None, None, training=True)), OVER_NODES),
    "ranks": (lambda: Then(lambda x, _: x.argsort(0).argsort(0).to(x) * x), OVER_NODES),
    "nearest": (lambda: Then(lambda x, _: x - x[torch.cdist(x, x).fill_diagonal_(9.0).argmin(1)]), OVER_NODES),
    "attention": (Attention, OVER_NODES),
    "regularised": (lambda: Then(lambda x, _: x, SAGEConv(5, 3, aggr=Regularised())), OVER_NODES),
    "positions": (lambda: Then(lambda x, _: x + torch.arange(x.size(0)).to(x).sin()[:, None]), BY_NUMBER),
    "noise": (lambda: Then(_noise), BY_NUMBER),
    "running": (lambda: Then(lambda x, _: x.cumsum(0)), BY_NUMBER),
    "edges": (OfEdges, BY_NUMBER),
    "own-degree": (lambda: OfSources(1), ELSEWHERE),
    "out-degree-by-hand": (lambda: OfSources(0), ELSEWHERE),
    "out-degree": (OutDegree, ELSEWHERE),
    "mirrored": (Mirrored, edges.TURNED),
    "turned": (lambda: Before(lambda x, edge_index: (x, edge_index.flip(0))), edges.TURNED),
    "mirrored-by-hand": (lambda: Before(_mirrored), edges.TURNED),
    "ends-swapped": (lambda: Before(lambda x, ends: (x, torch.stack([ends[1], ends[0]])), pyg.GATConv), edges.TURNED),
    "nearest-edges": (lambda: Before(_nearest), edges.MADE),
    "virtual-node": (lambda: Before(_with_virtual_node, GCNConv), edges.OF_MORE_NODES),
    "virtual-transform": (lambda: Before(_transformed), edges.OF_MORE_NODES),
    "columns": (BetweenColumns, edges.OF_COLUMNS),
    "prototypes": (Prototypes, OVER_NODES),
    "number-of-nodes": (lambda: Then(lambda x, _: x / x.size(0)), OVER_NODES),
    "sequence": (Sequence, BY_NUMBER),
    "gradient": (lambda: Then(_unit_gradient), causes.OF_GRADIENTS),
    "sinks": (lambda: Then(_without_edges(slice(0, 1))), ELSEWHERE),
    "isolated": (lambda: Then(_without_edges(slice(0, 2))), ELSEWHERE),
    "mean-in-training": (lambda: Noisy(lambda x: x - x.mean(0)), OVER_NODES),
    "scattered": (
        lambda: Then(lambda x, edge_index: x + scatter(x[edge_index[1]], edge_index[0], dim_size=x.size(0))),
        ELSEWHERE,
    ),
}


#: These get edges that the graph does not have, which is found on one process.
OTHER_EDGES = {name for name, (_, kind) in WRONG.items() if kind in vars(edges).values()}
#: Right here: with ``tensor`` all messages are at one place, with these two all rows of sources.
EXACT = {("regularised", "tensor"), ("own-degree", "cache"), ("own-degree", "replica")}


def _right() -> dict[str, Callable[[], nn.Module]]:
    models: dict[str, Callable[[], nn.Module]] = {name: partial(build, name, 5, 3) for name in LAYERS}
    norms = (pyg.MeanSubtractionNorm, pyg.GraphSizeNorm, partial(pyg.DiffGroupNorm, 3, 2), partial(nn.BatchNorm1d, 3))
    models |= {type(make()).__name__: partial(Normed, make) for make in norms}
    for norm in ("BatchNorm", "GraphNorm", "PairNorm", "InstanceNorm", "LayerNorm"):
        models[norm] = lambda norm=norm: GCN(5, 6, num_layers=2, out_channels=3, norm=norm)
    for jk, cls in itertools.product(("cat", "max", "lstm"), (pyg.GCN, pyg.GraphSAGE, pyg.GIN, pyg.GAT, pyg.PNA)):
        if cls is not pyg.PNA:
            models[f"{cls.__name__}-{jk}"] = lambda cls=cls, jk=jk: cls(5, 6, num_layers=3, out_channels=3, jk=jk)
    models["NGNN"] = lambda: NGNN(5, 6, num_layers=2, out_channels=3, conv="sage")
    models["decoupled"] = lambda: decouple(GCN(5, 6, num_layers=2, out_channels=3))
    models["decoupled-gat"] = lambda: decouple(pyg.GAT(5, 6, num_layers=2, out_channels=3))
    for name, readout in (("mean", pyg.MeanAggregation), ("sum", pyg.SumAggregation)):
        models[f"readout-{name}"] = partial(Summary, readout)
    models["pool-mean"], models["pool-sum"] = lambda: Summary(Pooled), lambda: Summary(PooledSum)
    models["dropout"] = lambda: GCN(5, 6, num_layers=2, out_channels=3, dropout=0.5)
    models["dropout-by-keyword"] = lambda: Then(lambda x, _: functional.dropout(input=x, p=0.5))
    models["noise-in-training"] = lambda: Noisy()
    models["hook-that-counts"] = _counted
    models["float"] = lambda: Then(lambda x, _: x.float().tanh().to(x))
    return models


def _counted() -> nn.Module:
    """Return a model whose hook counts its calls, and whose output depends on the count."""
    model, count = GCN(5, 6, num_layers=2, out_channels=3), [0]

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        count[0] += 1
        return out * count[0]

    model.register_forward_hook(hook)
    return model


class Summary(nn.Module):
    """Adds what a readout makes of all nodes to each; the remedy for models that take a mean."""

    def __init__(self, readout: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv, self.readout = GCNConv(5, 3), readout()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out + self.readout(out).sigmoid()


class Pooled(nn.Module):
    """PyG's mean of all nodes."""

    def forward(self, x: Tensor) -> Tensor:
        return global_mean_pool(x, None)


class PooledSum(nn.Module):
    """PyG's sum of all nodes."""

    def forward(self, x: Tensor) -> Tensor:
        return global_add_pool(x, None)


class Normed(nn.Module):
    """A layer and a norm."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = GCNConv(5, 3), norm()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x, edge_index))
        return out


class Noisy(nn.Module):
    """Draws random numbers in training, as dropped edges and augmentations do."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.conv, self.change = SAGEConv(5, 3), change

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if not self.training:
            return cast(Tensor, self.conv(x, edge_index))
        x = self.change((x + torch.randn_like(x)) * torch.empty_like(x).bernoulli_(0.6))
        return cast(Tensor, self.conv(x, dropout_edge(edge_index, p=0.3)[0]))


RIGHT = _right()
#: Each kind of hop and of module that looks at all nodes; the rest with --exhaustive.
FEW = ["GCNConv", "SAGEConv-lstm", "GATConv", "PNAConv", "RGCNConv", "GraphNorm", "GIN-lstm", "decoupled", "NGNN"]
FEW += ["dropout", "dropout-by-keyword", "noise-in-training", "hook-that-counts", "float", "BatchNorm"]


#: The remedies that messages name for models that take a mean; a part that trains by itself knows no other.
READOUTS = ["readout-mean", "readout-sum", "pool-mean", "pool-sum"]


def _bound(name: str, folder: str, rank: int, communicator: Communicator) -> tuple[Shard, Backend]:
    shard = Shard.load(f"{folder}/{'replicas' if name == 'replica' else 'nodes'}", rank)
    backend = ReplicaBackend(hops=3) if name == "replica" else resolve_backend(name)
    backend.bind(shard, communicator)
    return shard, backend


def _said(rank: int, world_size: int, folder: str, backend_name: str, models: list[str]) -> dict[str, str]:
    """What the first pass of each model says."""
    communicator, said = Communicator(dist.new_group()), {}
    for name in models:
        shard, backend = _bound(backend_name, folder, rank, communicator)
        torch.manual_seed(0)
        make = RIGHT[name] if name in RIGHT else WRONG[name][0]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                model = distribute(make().double(), backend=backend)
            except InputError:  # a layer that this backend does not run
                continue
            try:
                out = model(shard.x, shard.adjacency, **edge_inputs(model, shard))
                said[name] = "" if out.isfinite().all() else "not finite"
            except InputError as error:
                said[name] = str(error)
        said[name] += "".join(str(one.message) for one in warned if "small graph" in str(one.message))
    return said


needs_planner = pytest.mark.skipif(load() is None, reason="hybrid plans in the native library")
backends_ = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_planner if name == "hybrid" else ()) for name in BACKENDS]
)


@pytest.fixture(scope="module")
def said_of_wrong(parts: str, pool: RankPool) -> Callable[[str], list[dict[str, str]]]:
    """By backend: what each rank says of all wrong models."""
    return cache(lambda backend: pool.run(_said, 2, parts, backend, list(WRONG)))


@backends_
@pytest.mark.parametrize("name", WRONG)
def test_what_a_rank_cannot_compute_is_refused(
    name: str, backend: str, said_of_wrong: Callable[[str], list[dict[str, str]]]
) -> None:
    """On all ranks, before anything is trained; one rank alone may see that a row is missing."""
    for said in said_of_wrong(backend):
        if (name, backend) == ("columns", "tensor"):  # which refuses such layers by themselves
            assert name not in said
        elif (name, backend) in EXACT:
            assert said[name] == ""
        else:
            assert "on one process" in said[name] or name in OTHER_EDGES
            over_nodes = causes.OVER_NODES_OF_PARTS.format("cache, comm, delayed, hybrid or tensor")
            kind = WRONG[name][1]
            assert (over_nodes if kind == OVER_NODES and backend == "replica" else kind) in said[name]


@pytest.mark.parametrize(
    "backend",
    [
        *("comm", "tensor", "replica"),
        pytest.param("cache", marks=pytest.mark.exhaustive),
        pytest.param("hybrid", marks=[pytest.mark.exhaustive, needs_planner]),
    ],
)
def test_what_a_rank_can_compute_is_accepted(backend: str, parts: str, pool: RankPool) -> None:
    models = FEW if backend == "replica" else FEW + READOUTS
    if backend == "tensor":  # it refuses layers that mix columns
        models = [name for name in models if name not in ("SAGEConv-lstm", "PNAConv")]
    for said in pool.run(_said, 2, parts, backend, models):
        assert said == dict.fromkeys(models, "")


@pytest.mark.exhaustive
@backends_
def test_all_layers_and_models_are_accepted(backend: str, parts: str, pool: RankPool) -> None:
    for said in pool.run(_said, 2, parts, backend, list(RIGHT)):
        refused = {name: text for name, text in said.items() if text}
        # PDNConv normalises weights that it computes, and those of edges in other parts are not here
        assert set(refused) == ({"PDNConv", *READOUTS} if backend == "replica" else set()), refused


# -- nothing else happens --------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes itself and draws random numbers; hooks count its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.calls = SAGEConv(5, 3), pyg.BatchNorm(3), [0]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls[0] += 1
        out: Tensor = self.norm(self.conv(x, edge_index))
        return functional.dropout(out, 0.5, self.training)


def _passes(rank: int, world_size: int, folder: str, backend_name: str, check: bool) -> tuple[list[Any], int, bool]:
    communicator = Communicator(dist.new_group())
    shard, backend = _bound(backend_name, folder, rank, communicator)
    torch.manual_seed(3)
    model = Restless().double()
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002 (the global one is what a model may use)
    distribute(model, backend=backend, check=check)
    with torch.inference_mode():  # as in Lightning's sanity check
        model.eval()(shard.x, shard.adjacency)
    communicator.meter.reset()
    model.train()
    outs = [model(shard.x, shard.adjacency).detach() for _ in range(2)]
    outs += [*model.state_dict().values(), torch.tensor([random.random(), np.random.rand()]), torch.rand(2)]  # noqa: NPY002
    return outs, communicator.meter.total.sent_bytes, model.calls == [3] and model.training


@backends_
def test_the_check_changes_nothing(backend: str, parts: str, pool: RankPool) -> None:
    """Neither outputs, running statistics, dropout and generators, nor the bytes of passes and counts of calls."""
    with_check, without = (pool.run(_passes, 2, parts, backend, check) for check in (True, False))
    for (ours, num_bytes, as_called), (theirs, expected, _) in zip(with_check, without, strict=True):
        assert as_called
        assert num_bytes == expected
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _checked(
    rank: int, world_size: int, folder: str, make: Callable[[], Any], calls: int = 1, backend_name: str = "comm"
) -> tuple[int, str]:
    """How often models were compared, and what their passes said."""
    communicator, said = Communicator(dist.new_group()), ""
    torch.manual_seed(0)
    with mock.patch.object(checks, "run_parts", wraps=checks.run_parts) as runs:
        for model in itertools.islice(itertools.cycle([make()]), calls):
            shard, backend = _bound(backend_name, folder, rank, communicator)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    distribute(model.double(), backend=backend)
                    model.called(shard) if hasattr(model, "called") else model(shard.x, shard.adjacency)
                    if isinstance(model, Changing):
                        model.change()
                except (InputError, OSError) as error:
                    said += str(error)
            said += "".join(str(one.message) for one in warned)
            undistribute(model)
    return runs.call_count, said


class Twice(nn.Module):
    """Takes one field of the graph as several arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = GCNConv(5, 3), nn.Linear(5, 3)

    def forward(self, xs: list[Tensor], edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(xs[0], edge_index) + self.lin(xs[1])
        return out

    def called(self, shard: Shard) -> None:
        self([shard.x, shard.x], shard.adjacency)


class Labelled(nn.Module):
    """Knows the labels of some nodes; those of others are -1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.labels = GCNConv(5, 3), nn.Embedding(3, 5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor, edge_index: Tensor) -> Tensor:
        known = torch.zeros_like(x)
        known[mask] = self.labels(y[mask])
        out: Tensor = self.conv(x + known, edge_index)
        return out

    def called(self, shard: Shard) -> None:
        assert shard.y is not None
        self(shard.x, shard.y, shard.y >= 0, shard.adjacency)


class Spare(nn.Module):
    """Does more with more arguments, as models do that see no edges in training."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(5, 3), GCNConv(3, 3)

    def forward(self, x: Tensor, edge_index: Tensor | None = None) -> Tensor:
        out: Tensor = self.lin(x)
        return out if edge_index is None else self.conv(out, edge_index) - out.mean(0)

    def called(self, shard: Shard) -> None:
        self(shard.x)
        self(shard.x)
        self(shard.x, shard.adjacency)


def test_each_form_of_call_is_compared(parts: str, pool: RankPool) -> None:
    for runs, said in pool.run(_checked, 2, parts, Spare):
        assert runs == 3  # of the first form, of the other, and once more to find the module
        assert "the first difference is in Spare.forward (by" in said


@pytest.mark.parametrize("make", [Twice, Labelled])
def test_models_that_are_called_in_other_ways_are_compared(make: Any, parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, make) == [(1, "")] * 2


class OddPart(nn.Module):
    """Does not run on a part, for a reason of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.conv, self.error = GCNConv(5, 3), error

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if type(edge_index) is not Tensor:
            raise self.error
        out: Tensor = self.conv(x, edge_index)
        return out


def test_what_fails_on_parts_alone_is_told_in_one_line(parts: str, pool: RankPool) -> None:
    for _, said in pool.run(_checked, 2, parts, partial(OddPart, KeyError("an odd part"))):
        assert (
            "OddPart ran on a small graph on one process, and failed on a part of it: KeyError: 'an odd part' (" in said
        )
        assert "test_check.py:" in said
        assert "propagate" not in said


def test_a_file_that_is_missing_is_no_matter_of_parts(parts: str, pool: RankPool) -> None:
    missing = FileNotFoundError(2, "No such file or directory", "weights.pt")
    for _, said in pool.run(_checked, 2, parts, partial(OddPart, missing)):
        assert said == "[Errno 2] No such file or directory: 'weights.pt'"


def _mended(rank: int, world_size: int, folder: str, backend_name: str) -> tuple[Tensor, Tensor]:
    shard, backend = _bound(backend_name, folder, rank, Communicator(dist.new_group()))
    torch.manual_seed(0)
    return shard.owned_id, distribute(SAGEConv(5, 3).double(), backend=backend)(shard.x, shard.adjacency).detach()


@backends_
@pytest.mark.parametrize("transform", [ToUndirected(), VirtualNode()], ids=lambda one: type(one).__name__)
def test_what_messages_advise_for_edges_is_exact(transform: Any, backend: str, tmp_path: Path, pool: RankPool) -> None:
    given, part = random_graph("directed")
    data = transform(Data(x=given.x, edge_index=given.edge_index))
    owner = np.append(part[2], 0)[: data.num_nodes]
    folder = tmp_path / ("replicas" if backend == "replica" else "nodes")
    write_store(data, owner, folder, num_parts=2, method="test", arguments={}, num_hops=3)
    torch.manual_seed(0)
    expected = SAGEConv(5, 3).double()(data.x, data.edge_index)
    for rows, out in pool.run(_mended, 2, str(tmp_path), backend):
        assert torch.allclose(out, expected[rows], rtol=0, atol=1e-12)


class Encodes(GCN):
    """Is called by a method of another name, as PyG's autoencoders are."""

    def encode(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.forward(x, edge_index)

    def called(self, shard: Shard) -> None:
        for _ in range(2):
            self.encode(shard.x, shard.adjacency)


def test_other_methods_than_forward_are_told(parts: str, pool: RankPool) -> None:
    (first, said), (second, other) = pool.run(_checked, 2, parts, partial(Encodes, 5, 4, num_layers=2, out_channels=3))
    assert (first, second, other) == (0, 0, "")
    assert said.count("GCNConv runs outside of a call of the model, as in model.encode(...)") == 1


class Changing(nn.Module):
    """Does something else if its configuration says so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.config = GCNConv(5, 3), SimpleNamespace(centred=False)

    def change(self) -> None:
        self.config = SimpleNamespace(centred=True)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out - out.mean(0) if self.config.centred else out


def test_a_model_is_compared_once_unless_it_changes(parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, partial(GCN, 5, 4, num_layers=2, out_channels=3), 3) == [(1, "")] * 2
    for runs, said in pool.run(_checked, 2, parts, Changing, 2):
        assert runs == 3  # the second difference is traced to its module
        assert "the first difference is in Changing.forward (by" in said


def _unlike() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return GCN(5, 4, num_layers=2, out_channels=3)


def test_ranks_with_other_parameters_are_refused(parts: str, pool: RankPool) -> None:
    for _, said in pool.run(_checked, 2, parts, _unlike):
        assert "the ranks' copies of GCN have other parameters" in said


class Nested(nn.Module):
    """The second of three modules computes over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Then(_as_it_is), Then(_centred, GCNConv(3, 3)), Then(_as_it_is, GCNConv(3, 3))])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, edge_index)
        return x


def _as_it_is(x: Tensor, _: Tensor) -> Tensor:
    return x


def _centred(x: Tensor, _: Tensor) -> Tensor:
    return x - x.mean(0)


def test_the_module_is_named_on_all_of_three_ranks(tmp_path: Path, pool: RankPool) -> None:
    data, part = random_graph("isolated")
    write_store(data, part[3], tmp_path / "nodes", num_parts=3, method="test", arguments={})
    for _, said in pool.run(_checked, 3, str(tmp_path), Nested):
        assert "Nested would train other numbers with backend 'comm' on 3 ranks" in said
        assert "the first difference is in 'blocks.1' (Then)" in said


class Outputs(nn.Module):
    """Puts out more than a row per node, or something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.kind, self.sum = pyg.GATConv(5, 3), kind, pyg.SumAggregation()

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        out: Tensor = self.conv(x, edge_index)
        outputs: dict[str, Callable[[], Any]] = {
            "some": lambda: (out, out[x[:, 0] > 0]),
            "edges": lambda: out[edge_index[1]],
            "attention": lambda: self.conv(x, edge_index, return_attention_weights=True),
            "loss": lambda: {"out": out, "loss": self.conv.lin.weight.square().sum()},
            "loss of all rows": lambda: (out, self.sum(out.square().sum(1, keepdim=True)).sum()),
            "loss of rows": lambda: {"out": out, "loss": out.square().sum()},
            "loss in a module": lambda: (out, setattr(self.conv, "loss", out.square().mean())),
            "nested": lambda: [(out, {"hidden": out.tanh()})],
            "nothing": lambda: SimpleNamespace(out=out),
            "nan": lambda: out.acos() / 0 - out.mean(0),
        }
        return outputs[self.kind]()


@pytest.mark.parametrize("kind", ["some", "edges", "attention", "loss", "loss of all rows", "nested"])
def test_outputs_of_any_kind_are_accepted(kind: str, parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, partial(Outputs, kind)) == [(1, "")] * 2


@pytest.mark.parametrize(
    ("kind", "said"), [("nothing", "its output has no tensor with a row"), ("nan", "infinite or NaN")]
)
def test_a_comparison_that_tells_nothing_is_no_comparison(kind: str, said: str, parts: str, pool: RankPool) -> None:
    (_, first), (_, second) = pool.run(_checked, 2, parts, partial(Outputs, kind))
    assert "trains without having been compared" in first
    assert said in first
    assert second == ""


def test_terms_of_a_loss_over_the_rows_of_a_rank_are_refused_or_told(parts: str, pool: RankPool) -> None:
    for _, said in pool.run(_checked, 2, parts, partial(Outputs, "loss of rows")):
        assert "the first difference is in 'output 1' (by" in said
        assert OVER_NODES in said
    (_, first), (_, second) = pool.run(_checked, 2, parts, partial(Outputs, "loss in a module"))
    assert "computes 'conv.loss' over the rows of each rank alone" in first
    assert second == ""


class OnOneRank(nn.Module):
    """Holds an iterator on the first rank alone, as a progress bar is one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bar = GCNConv(5, 3), iter([1]) if dist.get_rank() == 0 else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


def test_no_rank_compares_alone(parts: str, pool: RankPool) -> None:
    (first, said), (second, _) = pool.run(_checked, 2, parts, OnOneRank)
    assert (first, second) == (0, 0)
    assert "OnOneRank.bar is an iterator" in said


def test_parameters_are_made_before_they_are_compared(parts: str, pool: RankPool) -> None:
    assert pool.run(_checked, 2, parts, partial(GCN, -1, 4, num_layers=2, out_channels=3), 2) == [(1, "")] * 2


def _compiled(rank: int, world_size: int, folder: str) -> bool:
    shard, backend = _bound("comm", folder, rank, Communicator(dist.new_group()))
    torch.manual_seed(0)
    plain = GCN(5, 4, num_layers=2, out_channels=3).double()
    expected = distribute(copy.deepcopy(plain), backend=backend, check=False)(shard.x, shard.adjacency)
    backend.unbind()
    backend.bind(shard, Communicator(dist.new_group()))
    model = torch.compile(distribute(plain, backend=backend), backend="aot_eager")
    return torch.allclose(model(shard.x, shard.adjacency), expected)


@pytest.mark.slow
def test_a_compiled_model_is_compared(parts: str, pool: RankPool) -> None:
    assert all(pool.run(_compiled, 2, parts))


class OfThisGraph(nn.Module):
    """Runs on no graph of the size of the small one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        if edge_index.size(1) == awkward_graph(2).edge_index.size(1):
            raise ValueError("expected another graph")
        return out


def test_a_model_of_one_graph_runs_with_a_warning(parts: str, pool: RankPool) -> None:
    (_, said), (_, other) = pool.run(_checked, 2, parts, OfThisGraph)
    assert "trains without having been compared" in said
    assert "there it ends with ValueError: expected another graph (" in said
    assert other == ""


class NoisyMessages(MessagePassing):
    """Adds noise to messages in training."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return cast(Tensor, self.propagate(edge_index, x=x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j + torch.randn_like(x_j) if self.training else x_j


def test_the_check_hides_no_draws_from_a_backend(parts: str, pool: RankPool) -> None:
    """A slice of columns has noise of its own, which the backend tensor finds out by drawing twice."""
    for said in pool.run(_checked, 2, parts, partial(Then, lambda x, _: x, NoisyMessages()), 1, "tensor"):
        assert "draws random numbers in its hops while it trains" in said[1]


def _fail_on_the_small_graph(edge_index: Tensor) -> float:
    if edge_index.size(1) == awkward_graph(2).edge_index.size(1):
        raise ValueError("expected another graph")
    return 1.0


class OddInTraining(nn.Module):
    """Multiplies its rows, in training, by a number."""

    def __init__(self, number: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.conv, self.number = GCNConv(5, 3), number

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out * self.number(edge_index) if self.training else out


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (lambda _: random.random(), "training draws other random numbers each time"),
        (lambda _: np.random.rand(), "training draws other random numbers each time"),  # noqa: NPY002 (as models do)
        (_fail_on_the_small_graph, "training ends with ValueError: expected another graph ("),
    ],
)
def test_training_that_cannot_be_compared_is_told(
    number: Callable[[Tensor], float], reason: str, parts: str, pool: RankPool
) -> None:
    (_, first), (_, second) = pool.run(_checked, 2, parts, partial(OddInTraining, number))
    assert "OddInTraining was compared with one process on a small graph in evaluation alone" in first
    assert reason in first
    assert second == ""


def _unchecked(rank: int, world_size: int, folder: str) -> bool:
    shard, backend = _bound("comm", folder, rank, Communicator(dist.new_group()))
    torch.manual_seed(0)
    model = distribute(WRONG["mean"][0]().double(), backend=backend, check=False)
    return bool(model(shard.x, shard.adjacency).isfinite().all())


def test_the_check_can_be_left_out(parts: str, pool: RankPool) -> None:
    assert all(pool.run(_unchecked, 2, parts))


def test_one_process_is_its_own_reference(tmp_path: Path) -> None:
    data, part = random_graph("directed")
    write_store(data, part[1], tmp_path / "parts", num_parts=1, method="test", arguments={})
    shard, backend = Shard.load(tmp_path / "parts", 0), resolve_backend("comm")
    backend.bind(shard, Communicator())
    with mock.patch.object(checks, "run_whole", side_effect=AssertionError("nothing to compare with")):
        distribute(WRONG["mean"][0]().double(), backend=backend)(shard.x, shard.adjacency)
