"""The layers of the exactness suite, by name: each entry makes a small model of unmodified PyG layers.

A model is called as ``model(x, edge_index)``, and with ``edge_weight``, ``edge_attr`` and ``edge_type`` if it takes
them. The documentation's list of supported layers is generated from :data:`LAYERS`, and a test checks it.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data

__all__ = ["HIDDEN", "LAYERS", "LayerCase", "build"]

HIDDEN = 6  # width of rows between layers


@dataclass(frozen=True)
class LayerCase:
    """One entry of the suite: a PyG class, and ``make(in_channels, out_channels)`` for a layer or a model of it."""

    layer: type[nn.Module]
    make: Callable[[int, int], nn.Module]
    note: str = ""  # a limit that users should know; printed in the list of supported layers
    takes: tuple[str, ...] = ()  # inputs of the layer's forward: edge_weight, edge_attr, edge_type, x_0
    whole: bool = False  # `make` returns a whole model, not one layer to be stacked


class Stack(nn.Module):
    """Layers with a non-linearity between them; each layer gets the edge inputs that it takes."""

    def __init__(
        self, case: LayerCase, in_channels: int, out_channels: int, *, num_layers: int, hidden_channels: int
    ) -> None:
        super().__init__()
        self.takes = case.takes
        self.lin_in: nn.Module = nn.Identity()
        self.lin_out: nn.Module = nn.Identity()
        if "x_0" in case.takes:  # layers that mix in the first features keep one width
            self.lin_in = nn.Linear(in_channels, hidden_channels)
            self.lin_out = nn.Linear(hidden_channels, out_channels)
            in_channels = out_channels = hidden_channels
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.layers = nn.ModuleList(case.make(one, other) for one, other in itertools.pairwise(widths))

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
    ) -> Tensor:
        inputs = {"edge_weight": edge_weight, "edge_attr": edge_attr, "edge_type": edge_type}
        extra = {name: inputs[name] for name in self.takes if name in inputs}
        x = self.lin_in(x)
        first = (x,) if "x_0" in self.takes else ()
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else x.tanh(), *first, edge_index, **extra)
        return self.lin_out(x)


class Around(nn.Module):
    """A layer with equal input and output width, between two linear maps."""

    def __init__(self, layer: nn.Module, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin_in, self.layer = nn.Linear(in_channels, in_channels), layer
        self.lin_out = nn.LazyLinear(out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, **extra: Tensor) -> Tensor:
        return self.lin_out(self.layer(self.lin_in(x), edge_index, **extra))


class Twice(nn.Module):
    """One layer used twice in a forward pass, with a skip connection."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(in_channels, HIDDEN), pyg.SAGEConv(HIDDEN, HIDDEN)
        self.jump, self.out = pyg.JumpingKnowledge("cat"), nn.Linear(3 * HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, **_: Tensor) -> Tensor:
        first = self.lin(x)
        second = self.conv(first, edge_index).tanh()
        return self.out(self.jump([first, second, self.conv(second, edge_index)]))


class Detached(nn.Module):
    """One layer that runs on the same rows twice, first without gradient."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin, self.conv = nn.Linear(in_channels, HIDDEN), pyg.SAGEConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.lin(x)
        with torch.no_grad():
            target: Tensor = self.conv(hidden, edge_index)
        return self.conv(hidden, edge_index) + target


class OfData(nn.Module):
    """A model as in PyG's tutorials, whose ``forward`` takes the whole ``Data``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.GCNConv(in_channels, HIDDEN), pyg.GATConv(HIDDEN, out_channels)

    def forward(self, data: Data) -> Tensor:
        x = self.conv1(data.x, data.edge_index, data.edge_weight).relu()
        return self.conv2(x, data.edge_index) / data.x.size(1)


class Dna(nn.Module):
    """Dynamic neighbourhood aggregation, whose input has a dimension of layers between nodes and channels."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin_in, self.conv = nn.Linear(in_channels, 8), pyg.DNAConv(8, heads=2)
        self.lin_out = nn.Linear(8, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, **_: Tensor) -> Tensor:
        first = self.lin_in(x)
        second = self.conv(first[:, None], edge_index, edge_weight)
        return self.lin_out(self.conv(torch.stack([first, second], dim=1), edge_index, edge_weight))


class Normed(nn.Module):
    """SAGE with a norm over all nodes between the layers."""

    def __init__(self, norm: Callable[[int], nn.Module], in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.norm = pyg.SAGEConv(in_channels, HIDDEN), norm(HIDDEN)
        self.second = pyg.SAGEConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, **_: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x, edge_index)).tanh(), edge_index)


class Cached(nn.Module):
    """A layer that keeps the results of its hops, followed by a layer that does not."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.second = pyg.SGConv(in_channels, HIDDEN, K=2, cached=True), pyg.SAGEConv(HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index)


class Placed(nn.Module):
    """Two layers that read the positions and normals of nodes, which are computed from the input."""

    def __init__(self, make: Callable[[int, int], nn.Module], in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(in_channels, HIDDEN), nn.Linear(HIDDEN, out_channels)
        self.first, self.second = make(HIDDEN, HIDDEN), make(HIDDEN, HIDDEN)
        takes_normals = isinstance(self.first, pyg.PPFConv)
        self.places = nn.ModuleList(nn.Linear(in_channels, 3) for _ in range(1 + takes_normals))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden, places = self.lin(x), [place(x) for place in self.places]
        for layer in (self.first, self.second):
            hidden = layer(hidden, *places, edge_index).tanh()
        return self.out(hidden)


class Typed(nn.Module):
    """A layer or norm that takes a type of each node, the sign of its first feature."""

    def __init__(self, make: Callable[[int], nn.Module], in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first, self.typed = pyg.SAGEConv(in_channels, HIDDEN), make(HIDDEN)
        self.last = pyg.SAGEConv(HIDDEN, out_channels)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None, edge_type: Tensor | None = None
    ) -> Tensor:
        types, hidden = (x[:, 0] > 0).long(), self.first(x, edge_index)
        if isinstance(self.typed, pyg.HEATConv):
            hidden = self.typed(hidden, edge_index, types, edge_type, edge_attr)
        else:
            hidden = self.typed(hidden, types)
        return self.last(hidden.tanh(), edge_index)


class Signed(nn.Module):
    """Layers for two sets of edges, which get the same set twice."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = pyg.SignedConv(in_channels, HIDDEN, first_aggr=True)
        self.second = pyg.SignedConv(HIDDEN, HIDDEN, first_aggr=False)
        self.lin = nn.Linear(2 * HIDDEN, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.first(x, edge_index, edge_index).tanh()
        return self.lin(self.second(hidden, edge_index, edge_index))


class Uneven(pyg.SAGEConv):
    """Source rows that are wider than destination rows."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__((in_channels, -(-in_channels // 2)), out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward((x, x[:, ::2]), edge_index)


class ScaledCheb(pyg.ChebConv):
    """``ChebConv`` with a given largest eigenvalue."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index, lambda_max=2.5)


class LearnedCheb(nn.Module):
    """``ChebConv`` that learns the weights of edges."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight, self.conv = nn.Linear(4, 1), pyg.ChebConv(in_channels, out_channels, K=2)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, self.weight(edge_attr).sigmoid().view(-1))


class ByChannel(nn.InstanceNorm1d):
    """A norm that takes rows as channels of one image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t()[None])[0].t()


class Smoothed(nn.Module):
    """A layer whose output is smoothed along edges."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv, self.smooth = pyg.SAGEConv(in_channels, out_channels), pyg.LabelPropagation(num_layers=2, alpha=0.6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = self.conv(x, edge_index)
        return out + self.smooth(out.softmax(dim=-1), edge_index)


class DerivedGCN(pyg.GCNConv):
    """A user's subclass whose ``forward`` calls the parent's."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return 0.5 * super().forward(x, edge_index, edge_weight)


def _mlp(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(in_channels, out_channels), nn.Tanh(), nn.Linear(out_channels, out_channels))


def _case(
    layer: type[nn.Module],
    *takes: str,
    note: str = "",
    make: Callable[[int, int], nn.Module] | None = None,
    around: Callable[[int], nn.Module] | None = None,
    whole: bool = False,
    **arguments: Any,
) -> LayerCase:
    """Make a case from the layer's class and arguments, from ``make``, or from a layer of constant width ``around``."""
    if around is not None:
        return LayerCase(layer, lambda i, o: Around(around(i), i, o), note, takes, whole)
    return LayerCase(layer, make or partial(layer, **arguments), note, takes, whole)


def _pna(in_channels: int, out_channels: int) -> nn.Module:
    histogram = torch.tensor([3, 5, 8, 6, 4, 2, 1])
    scalers = ["identity", "amplification", "attenuation"]
    return pyg.PNAConv(in_channels, out_channels, ["mean", "min", "max", "std"], scalers, histogram, edge_dim=4)


def _patches(in_channels: int, out_channels: int) -> nn.Module:
    return pyg.SAGEConv(
        in_channels, out_channels, aggr=pyg.aggr.PatchTransformerAggregation(in_channels, in_channels, 2, 4, heads=1)
    )


def _placed(layer: type[nn.Module], make: Callable[[int, int], nn.Module]) -> LayerCase:
    return LayerCase(
        layer, partial(Placed, make), "positions of nodes are an argument beside x, or columns of x", whole=True
    )


def _typed(layer: type[nn.Module], make: Callable[[int], nn.Module], *takes: str) -> LayerCase:
    return LayerCase(layer, partial(Typed, make), takes=takes, whole=True)


def _norm(norm: type[nn.Module], *, sized: bool = True, **arguments: Any) -> LayerCase:
    """Make a case with a norm whose first argument is the width of rows, if it is ``sized``."""
    return LayerCase(norm, partial(Normed, lambda width: norm(*(width,) * sized, **arguments)), whole=True)


_WEIGHT, _ATTR, _TYPE = "edge_weight", "edge_attr", "edge_type"

#: Cases by name: the PyG class, and after a dash the option that makes it another case.
LAYERS: dict[str, LayerCase] = {
    "AGNNConv": _case(pyg.AGNNConv, around=lambda _: pyg.AGNNConv()),
    "APPNP": _case(pyg.APPNP, _WEIGHT, around=lambda _: pyg.APPNP(K=3, alpha=0.2)),
    "ARMAConv": _case(pyg.ARMAConv, _WEIGHT, num_stacks=2, num_layers=2),
    "AntiSymmetricConv": _case(pyg.AntiSymmetricConv, around=pyg.AntiSymmetricConv),
    "CGConv": _case(pyg.CGConv, _ATTR, around=lambda width: pyg.CGConv(width, dim=4)),
    "ChebConv": _case(pyg.ChebConv, _WEIGHT, K=3, note="exchanges degrees and the largest entry of the Laplacian"),
    "ChebConv-learned": _case(pyg.ChebConv, _ATTR, make=LearnedCheb),
    "ChebConv-unnormalised": _case(pyg.ChebConv, K=2, normalization=None),
    "ChebConv-scaled": _case(pyg.ChebConv, make=lambda i, o: ScaledCheb(i, o, K=3, normalization="rw")),
    "ClusterGCNConv": _case(pyg.ClusterGCNConv, diag_lambda=0.3),
    "DNAConv": _case(
        pyg.DNAConv, _WEIGHT, make=lambda i, o: Dna(i, o), whole=True, note="x holds the rows of all earlier layers"
    ),
    "EGConv": _case(pyg.EGConv, around=lambda width: pyg.EGConv(width, 8, ["symnorm", "mean", "max"], num_heads=2)),
    "EGConv-std": _case(
        pyg.EGConv,
        around=lambda width: pyg.EGConv(width, 6, ["std", "var", "min"], num_heads=3, add_self_loops=False),
        note="adds self-loops only if symnorm is among its aggregators",
    ),
    "EdgeConv": _case(pyg.EdgeConv, make=lambda i, o: pyg.EdgeConv(_mlp(2 * i, o), aggr="max")),
    "FAConv": _case(pyg.FAConv, "x_0", make=lambda i, o: pyg.FAConv(i)),
    "FastRGCNConv": _case(pyg.FastRGCNConv, _TYPE, num_relations=2),
    "FeaStConv": _case(pyg.FeaStConv, heads=2),
    "FiLMConv": _case(pyg.FiLMConv),
    "GATConv": _case(pyg.GATConv, note="attention dropout draws its own numbers on each rank"),
    "GATConv-edges": _case(pyg.GATConv, _ATTR, heads=3, concat=False, edge_dim=4),
    "GATv2Conv": _case(pyg.GATv2Conv, heads=2, concat=False, note="attention dropout as GATConv"),
    "GATv2Conv-edges": _case(pyg.GATv2Conv, _ATTR, edge_dim=4),
    "GCN2Conv": _case(pyg.GCN2Conv, "x_0", _WEIGHT, make=lambda i, o: pyg.GCN2Conv(i, 0.1, 0.5, layer=1)),
    "GCNConv": _case(pyg.GCNConv, _WEIGHT, note="degrees of the whole graph, exchanged once"),
    "GCNConv-cached": _case(pyg.GCNConv, cached=True),
    "GCNConv-data": _case(pyg.GCNConv, _WEIGHT, make=OfData, whole=True),
    "GCNConv-derived": _case(pyg.GCNConv, _WEIGHT, make=DerivedGCN),
    "GCNConv-improved": _case(pyg.GCNConv, _WEIGHT, improved=True),
    "GCNConv-no-loops": _case(pyg.GCNConv, add_self_loops=False),
    "GENConv": _case(pyg.GENConv, _ATTR, edge_dim=4, aggr="softmax", learn_t=True),
    "GINConv": _case(pyg.GINConv, make=lambda i, o: pyg.GINConv(_mlp(i, o), train_eps=True)),
    "GINEConv": _case(pyg.GINEConv, _ATTR, make=lambda i, o: pyg.GINEConv(_mlp(i, o), edge_dim=4)),
    "GMMConv": _case(pyg.GMMConv, _ATTR, dim=4, kernel_size=2),
    "GatedGraphConv": _case(pyg.GatedGraphConv, _WEIGHT, around=lambda width: pyg.GatedGraphConv(width, num_layers=2)),
    "GeneralConv": _case(pyg.GeneralConv, _ATTR, in_edge_channels=4, attention=True),
    "GraphConv": _case(pyg.GraphConv, _WEIGHT),
    "GraphConv-max": _case(pyg.GraphConv, _WEIGHT, aggr="max"),
    "HEATConv": _typed(pyg.HEATConv, lambda width: pyg.HEATConv(width, 3, 2, 2, 3, 4, 5, heads=2), _TYPE, _ATTR),
    "LEConv": _case(pyg.LEConv, _WEIGHT),
    "LabelPropagation": _case(
        pyg.LabelPropagation, make=Smoothed, whole=True, note="is called after training; not with replica"
    ),
    "LGConv": _case(pyg.LGConv, _WEIGHT, around=lambda _: pyg.LGConv()),
    "MFConv": _case(pyg.MFConv, max_degree=4),
    "MixHopConv": _case(pyg.MixHopConv, _WEIGHT, around=lambda width: pyg.MixHopConv(width, 4)),
    "NNConv": _case(pyg.NNConv, _ATTR, make=lambda i, o: pyg.NNConv(i, o, nn.Linear(4, i * o), aggr="mean")),
    "PDNConv": _case(pyg.PDNConv, _ATTR, edge_dim=4, hidden_channels=5),
    "PNAConv": _case(pyg.PNAConv, _ATTR, make=_pna),
    "PPFConv": _placed(pyg.PPFConv, lambda i, o: pyg.PPFConv(_mlp(i + 4, o), _mlp(o, o))),
    "PointGNNConv": _placed(pyg.PointGNNConv, lambda i, o: pyg.PointGNNConv(_mlp(i, 3), _mlp(i + 3, o), _mlp(o, o))),
    "PointNetConv": _placed(pyg.PointNetConv, lambda i, o: pyg.PointNetConv(_mlp(i + 3, o))),
    "PointTransformerConv": _placed(pyg.PointTransformerConv, pyg.PointTransformerConv),
    "RGATConv": _case(pyg.RGATConv, _TYPE, num_relations=2),
    "RGCNConv": _case(pyg.RGCNConv, _TYPE, num_relations=2, note="sources and targets are one set of nodes"),
    "ResGatedGraphConv": _case(pyg.ResGatedGraphConv, _ATTR, edge_dim=4),
    "SAGEConv-detached": _case(pyg.SAGEConv, make=Detached, whole=True),
    "SAGEConv-jk": _case(pyg.SAGEConv, make=Twice, whole=True),
    "SAGEConv-lstm": _case(pyg.SAGEConv, aggr="lstm", note="lstm: edges sorted by destination, as PyG asks"),
    "SAGEConv-many": _case(pyg.SAGEConv, aggr=["mean", "max", "std"], project=True),
    "SAGEConv-max": _case(pyg.SAGEConv, aggr="max"),
    "SAGEConv-mean": _case(pyg.SAGEConv),
    "SAGEConv-median": _case(pyg.SAGEConv, aggr=["median", "mean"]),
    "SAGEConv-min": _case(pyg.SAGEConv, aggr="min"),
    "SAGEConv-patches": _case(pyg.SAGEConv, make=_patches),
    "SAGEConv-softmax": _case(pyg.SAGEConv, aggr="softmax", aggr_kwargs={"learn": True}),
    "SAGEConv-uneven": _case(pyg.SAGEConv, make=Uneven),
    "SGConv": _case(pyg.SGConv, _WEIGHT, K=2),
    "SGConv-cached": _case(pyg.SGConv, make=lambda i, o: Cached(i, o), whole=True),
    "SSGConv": _case(pyg.SSGConv, _WEIGHT, alpha=0.1, K=2),
    "SignedConv": _case(pyg.SignedConv, make=Signed, whole=True),
    "SimpleConv": _case(pyg.SimpleConv, _WEIGHT, around=lambda _: pyg.SimpleConv("sum")),
    "TAGConv": _case(pyg.TAGConv, _WEIGHT, K=2),
    "TransformerConv": _case(pyg.TransformerConv, _ATTR, heads=2, concat=False, edge_dim=4, beta=True),
    "WLConvContinuous": _case(pyg.WLConvContinuous, _WEIGHT, around=lambda _: pyg.WLConvContinuous()),
    # norms over nodes, between two SAGE layers
    "BatchNorm": _norm(pyg.BatchNorm),
    "BatchNorm1d": _norm(nn.BatchNorm1d),
    "DiffGroupNorm": _norm(pyg.DiffGroupNorm, groups=2),
    "GraphNorm": _norm(pyg.GraphNorm),
    "GraphSizeNorm": _norm(pyg.GraphSizeNorm, sized=False),
    "HeteroBatchNorm": _typed(pyg.HeteroBatchNorm, lambda width: pyg.HeteroBatchNorm(width, 3)),
    "HeteroLayerNorm": _typed(pyg.HeteroLayerNorm, lambda width: pyg.HeteroLayerNorm(width, 2)),
    "InstanceNorm": _norm(pyg.InstanceNorm, affine=True, track_running_stats=True),
    "InstanceNorm1d": _norm(nn.InstanceNorm1d),
    "InstanceNorm1d-channels": LayerCase(
        nn.InstanceNorm1d, partial(Normed, partial(ByChannel, affine=True, track_running_stats=True)), whole=True
    ),
    "LayerNorm-graph": _norm(pyg.LayerNorm, mode="graph"),
    "MeanSubtractionNorm": _norm(pyg.MeanSubtractionNorm, sized=False),
    "PairNorm": _norm(pyg.PairNorm, sized=False),
    "PairNorm-rows": _norm(pyg.PairNorm, sized=False, scale_individually=True),
}


def build(
    name: str, in_channels: int, out_channels: int, *, num_layers: int = 2, hidden_channels: int = HIDDEN, seed: int = 0
) -> nn.Module:
    """Make the model of one case in float64, with parameters drawn from ``seed``.

    It is called as ``model(x, edge_index, edge_weight=..., edge_attr=...)`` and returns ``(n, out_channels)``. Cases
    that are whole models ignore ``num_layers`` and ``hidden_channels``.
    """
    case = LAYERS[name]
    torch.manual_seed(seed)
    make = case.make if case.whole else partial(Stack, case, num_layers=num_layers, hidden_channels=hidden_channels)
    model = make(in_channels, out_channels).double()
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in model.parameters()):
        x, attr = torch.zeros(2, in_channels, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
        with torch.no_grad():
            model(x, torch.tensor([[0, 1], [0, 1]]), edge_weight=attr[:, 0], edge_attr=attr)
    with torch.no_grad():
        # zero biases would hide a bias that is added twice, and some layers leave parameters uninitialised
        for parameter in model.parameters():
            wide = max(parameter.shape, default=1) if parameter.dim() > 1 else 1
            parameter.normal_(0.0, min(0.4, wide**-0.5))  # wide products would grow until rounding exceeds 1e-10
    return model
