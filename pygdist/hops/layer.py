"""What a PyG layer says of itself: which arguments it reads from neighbours, and whether PyG fuses it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import EGConv, GCNConv, GINConv, GINEConv, GraphConv, Linear, MessagePassing, SAGEConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from pygdist.graph import Adjacency
from pygdist.nn.norms import GLOBAL_NORMS

__all__ = [
    "BASE",
    "CACHES",
    "Ends",
    "arguments_of_messages",
    "computes_fewer",
    "fused_adjacency",
    "fused_arguments",
    "fuses",
    "having",
    "hooked",
    "is_linear",
    "layer_name",
    "neighbour_arguments",
    "norms_over_edges",
    "of_destinations",
    "options_of",
    "plain",
    "stand_in",
    "stood_in_for",
    "with_phantom_edge",
    "writes_hops",
    "written_hop",
]

BASE = "_pygdist_base"
"""Attribute of a class that stands for a layer's: the layer's own class."""

CACHES = ("_cached_edge_index", "_cached_adj_t", "_cached_x", "_cached_h")
"""Attributes in which layers with ``cached=True`` keep what they made of a graph."""

Module = TypeVar("Module", bound=nn.Module)


class Ends(tuple[Tensor | None, ...]):
    """Source and destination rows of an argument of ``propagate`` that the layer gave as one tensor.

    An ``update`` that asks for the argument gets the destination rows, which are what the layer gave.
    """


@contextlib.contextmanager
def having(layer: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """The layer with these attributes; afterwards as it was, and what was left on it meanwhile is dropped."""
    held = vars(layer)
    before = dict(held)
    held.update(attributes)
    try:
        yield
    finally:
        held.clear()
        held.update(before)


def of_destinations(update: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's ``update``, which is given what the layer gave."""

    @functools.wraps(update)
    def run(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        given = {key: value[1] if isinstance(value, Ends) else value for key, value in kwargs.items()}
        return update(self, *args, **given)

    return run


def neighbour_arguments(layer: MessagePassing, *, edges: bool) -> list[str]:
    """Arguments of ``propagate`` (of ``edge_updater`` if ``edges``) whose source rows the layer reads, sorted.

    PyG lifts an argument ``x`` to the sources of the edges where ``message``, ``aggregate``, ``update`` or
    ``edge_update`` ask for ``x_j``; the layer's inspector knows these names.
    """
    names = layer._edge_user_args if edges else layer._user_args
    return sorted(name[:-2] for name in names if name.endswith("_j"))


def arguments_of_messages(layer: MessagePassing) -> set[str]:
    """What messages and their aggregation ask for, but for what PyG makes of the edges (``ptr``, ``size_i``)."""
    return set(layer.inspector.get_flat_param_names(["message", "aggregate"], exclude=layer.special_args))


def written_hop(base: type[MessagePassing], name: str) -> Callable[..., Tensor]:
    """The hop ``name`` of a layer class as its authors wrote it.

    PyG replaces ``propagate`` on a class by code from a template, made for the options of the class's first instance,
    and notes what it replaced; in a subclass that may be the template of its parent, for another message. The classes
    that :func:`~pygdist.routing.distribute` makes note theirs in the same way.
    """
    for cls in base.__mro__:
        found: Callable[..., Tensor] | None = vars(cls).get(name)
        if found is not None and found is not vars(cls).get(f"_jinja_{name}"):
            return found
    raise AssertionError(f"{base.__name__} has no {name}")


def writes_hops(base: type[MessagePassing]) -> bool:
    """Whether a class has a ``propagate`` or ``edge_updater`` of its own, so that nothing may stand for it."""
    names = ("propagate", "edge_updater")
    return any(written_hop(base, name) is not written_hop(MessagePassing, name) for name in names)


def fuses(layer: MessagePassing, edge_index: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether the hop is one sparse product: PyG's fused path then gets one tensor, the source rows.

    That is so for layers that implement ``message_and_aggregate`` and whose message is the neighbour's row, scaled
    by a scalar edge weight at most; what it gets as ``None`` (RGCN's ``edge_type_ptr``) does not count. A layer given
    edges that are no longer the :class:`Adjacency` takes PyG's message path, and so does one with hooks on its
    messages, or with a ``propagate`` of its own.
    """
    if not (layer.fuse and isinstance(edge_index, Adjacency)) or writes_hops(type(layer)):
        return False
    read = set(layer._user_args) - {name for name, value in kwargs.items() if value is None}
    if not (read <= {"x_j", "edge_weight"} and set(layer._fused_user_args) <= {"x", "edge_weight"}):
        return False
    x, weight = kwargs.get("x"), kwargs.get("edge_weight")
    x = x[0] if isinstance(x, (tuple, list)) else x
    if not (isinstance(x, Tensor) and x.is_floating_point() and not layer.explain):
        return False
    if x.dim() != 2 and (x.dim() != 3 or layer.node_dim != -2):  # ARMA stacks features in front of the nodes
        return False
    return (weight is None or weight.dim() == 1) and _speaks_for_message(layer)


def _speaks_for_message(layer: MessagePassing) -> bool:
    """Whether ``message_and_aggregate`` stands for what message and aggregation are: nobody changed those alone."""
    if hooked(layer, "message", "aggregate") or set(_SPOKEN_FOR) & vars(layer).keys():
        return False
    # by ``aggr`` its code tells torch how to reduce; the module is what PyG's message path would run
    if isinstance(layer, EGConv) and "std" in layer.aggregators:
        return False  # PyG has it as sqrt(var + 1e-5) here and sqrt(max(var, 1e-5)) there
    expected = _AGGREGATIONS.get(layer.aggr) if isinstance(layer.aggr, str) else None
    if expected is not None and type(layer.aggr_module) is not expected:
        return False
    order = type(layer).__mro__
    at = {name: next(n for n, cls in enumerate(order) if name in vars(cls)) for name in _SPOKEN_FOR}
    return all(at["message_and_aggregate"] <= place for place in at.values())


def fused_adjacency(layer: MessagePassing, edge_index: Tensor, kwargs: Mapping[str, Any]) -> Adjacency | None:
    """The adjacency, carrying the layer's edge weights, if the hop :func:`fuses`; else ``None``."""
    if not fuses(layer, edge_index, kwargs):
        return None
    assert isinstance(edge_index, Adjacency)
    weight = kwargs.get("edge_weight")
    return edge_index if weight is None else edge_index.with_value(weight)


_SPOKEN_FOR = ("message_and_aggregate", "message", "aggregate")
_AGGREGATIONS = {
    "sum": SumAggregation,
    "add": SumAggregation,
    "mean": MeanAggregation,
    "max": MaxAggregation,
    "min": MinAggregation,
}
_HOOKED = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")


def own_class(module: nn.Module) -> type[Any]:
    """The class of a module before it was distributed."""
    found: type[Any] = getattr(type(module), BASE, type(module))
    return found


def hooks_of(layer: MessagePassing, *names: str) -> tuple[int, ...]:
    """The numbers of hooks on the parts ``names`` of the layer's hops, on any part by default; no two ever have one."""
    kinds = ("forward_pre_hooks", "forward_hooks")
    found = (getattr(layer, f"_{name}_{kind}") for name in names or _HOOKED for kind in kinds)
    return tuple(number for hooks in found for number in hooks)


def hooked(layer: MessagePassing, *names: str) -> bool:
    """Whether somebody registered a hook on the parts ``names`` of the layer's hops; on any part by default."""
    return bool(hooks_of(layer, *names))


def fused_arguments(layer: MessagePassing, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``message_and_aggregate`` takes beside the edges, if calling it is all that PyG's fused path would do.

    PyG's ``propagate`` looks the two ends of all edges up even there, for hooks and ``update`` to use.
    """
    if hooked(layer, "propagate", "message_and_aggregate") or type(layer).update is not MessagePassing.update:
        return None
    _, *names = inspect.signature(layer.message_and_aggregate).parameters
    return {name: kwargs.get(name) for name in names}


def stand_in(layer: Module, **others: Any) -> Module:
    """An object like ``layer`` with some attributes replaced, for one call of ``forward``; ``layer`` is not touched.

    Its hops are those of ``layer`` (:func:`stood_in_for`).
    """
    twin: Module = object.__new__(type(layer))
    # an attribute of the instance is found before what torch registers; setattr() would register it with the layer
    twin.__dict__.update(layer.__dict__, **others, _stands_in_for=layer)
    return twin


def stood_in_for(layer: MessagePassing) -> MessagePassing:
    """The layer itself, or that which it stands in for."""
    found: MessagePassing = layer.__dict__.get("_stands_in_for", layer)
    return found


@contextlib.contextmanager
def options_of(layer: MessagePassing, **options: bool) -> Iterator[None]:
    """Options of a layer are others for a while, of those that it has; with ``cached`` what it keeps is put aside."""
    changed: dict[str, Any] = {
        name: value for name, value in options.items() if getattr(layer, name, value) is (not value)
    }
    if "cached" in changed:
        changed |= {name: None for name in CACHES if getattr(layer, name, None) is not None}
    were = {name: getattr(layer, name) for name in changed}
    try:
        for name, value in changed.items():
            setattr(layer, name, value)
        yield
    finally:
        for name, value in were.items():
            setattr(layer, name, value)


def is_linear(module: nn.Module) -> bool:
    """Whether the module is ``x @ weight.T + bias`` and nothing else: no adapter, no hook."""
    return type(module) in (nn.Linear, Linear) and not hooked_module(module)


def hooked_module(module: nn.Module) -> bool:
    """Whether somebody registered a hook on the module itself."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def computes_fewer(layer: MessagePassing) -> Literal["rows", "pairs"] | None:
    """How a layer of one hop can be told to compute only the first of the rows that it reads.

    ``"rows"``: it uses its rows for nothing but messages, so edges with fewer destinations are enough. ``"pairs"``: it
    takes rows of sources and of destinations. ``None``: it has to compute as many as it is given.
    """
    own = own_class(layer)
    for classes, how in _FEWER.items():
        known = next((cls for cls in classes if issubclass(own, cls)), None)
        if known is not None:
            names = ("forward", "message", "aggregate", "update")
            written = all(getattr(own, name) is getattr(known, name) for name in names)
            return how if written and not writes_hops(own) else None
    return None


_FEWER: dict[tuple[type[MessagePassing], ...], Literal["rows", "pairs"]] = {
    (GCNConv,): "rows",
    (SAGEConv, GraphConv, GINConv, GINEConv): "pairs",
}


def layer_name(layer: MessagePassing) -> str:
    """The class name that users know, without the mark of a routed layer."""
    return type(layer).__name__.removeprefix("Distributed")


def plain(edge_index: Tensor) -> Tensor:
    """The edges as an ordinary tensor, so that the layer runs the same message path as on one process."""
    return edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index


def with_phantom_edge(
    layer: MessagePassing,
    inner: Callable[..., Tensor],
    size: tuple[int, int],
    kwargs: Mapping[str, Any],
    *,
    edges: bool,
) -> Tensor:
    """Run a hop on a rank that has no edge, with one edge between two rows that do not exist, and drop its result.

    Many layers cannot reshape or reduce zero messages (``view(0, heads, -1)``, the maximum of nothing). They need not:
    the phantom rows are ones, their outputs are cut off, and so their gradients are zero.
    """
    num_src, num_dst = size
    dim = layer.node_dim

    def padded(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(padded(part) for part in value)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        by_node = value.size(dim) in (num_src, num_dst) if value.dim() >= abs(dim) else False
        axis = dim if by_node else 0
        if not by_node and value.size(0) != 0:  # neither per node nor per edge
            return value
        shape = list(value.shape)
        shape[axis] = 1
        return torch.cat([value, value.new_ones(shape)], dim=axis)

    device = next((value.device for value in kwargs.values() if isinstance(value, Tensor)), None)
    edge = torch.tensor([[num_src], [num_dst]], device=device)
    out = inner(edge, size=(num_src + 1, num_dst + 1), **{name: padded(value) for name, value in kwargs.items()})
    return out[:0] if edges else out.narrow(dim, 0, num_dst)


def norms_over_edges(layer: MessagePassing) -> list[str]:
    """Classes of norms in the modules that the layer's ``message`` calls."""
    names = type(layer).message.__code__.co_names
    inner = [module for name in names if isinstance(module := getattr(layer, name, None), nn.Module)]
    return [
        type(part).__name__
        for module in inner
        for part in module.modules()
        if any(cls in GLOBAL_NORMS for cls in type(part).__mro__)
    ]
