r"""Shortcut ``fused_attention``: kernels that stand for the hops of PyG's attention layers.

``GATConv``, ``GATv2Conv`` and ``TransformerConv`` keep their code, parameters and ``forward``. Of their hops, only the
part between rows in and rows out is replaced, so that no tensor of edges :math:`\times` heads :math:`\times` channels
is made. A subclass that writes its own ``message`` or ``edge_update`` keeps what it wrote.

``GATConv`` and ``GATv2Conv`` compute the weights of the edges in one hop (``edge_updater``) and use them in the next
(``propagate``). If nothing else reads the weights, the first hop returns a :class:`~pygdist.hops.hop.Deferred` in their
place: :class:`Unweighted` holds what the weights are made of, and :func:`pygdist.kernels.gat` computes them as it sums;
:class:`Unscored` holds nothing, as the rows that the scores need have not arrived. Edge attributes, dropout of the
weights in training (unless all ranks drop the same ones), returned weights and a subclass's own ``forward`` need the
weights edge by edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.aggr import SumAggregation

from pygdist.graph import Adjacency
from pygdist.hops.hop import Deferred, Hop, Kernel, source_of, target_of
from pygdist.hops.host import Host
from pygdist.hops.layer import aggregation_of, hooked, is_linear, stand_in, writes_hops
from pygdist.kernels import edge_softmax, gatv2_scores, sddmm, spmm

UNSEEN = "_weights_are_unseen"
"""Attribute of a stand-in whose edge weights nothing but its sum reads; see :attr:`Hop.weights_unseen`."""


def attention_kernel(hop: Hop) -> Kernel | None:
    """Return the kernel that stands for ``hop``; ``None`` if the layer's own code has to run."""
    layer = hop.layer
    kernel = next((kernels.get(hop.name) for cls, kernels in _KERNELS.items() if isinstance(layer, cls)), None)
    if kernel is None or not isinstance(hop.edge_index, Adjacency) or not _as_written(layer) or layer.explain:
        return None
    if aggregation_of(layer) is not SumAggregation or hooked(layer):
        return None
    if hop.weights_unseen and kernel is _gat_alpha and target_of(hop.arguments["alpha"]) is not None:
        return _unweighted
    edges = layer.lin_edge
    if edges is None and hop.arguments.get("edge_attr") is not None and not isinstance(layer, GATConv):
        return None  # TransformerConv adds the attributes to the rows as they are, and GATv2Conv refuses them
    if edges is None:
        return _unseen_transformer if hop.weights_unseen and kernel is _transformer else kernel
    if isinstance(layer, GATConv):  # the kernel reads the edges' part of the score as a product of two weights
        return kernel if is_linear(edges) and edges.bias is None else None
    # the others add edge attributes to the rows of the sources, channel by channel; TransformerConv insists on them
    return kernel if isinstance(layer, GATv2Conv) and hop.arguments.get("edge_attr") is None else None


@dataclass(frozen=True)
class Unweighted(Deferred):
    """Weights of ``GATConv``'s edges that are not computed yet: the scores that they are made of.

    Backends pass it on as they pass any argument that holds no rows of nodes.
    """

    layer: GATConv
    adjacency: Adjacency
    source: Tensor
    target: Tensor

    @property
    def dropout(self) -> float:
        """Probability of dropping a weight; above 0 only if all ranks drop the same (:attr:`Backend.drops_alike`)."""
        return float(self.layer.dropout) if self.layer.training else 0.0

    def weights(self) -> Tensor:
        """Compute the weights, ``(E, H)``."""
        return _gat_alpha(self.layer, self.adjacency, alpha=(self.source, self.target), edge_attr=None)


@dataclass(frozen=True)
class Unscored(Deferred):
    """Weights of ``GATv2Conv``'s edges whose scores wait for the rows to arrive."""


def defers_scores(hop: Hop) -> bool:
    """True if this ``edge_updater`` may return :class:`Unscored`."""
    return hop.weights_unseen and isinstance(hop.layer, GATv2Conv) and hop.kernel is not None


def summed_as_they_arrive(hop: Hop) -> tuple[str, ...]:
    """Names of the arguments whose rows this attention ``propagate`` can take piece by piece; the last one is summed.

    Empty if the hop needs all rows at once.
    """
    transformer = isinstance(hop.layer, TransformerConv) and hop.weights_unseen
    if not transformer and not isinstance(hop.arguments.get("alpha"), Deferred):
        return ()
    if hop.kernel is None:
        return ()
    return ("key", "value") if transformer else ("x",)


def attention_forward(base: type[MessagePassing]) -> Callable[..., Tensor | None] | None:
    """Return a substitute for the ``forward`` of a layer class, as :mod:`pygdist.hops.cheaper_side` does."""
    unchanged = any(issubclass(base, cls) and base.forward is cls.forward for cls in _KERNELS)
    return _unseen_forward if unchanged else None


def _unseen_forward(
    host: Host,
    layer: GATConv | GATv2Conv | TransformerConv,
    forward: Callable[..., Tensor],
    x: Any,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    *args: Any,
    return_attention_weights: bool | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Run the layer's ``forward`` on a stand-in whose weights are unseen; ``None`` if something reads them."""
    # TransformerConv returns them if told True or False
    asked = return_attention_weights is not None or any(isinstance(one, bool) for one in args)
    dropped = layer.training and layer.dropout > 0 and not (isinstance(layer, GATConv) and host.drops_alike)
    if edge_attr is not None or asked or dropped or getattr(layer, "negative_slope", 0) < 0:
        return None
    return forward(stand_in(layer, **{UNSEEN: True}), x, edge_index, None, *args, **kwargs)


def _unweighted(layer: GATConv, adjacency: Adjacency, *, alpha: tuple[Tensor, Tensor], edge_attr: None) -> Any:
    return Unweighted(layer, adjacency, *alpha)


def _gat_alpha(layer: GATConv, adjacency: Adjacency, *, alpha: Any, edge_attr: Tensor | None) -> Tensor:
    source, target = alpha
    dtype, score = source.dtype, None
    if edge_attr is not None and layer.lin_edge is not None:
        # <W e, a> = <e, W^T a>: the edge's part of the score without its channels
        edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        weight = layer.lin_edge.weight.view(layer.heads, layer.out_channels, -1)
        score = edge_attr @ (weight * layer.att_edge.view(layer.heads, -1, 1)).sum(dim=1).t()
        dtype = torch.promote_types(dtype, score.dtype)  # they differ under autocast
        source, target, score = (part if part is None else part.to(dtype) for part in (source, target, score))
    weights = edge_softmax(
        adjacency.csr(),
        score,
        source=source,
        target=target,
        negative_slope=layer.negative_slope,
        transposed=adjacency.transposed,
    )
    return functional.dropout(weights, p=layer.dropout, training=layer.training)


def _gatv2_alpha(layer: GATv2Conv, adjacency: Adjacency, *, x: Any, edge_attr: None) -> Tensor:
    dtype = torch.promote_types(x[0].dtype, layer.att.dtype)  # they differ under autocast
    scores = gatv2_scores(
        adjacency.csr(),
        x[0].to(dtype),
        x[1].to(dtype),
        layer.att.squeeze(0).to(dtype),
        negative_slope=layer.negative_slope,
        transposed=adjacency.transposed,
    )
    return functional.dropout(edge_softmax(adjacency.csr(), scores), p=layer.dropout, training=layer.training)


def _weighted_sum(
    layer: GATConv | GATv2Conv, adjacency: Adjacency, *, x: Any, alpha: Tensor | Unweighted | Unscored
) -> Tensor:
    if isinstance(alpha, Unscored):
        dtype = torch.promote_types(x[0].dtype, layer.att.dtype)
        score = partial(gatv2_scores, negative_slope=layer.negative_slope)
        return adjacency.attend_by([x[0].to(dtype)], score, (x[1].to(dtype), layer.att.squeeze(0).to(dtype)))
    if isinstance(alpha, Unweighted):
        assert alpha.dropout == 0, "the kernel drops nothing"
        dtype = torch.promote_types(x[0].dtype, alpha.source.dtype)  # they differ under autocast
        rows = (x[0].to(dtype), alpha.source.to(dtype), alpha.target.to(dtype))
        out = adjacency.attend(*rows, layer.negative_slope)
        # the backward pass needs the result, which the next step of a model may overwrite
        last = layer.concat and layer.bias is None and layer.res is None
        return out.clone() if last and out.requires_grad else out
    return spmm(adjacency.csr(), x[0], alpha, transposed=adjacency.transposed)


def _transformer(
    layer: TransformerConv, adjacency: Adjacency, *, query: Any, key: Any, value: Any, edge_attr: None
) -> Tensor:
    weights, _ = _transformer_parts(layer, adjacency, target_of(query), source_of(key), edge_attr)
    return spmm(adjacency.csr(), source_of(value), weights, transposed=adjacency.transposed)


TransformerParts: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""See :func:`transformer_parts`."""


def transformer_parts(layer: MessagePassing) -> TransformerParts | None:
    """Return a function that computes the weights of ``TransformerConv``'s edges, apart from the sum that uses them.

    It is called as ``parts(layer, adjacency, query, key, edge_attr)``, with queries ``(n, H, C)`` of the destinations
    and keys of the sources. It returns the weights ``(E, H)``, and the contribution of edge attributes to the sum,
    ``(n, H, C)``. ``None`` for any other layer.
    """
    if not isinstance(layer, TransformerConv) or not _as_written(layer) or layer.explain:
        return None
    return _transformer_parts if aggregation_of(layer) is SumAggregation and not hooked(layer) else None


def _transformer_parts(
    layer: TransformerConv, adjacency: Adjacency, query: Tensor, key: Tensor, edge_attr: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    csr, edges = adjacency.csr(), edge_attr
    scores = sddmm(csr, key, query, transposed=adjacency.transposed)
    if layer.lin_edge is not None:
        edges = layer.lin_edge(edge_attr).view(-1, layer.heads, layer.out_channels)
        scores = scores + (query.index_select(0, csr.row_index()) * edges).sum(-1)
    layer._alpha = edge_softmax(csr, scores / math.sqrt(layer.out_channels))  # forward returns it on request
    weights = functional.dropout(layer._alpha, p=layer.dropout, training=layer.training)
    if edges is None:
        return weights, None
    of_edges = torch.broadcast_to(edges * weights.unsqueeze(-1), (edges.size(0), *query.shape[1:]))
    summed = query.new_zeros(query.shape).index_add(0, csr.row_index(), of_edges)
    return weights, summed


def _unseen_transformer(
    layer: TransformerConv, adjacency: Adjacency, *, query: Any, key: Any, value: Any, edge_attr: None
) -> Tensor:
    scaled = target_of(query) / math.sqrt(layer.out_channels)
    return adjacency.attend_by([source_of(key), source_of(value)], sddmm, (scaled,))


_KERNELS: dict[type[MessagePassing], dict[str, Kernel]] = {
    GATConv: {"edge_updater": _gat_alpha, "propagate": _weighted_sum},
    GATv2Conv: {"edge_updater": _gatv2_alpha, "propagate": _weighted_sum},
    TransformerConv: {"propagate": _transformer},
}


def _as_written(layer: MessagePassing) -> bool:
    """True if message, aggregation and update are those of PyG's layer."""
    cls = next(cls for cls in _KERNELS if isinstance(layer, cls))
    names = ("message", "edge_update", "aggregate", "update", "message_and_aggregate")
    unchanged = all(getattr(type(layer), name) is getattr(cls, name) for name in names)
    return unchanged and not writes_hops(type(layer)) and not set(names) & vars(layer).keys()
