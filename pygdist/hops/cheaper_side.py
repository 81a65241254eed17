r"""Shortcut ``cheaper_side``: as :math:`(A X) W = A (X W)`, a layer aggregates on the narrower side of its weight.

PyG fixes the order in each layer. Here a layer aggregates its input rows if these are fixed (the result is kept, see
:mod:`pygdist.hops.first_hop`) or narrower than their product with the weight; otherwise it aggregates the product. Rows
that need no gradient count half in training: their sum has no backward pass, and its gradients no exchange. Either way
the layer's own ``forward`` runs, on a stand-in without the weight, which is applied before or after. ``TAGConv`` and
``ARMAConv`` interleave weights and hops, so their ``forward`` is written out here.

===================================  ====================  ============================================
layer                                PyG aggregates        here, where it is cheaper
===================================  ====================  ============================================
``GCNConv``                          the product           the rows
``SGConv``                           the rows, K times     the product, K times
``TAGConv``                          the rows, K times     the products, by Horner's scheme, K times
``ARMAConv``                         one product a stack   the rows, once for all stacks of the first hop
``SAGEConv``, ``GraphConv``          the rows              the product, if messages are summed or averaged
``GINConv``                          the rows              the product with the first weight of its network
===================================  ====================  ============================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import MLP, ARMAConv, GCNConv, GINConv, GraphConv, MessagePassing, SAGEConv, SGConv, TAGConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from pygdist.graph import Adjacency
from pygdist.hops.kept import Kept
from pygdist.hops.layer import CACHES, aggregation_of, hooked, is_changed, is_linear, stand_in

Forward = Callable[..., Tensor]


def cheaper_forward(base: type[MessagePassing]) -> Callable[..., Tensor | None] | None:
    """Return a substitute for the ``forward`` of a layer class; ``None`` if it is not one of the layers above.

    Returns:
        A function of what the backend keeps, the layer, its own ``forward``, the rows, the edges and the other
        arguments. It returns ``None`` where the layer's own order is the cheaper one.
    """
    for cls, way in _WAYS.items():
        # a subclass that writes any of these may do other things with the rows
        names = ("forward", "message", "message_and_aggregate", "aggregate", "update")
        if issubclass(base, cls) and all(getattr(base, name) is getattr(cls, name) for name in names):
            return partial(_where_usable, way)
    return None


def _where_usable(
    way: Callable[..., Tensor | None],
    kept: Kept,
    layer: MessagePassing,
    forward: Forward,
    x: Any,
    edge_index: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor | None:
    if not (kept.host.savings.cheaper_side and _usable(layer, x, edge_index)):
        return None
    if not isinstance(x, Tensor) and way not in _TAKE_PAIRS:
        return None
    return way(kept, layer, forward, x, edge_index, *args, **kwargs)


def _gcn(
    kept: Kept, layer: GCNConv, forward: Forward, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor | None:
    if layer.lin.bias is not None or not _rows_are_cheaper(kept, layer, x, layer.out_channels, edge_weight):
        return None
    twin = stand_in(layer, lin=nn.Identity(), bias=None)
    out = forward(twin, x, edge_index, edge_weight)
    for name in CACHES:  # with cached=True, as PyG would
        if hasattr(layer, name):
            setattr(layer, name, getattr(twin, name))
    return _plus(layer.lin(out), layer.bias)


def _sg(
    kept: Kept, layer: SGConv, forward: Forward, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor | None:
    if layer.cached or not _product_is_cheaper(kept, layer, x, layer.out_channels, edge_weight):
        return None
    product = functional.linear(x, layer.lin.weight)
    return sg_of_product(layer, forward, product, edge_index, edge_weight)


def sg_of_product(
    layer: SGConv, forward: Forward, product: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor:
    """Return the output of a layer from the products of its rows with its weight."""
    return forward(stand_in(layer, lin=partial(_plus, bias=layer.lin.bias)), product, edge_index, edge_weight)


def _tag(
    kept: Kept, layer: TAGConv, forward: Forward, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor | None:
    if not _product_is_cheaper(kept, layer, x, layer.out_channels, edge_weight):
        return None
    if any(lin.bias is not None for lin in layer.lins):
        return None
    return tag_of_products(kept, layer, (lin(x) for lin in reversed(layer.lins)), edge_index, edge_weight)


def tag_of_products(
    kept: Kept,
    layer: TAGConv,
    products: Iterator[Tensor],
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
) -> Tensor:
    """Return the output of a layer from the products of its rows with its weights, the last weight's first."""
    out = next(products)
    if layer.normalize:
        edge_index, edge_weight = _normalised(kept, layer, out, edge_index, edge_weight)
    for product in products:
        out = layer.propagate(edge_index, x=out, edge_weight=edge_weight) + product
    return _plus(out, layer.bias)


def _arma(
    kept: Kept, layer: ARMAConv, forward: Forward, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None
) -> Tensor | None:
    products = layer.num_stacks * layer.out_channels
    if not _rows_are_cheaper(kept, layer, x, products, edge_weight):
        return None
    edge_index, edge_weight = _normalised(kept, layer, x, edge_index, edge_weight)
    out = layer.propagate(edge_index, x=x, edge_weight=edge_weight) @ layer.init_weight
    for hop in range(layer.num_layers):
        shared = 0 if layer.shared_weights else hop
        if hop > 0:
            out = out @ layer.weight[0 if layer.shared_weights else hop - 1]
            out = layer.propagate(edge_index, x=out, edge_weight=edge_weight)
        root = functional.dropout(x, p=layer.dropout, training=layer.training)
        out = out + root @ layer.root_weight[shared]
        if layer.bias is not None:
            out = out + layer.bias[shared]
        if layer.act is not None:
            out = layer.act(out)
    mean: Tensor = out.mean(dim=-3)
    return mean


def _sage(kept: Kept, layer: SAGEConv, forward: Forward, x: Any, edge_index: Tensor, size: Any = None) -> Tensor | None:
    if layer.project:  # by a layer that is not linear
        return None
    root = "lin_r" if layer.root_weight else None
    return _neighbours_first(kept, layer, ("lin_l", root), forward, x, None, edge_index, size=size)


def _graph(
    kept: Kept,
    layer: GraphConv,
    forward: Forward,
    x: Any,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    size: Any = None,
) -> Tensor | None:
    names = ("lin_rel", "lin_root")
    return _neighbours_first(kept, layer, names, forward, x, edge_weight, edge_index, edge_weight, size=size)


def _neighbours_first(
    kept: Kept,
    layer: MessagePassing,
    names: tuple[str, str | None],
    forward: Forward,
    x: Any,
    edge_weight: Tensor | None,
    *args: Any,
    size: Any,
) -> Tensor | None:
    """Multiply all rows by both weights in one product, that of neighbours and that of the node itself."""
    rows = _rows(x)
    if not _product_is_cheaper(kept, layer, rows, layer.out_channels, edge_weight):
        return None
    if not isinstance(x, Tensor):  # fewer rows are computed than read: the other weight is for those alone
        lin = getattr(layer, names[0])
        twin = stand_in(layer, **{names[0]: partial(_plus, bias=lin.bias)})
        return forward(twin, (functional.linear(rows, lin.weight), x[1]), *args, size=size)
    lins = {name: getattr(layer, name) for name in names if name is not None}
    products = functional.linear(x, torch.cat([lin.weight for lin in lins.values()])).split(layer.out_channels, dim=1)
    twin = stand_in(layer, **{name: partial(_plus, bias=lin.bias) for name, lin in lins.items()})
    return forward(twin, (products[0], products[-1]), *args, size=size)


def _gin(kept: Kept, layer: GINConv, forward: Forward, x: Any, edge_index: Tensor, size: Any = None) -> Tensor | None:
    """Multiply by the first weight of the layer's network, which is linear in the sum that it gets."""
    parts, rows = first_linear(layer.nn), _rows(x)
    if parts is None or not _product_is_cheaper(kept, layer, rows, parts[0].weight.size(0), None):
        return None
    first, rest = parts
    product = functional.linear(rows, first.weight)
    products = product if isinstance(x, Tensor) else (product, functional.linear(x[1], first.weight))
    return forward(stand_in(layer, nn=rest), products, edge_index, size=size)


def first_linear(network: nn.Module) -> tuple[nn.Linear, Callable[[Tensor], Tensor]] | None:
    """Split a network into the linear module that it begins with, and the rest, which still adds that module's bias."""
    plain = type(network) in (nn.Sequential, MLP) and not is_changed(network)
    modules: list[Any] = (
        list(network if isinstance(network, nn.Sequential) else cast(MLP, network).lins) if plain else []
    )
    if not modules or not is_linear(modules[0]):
        return None
    modules[0], first = partial(_plus, bias=modules[0].bias), modules[0]
    if type(network) is MLP:
        return first, partial(MLP.forward, stand_in(network, lins=modules))
    return first, lambda x: functools.reduce(lambda value, module: module(value), modules, x)


_WAYS: dict[type[MessagePassing], Callable[..., Tensor | None]] = {
    ARMAConv: _arma,
    GCNConv: _gcn,
    GINConv: _gin,
    GraphConv: _graph,
    SAGEConv: _sage,
    SGConv: _sg,
    TAGConv: _tag,
}


_TAKE_PAIRS = (_gin, _graph, _sage)


def _rows(x: Any) -> Tensor:
    """The rows of the sources."""
    rows: Tensor = x[0] if isinstance(x, tuple) else x
    return rows


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    # autocast gives products in half precision, and adds the bias there
    return out if bias is None else out + bias.to(out.dtype)


def _rows_are_cheaper(
    kept: Kept, layer: MessagePassing, rows: Tensor, out_channels: int, edge_weight: Tensor | None
) -> bool:
    """True if summing the input rows costs less than summing their product with the weight."""
    before, after = _columns(kept, layer, rows, out_channels, edge_weight)
    return kept.host.aggregates_first or _fixed(kept, layer, rows, edge_weight) or before < after


def _product_is_cheaper(
    kept: Kept, layer: MessagePassing, rows: Tensor, out_channels: int, edge_weight: Tensor | None
) -> bool:
    before, after = _columns(kept, layer, rows, out_channels, edge_weight)
    return after < before and not kept.host.aggregates_first and not _fixed(kept, layer, rows, edge_weight)


def _columns(
    kept: Kept, layer: MessagePassing, rows: Tensor, out_channels: int, edge_weight: Tensor | None
) -> tuple[int, int]:
    """Count the columns that a sum reads in both passes: before the weight, and after it."""
    graded = rows.requires_grad or not kept.host.savings.no_input_gradient
    graded |= edge_weight is not None and edge_weight.requires_grad  # rows are read again for its gradient
    learned = graded or any(parameter.requires_grad for parameter in layer.parameters())
    training = torch.is_grad_enabled()
    return rows.size(-1) * (1 + (training and graded)), out_channels * (1 + (training and learned))


def _fixed(kept: Kept, layer: MessagePassing, x: Tensor, edge_weight: Tensor | None) -> bool:
    return kept.first_hop.expects(layer, x, edge_weight)


def _normalised(
    kept: Kept, layer: MessagePassing, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None
) -> tuple[Adjacency, Tensor]:
    """Call ``gcn_norm`` as ``TAGConv`` and ``ARMAConv`` do."""
    norm = kept.gcn_norm
    num_nodes = x.size(layer.node_dim)
    result: tuple[Adjacency, Tensor] = norm(edge_index, edge_weight, num_nodes, add_self_loops=False, dtype=x.dtype)
    return result


def _usable(layer: MessagePassing, x: Any, edge_index: Any) -> bool:
    """True if the order may be changed: plain rows on a shard's edges, linear steps, and no hook that would notice."""
    lins = [module for name, module in layer.named_children() if name.startswith("lin")]
    lins = [lin for module in lins for lin in (module if isinstance(module, nn.ModuleList) else [module])]
    return (
        (isinstance(x, Tensor) or (isinstance(x, tuple) and all(isinstance(part, Tensor) for part in x)))
        and _rows(x).dim() == 2
        and _rows(x).layout == torch.strided
        and _rows(x).is_floating_point()
        and isinstance(edge_index, Adjacency)
        and aggregation_of(layer) in (SumAggregation, MeanAggregation)
        and all(is_linear(lin) for lin in lins)
        and not hooked(layer)
        and not any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters())
    )
