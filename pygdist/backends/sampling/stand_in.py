"""A model on trial: rows stand for its first layer's output, and refusals say what the trial found."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.hops.cuts import Cut, cut_of
from pygdist.hops.layer import layer_name, own_class

_INSTEAD = "use backend pull"


class StandIn:
    """Rows that stand for the first layer's output while a model is tried.

    Args:
        x: Rows that stand for the features.
        edge_weight: Weights that stand for the graph's.
        num_seeds: Number of seeds.

    Attributes:
        layer: The layer that got the features.
    """

    def __init__(self, x: Tensor, edge_weight: Tensor | None, num_seeds: int) -> None:
        self._x, self.edge_weight, self.num_seeds = x, edge_weight, num_seeds
        self.layer: MessagePassing | None = None
        self._rows: list[Tensor] = []  # one for each call of the layer in a pass
        self._trains = False  # some parameter of the layer before its rest

    def is_stub(self, x: Tensor) -> bool:
        """Tell if a layer gets the features."""
        return x.dim() == 2 and x.stride() == (0, 0) and x.data_ptr() == self._x.data_ptr()

    def rows_for(self, layer: MessagePassing, cut: Cut) -> Tensor:
        """Return random rows as wide as the sum over ranks, the same each time."""
        if self.layer is not None and self.layer is not layer:
            raise InputError(
                f"backend 'pushpull': {layer_name(self.layer)} and {layer_name(layer)} both get the features, but one "
                f"layer alone is computed where they are; {_INSTEAD}"
            )
        self.layer = layer
        weight = layer.get_parameter(cut.weights[0])
        shape, generator = (self._x.size(0), cut.width(layer)), torch.Generator().manual_seed(1)
        rows = torch.randn(shape, generator=generator, dtype=torch.float64).to(weight)
        self._trains = any(one.requires_grad for one in cut.parameters(layer).values())
        self._rows.append(rows.requires_grad_(torch.is_grad_enabled() and self._trains))
        return self._rows[-1]

    def check(self, model: nn.Module, out: list[Tensor]) -> None:
        """Refuse a model whose passes make other exchanges than one sum and its gradient.

        A rank whose batch is empty makes these without running the model.
        """
        rows, graded = self._rows, [one for one in out if one.requires_grad]
        wanted = [one for one in rows if one.requires_grad]
        if len(rows) == 1 and wanted and graded:
            total = torch.stack([one.sum() for one in graded]).sum()
            gradient = torch.autograd.grad(total, wanted, allow_unused=True)[0] if total.requires_grad else None
        else:
            gradient = None
        count = len(self._rows)
        self._rows = []
        if count > 1:
            raise refused(model, "runs its first layer more than once in a pass, or again in the backward pass")
        if count and self._trains and gradient is None:
            raise refused(model, "puts out nothing that has a gradient for its first layer")


def refused(model: nn.Module, reason: str) -> InputError:
    """Return the error for a model."""
    return InputError(f"backend 'pushpull': {own_class(model).__name__} {reason}; {_INSTEAD}")


def cut_for(layer: MessagePassing, shard: Shard) -> Cut:
    """Return the cut of a first layer; refuse one that cannot be cut, or takes another number of features."""
    try:
        cut = cut_of(layer)
    except ValueError as error:
        raise InputError(f"backend 'pushpull' cannot compute the first layer by columns: {error}; {_INSTEAD}") from None
    width, taken = shard.x.size(1), layer.get_parameter(cut.weights[0]).size(1)
    if taken != width:
        raise InputError(
            f"the model does not accept the graph's {width} features per node, as {layer_name(layer)} takes {taken}; "
            f"set the model's in_channels to {width}, or to -1 to take it from the graph"
        )
    return cut


def refuse_shared(model: nn.Module, layer: MessagePassing, cut: Cut) -> None:
    """Refuse a first layer whose weights another module uses: that use would get gradients at another step."""
    ids = {id(one) for one in cut.parameters(layer).values()}
    uses = [name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in ids]
    if len(uses) > sum(isinstance(one, nn.Parameter) for one in cut.parameters(layer).values()):
        raise refused(model, f"shares parameters of its first layer with another module ({', '.join(uses)})")


def bound_arguments(layer: MessagePassing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer by name."""
    return dict(inspect.signature(own_class(layer).forward).bind(layer, *args, **kwargs).arguments)


def takes_weights(layer: MessagePassing, bound: dict[str, Any], of_graph: Tensor | None) -> bool:
    """Tell if a first layer gets the graph's edge weights; refuse further inputs, and other weights."""
    further = {name: value for name, value in bound.items() if value is not None}
    further = {name: value for name, value in further.items() if name not in ("self", "x", "edge_index")}
    weight = further.pop("edge_weight", None)
    if further:
        raise InputError(
            f"backend 'pushpull': {layer_name(layer)} gets {', '.join(sorted(further))}, which the ranks that compute "
            f"the first layer do not have; {_INSTEAD}"
        )
    if weight is None or not weight.numel():
        return weight is not None
    if of_graph is None or weight.data_ptr() != of_graph.data_ptr():
        raise InputError(
            f"backend 'pushpull': {layer_name(layer)} gets edge weights that the model computes, but the ranks that "
            f"compute the first layer have those of the graph alone; {_INSTEAD}"
        )
    return True
