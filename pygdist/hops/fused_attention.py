r"""PyG's attention layers by fused kernels: what stands for their hops once the neighbours' rows are there.

``GATConv``, ``GATv2Conv`` and ``TransformerConv`` keep their code, parameters and ``forward``; of their hops only the
part between rows in and rows out is replaced, so that no tensor of edges :math:`\times` heads :math:`\times` channels
is made. A subclass that writes its own ``message`` or ``edge_update`` keeps what it wrote.

``GATConv`` and ``GATv2Conv`` ask for the weights of the edges in one hop and use them in the next. Where nobody else
sees them, what they are made of is passed on in their place (:class:`Unweighted`), and :func:`pygdist.kernels.gat` does
the rest; or nothing is (:class:`Unscored`), and they are computed where the rows arrive. Edge attributes, dropout of
the weights in training (but for a backend that drops some of them alike on all ranks), returned weights and a
subclass's own ``forward`` need them edge by edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.aggr import SumAggregation

from pygdist.backends.base import Backend
from pygdist.graph import Adjacency
from pygdist.hops.layer import hooked, is_linear, stand_in, writes_hops
from pygdist.kernels import edge_softmax, gatv2_scores, sddmm, spmm

__all__ = [
    "UNSEEN",
    "AttentionHop",
    "TransformerParts",
    "Unscored",
    "Unweighted",
    "attends_by_piece",
    "attention_forward",
    "attention_hop",
    "defers_scores",
    "transformer_parts",
]

UNSEEN = "_weights_are_unseen"
"""Attribute of a stand-in of whose edges nobody sees the weights; see :attr:`Backend.weights_unseen`."""

AttentionHop = Callable[..., Tensor]
"""Called as ``hop(layer, adjacency, **arguments)`` with the arguments of the hop, source rows fetched."""


def attention_hop(
    layer: MessagePassing, name: str, edge_index: Tensor, arguments: Mapping[str, Any], *, unseen: bool = False
) -> AttentionHop | None:
    """The function that stands for the hop ``name`` of ``layer``; ``None`` if the layer's own has to run.

    Args:
        layer: The layer.
        name: ``propagate`` or ``edge_updater``.
        edge_index: The edges.
        arguments: Those of the hop.
        unseen: Nobody looks at what the hop returns but the layer's next one.
    """
    hop = next((hop for cls, hops in _HOPS.items() if isinstance(layer, cls) for hop in [hops.get(name)]), None)
    if hop is None or not isinstance(edge_index, Adjacency) or not _as_written(layer) or layer.explain:
        return None
    if type(layer.aggr_module) is not SumAggregation or hooked(layer):
        return None
    if unseen and hop is _gat_alpha and arguments["alpha"][1] is not None:
        return _unweighted
    edges = layer.lin_edge
    if edges is None:
        return _unseen_transformer if unseen and hop is _transformer else hop
    if isinstance(layer, GATConv):  # its code for the edges' part of the score is read as a product of two weights
        return hop if is_linear(edges) and edges.bias is None else None
    # the others add edge attributes to the rows of the sources, channel by channel; TransformerConv insists on them
    return hop if isinstance(layer, GATv2Conv) and arguments.get("edge_attr") is None else None


@dataclass(frozen=True)
class Unweighted:
    """Stands for the weights of ``GATConv``'s edges between its two hops: what they are made of.

    Backends pass it on as they pass any argument that is no row of a node.
    """

    layer: GATConv
    adjacency: Adjacency
    source: Tensor
    target: Tensor

    @property
    def dropout(self) -> float:
        """Of the weights; above 0 where the backend said that it drops some (:attr:`Backend.drops_alike`)."""
        return float(self.layer.dropout) if self.layer.training else 0.0

    def weights(self) -> Tensor:
        """One for each edge and head."""
        return _gat_alpha(self.layer, self.adjacency, alpha=(self.source, self.target), edge_attr=None)


@dataclass(frozen=True)
class Unscored:
    """Stands for the weights of ``GATv2Conv``'s edges where its rows have not arrived yet."""


def defers_scores(layer: MessagePassing, edge_index: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Whether the ``edge_updater`` of ``layer`` may return :class:`Unscored`, if its weights are unseen."""
    return isinstance(layer, GATv2Conv) and attention_hop(layer, "edge_updater", edge_index, arguments) is not None


def attends_by_piece(
    layer: MessagePassing, edge_index: Tensor, arguments: Mapping[str, Any], *, unseen: bool
) -> tuple[str, ...]:
    """The arguments whose rows ``propagate`` may read piece by piece, the last of which it sums; none if it may not."""
    transformer = isinstance(layer, TransformerConv) and unseen
    if not transformer and not isinstance(arguments.get("alpha"), (Unweighted, Unscored)):
        return ()
    if attention_hop(layer, "propagate", edge_index, arguments) is None:
        return ()
    return ("key", "value") if transformer else ("x",)


def attention_forward(base: type[MessagePassing]) -> Callable[..., Tensor | None] | None:
    """What may stand for the ``forward`` of a layer class; see :func:`~pygdist.hops.cheaper_side.cheaper_forward`."""
    own = any(issubclass(base, cls) and base.forward is cls.forward for cls in _HOPS)
    return _unseen_forward if own else None


def _unseen_forward(
    backend: Backend,
    layer: GATConv | GATv2Conv | TransformerConv,
    own: Callable[..., Tensor],
    x: Any,
    edge_index: Tensor,
    edge_attr: Tensor | None = None,
    *args: Any,
    return_attention_weights: bool | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The layer's own ``forward``, saying that its weights are only summed with."""
    # TransformerConv returns them if told True or False
    asked = return_attention_weights is not None or any(isinstance(one, bool) for one in args)
    dropped = layer.training and layer.dropout > 0 and not (isinstance(layer, GATConv) and backend.drops_alike)
    if edge_attr is not None or asked or dropped or getattr(layer, "negative_slope", 0) < 0:
        return None
    return own(stand_in(layer, **{UNSEEN: True}), x, edge_index, None, *args, **kwargs)


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
    query = query[1] if isinstance(query, (tuple, list)) else query
    key, value = (rows[0] if isinstance(rows, (tuple, list)) else rows for rows in (key, value))
    csr = adjacency.csr()
    scores = sddmm(csr, key, query, transposed=adjacency.transposed) / math.sqrt(layer.out_channels)
    layer._alpha = edge_softmax(csr, scores)  # the layer's forward returns it on request
    weights = functional.dropout(layer._alpha, p=layer.dropout, training=layer.training)
    return spmm(csr, value, weights, transposed=adjacency.transposed)


TransformerParts: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""See :func:`transformer_parts`."""


def transformer_parts(layer: MessagePassing) -> TransformerParts | None:
    """What computes the weights of ``TransformerConv``'s edges apart from their sum; ``None`` for any other layer.

    Called as ``parts(layer, adjacency, query, key, edge_attr)``, with queries ``(n, H, C)`` of the destinations and
    keys of the sources; gives the weights ``(E, H)`` of values, and what edge attributes add to the sum, ``(n, H, C)``.
    """
    written = isinstance(layer, TransformerConv) and _as_written(layer) and not layer.explain
    usual = written and type(layer.aggr_module) is SumAggregation and not hooked(layer)
    return _transformer_parts if usual else None


def _transformer_parts(
    layer: TransformerConv, adjacency: Adjacency, query: Tensor, key: Tensor, edge_attr: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    csr, edges = adjacency.csr(), None
    scores = sddmm(csr, key, query, transposed=adjacency.transposed)
    if layer.lin_edge is not None:
        edges = layer.lin_edge(edge_attr).view(-1, layer.heads, layer.out_channels)
        scores = scores + (query.index_select(0, csr.row_index()) * edges).sum(-1)
    layer._alpha = edge_softmax(csr, scores / math.sqrt(layer.out_channels))  # forward returns it on request
    weights = functional.dropout(layer._alpha, p=layer.dropout, training=layer.training)
    if edges is None:
        return weights, None
    summed = query.new_zeros(query.shape).index_add(0, csr.row_index(), edges * weights.unsqueeze(-1))
    return weights, summed


def _unseen_transformer(
    layer: TransformerConv, adjacency: Adjacency, *, query: Any, key: Any, value: Any, edge_attr: None
) -> Tensor:
    query = query[1] if isinstance(query, (tuple, list)) else query
    parts = [rows[0] if isinstance(rows, (tuple, list)) else rows for rows in (key, value)]
    return adjacency.attend_by(parts, sddmm, (query / math.sqrt(layer.out_channels),))


_HOPS: dict[type[MessagePassing], dict[str, AttentionHop]] = {
    GATConv: {"edge_updater": _gat_alpha, "propagate": _weighted_sum},
    GATv2Conv: {"edge_updater": _gatv2_alpha, "propagate": _weighted_sum},
    TransformerConv: {"propagate": _transformer},
}


def _as_written(layer: MessagePassing) -> bool:
    """Whether message, aggregation and update are those of PyG's layer."""
    cls = next(cls for cls in _HOPS if isinstance(layer, cls))
    names = ("message", "edge_update", "aggregate", "update", "message_and_aggregate")
    own = all(getattr(type(layer), name) is getattr(cls, name) for name in names) and not writes_hops(type(layer))
    return own and not set(names) & vars(layer).keys()
