"""Layers whose aggregation cannot be put together from the parts of a node."""

from __future__ import annotations

import inspect

from torch_geometric.nn import ClusterGCNConv, MessagePassing
from torch_geometric.nn.aggr import Aggregation, MaxAggregation, MinAggregation, SoftmaxAggregation
from torch_geometric.utils import scatter, softmax

from pygdist.backends.clones.fold import FOLDED
from pygdist.hops.layer import layer_name, own_class
from pygdist.hops.rebinding import calls_by_name

_EXTREMA = (MaxAggregation, MinAggregation, SoftmaxAggregation)


def refused(layer: MessagePassing) -> str | None:
    """Return the reason why a layer cannot run on split nodes, even without delay; ``None`` if it can."""
    cls = own_class(layer)
    if issubclass(cls, ClusterGCNConv):
        return "expects a self-loop at each row, and a node that is split has one at its root"
    if _aggregates_itself(cls) and not calls_by_name(cls, {scatter: None}):
        return "has an 'aggregate' of its own, and the messages of a node are in several parts"
    if cls.update is not MessagePassing.update and "dropout" in inspect.unwrap(cls.update).__code__.co_names:
        return "drops values of nodes in 'update', where dropout is taken for that of messages; do so in 'forward'"
    for one in _aggregations(layer):
        if own_class(one) not in FOLDED:
            return (
                f"aggregates by {layer_name(one)}, which cannot be put together from the messages of several parts; "
                "sums, means, powers, softmax, maxima, minima, variances and lists of these can"
            )
    return None


def refused_late(layer: MessagePassing, delay: object) -> str | None:
    """Return the reason why a layer cannot use sums of earlier passes; ``None`` if it can."""
    cls, remedy = own_class(layer), f"delay={delay} is for sums and means; use delay=0 or 'never'"
    if calls_by_name(cls, {softmax: None}):
        return f"divides by sums of exponentials, which other parts take relative to other maxima; {remedy}"
    for one in _aggregations(layer):
        if isinstance(one, _EXTREMA):
            return (
                f"aggregates by {layer_name(one)}, and nobody can tell from an extremum of earlier passes what is "
                f"larger now; {remedy}"
            )
    if _aggregates_itself(cls):
        return f"has an 'aggregate' of its own; {remedy}"
    if getattr(layer, "cached", False) and any(hasattr(layer, name) for name in ("_cached_x", "_cached_h")):
        return f"keeps the sums of its first pass (cached=True), which lack those of other parts; {remedy}"
    return None


def _aggregates_itself(cls: type[MessagePassing]) -> bool:
    return cls.aggregate is not MessagePassing.aggregate


def _aggregations(layer: MessagePassing) -> list[Aggregation]:
    modules = [] if layer.aggr_module is None else layer.aggr_module.modules()
    return [one for one in modules if isinstance(one, Aggregation)]
