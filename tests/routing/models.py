"""Models that the check before the first pass must refuse, and models that it must accept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import GCN, GCNConv, MessagePassing, SAGEConv, global_add_pool, global_mean_pool
from torch_geometric.transforms import VirtualNode
from torch_geometric.utils import degree, dropout_edge, scatter, to_undirected
from typing_extensions import override

from pygdist.nn.decoupled import decouple
from pygdist.nn.ngnn import NGNN
from pygdist.routing import causes, edges
from pygdist.testing import LAYERS
from pygdist.testing.layers import build

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
