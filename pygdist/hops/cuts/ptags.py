"""The cut of layers that are written in P-TAGS: their ``transform`` runs on columns (P3, Sec. 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from pygdist.hops.cuts.cut import Cut, InEdges, Parameters
from pygdist.hops.cuts.sums import reduce_of
from pygdist.hops.layer import is_linear, own_class, stand_in
from pygdist.kernels import spmm
from pygdist.nn.ptags import PTAGSConv


def ptags_cut(layer: PTAGSConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    # not named_children(), which leaves out a module's second name
    linear = {name: one for name, one in layer._modules.items() if one is not None and is_linear(one)}
    names = _transforming(layer, linear)
    if not names:
        return "has a transform that calls no Linear of torch or PyG that is an attribute of the layer"
    sends_rows = own_class(layer).message is PTAGSConv.message and reduce_of(layer) is not None
    sends_rows &= own_class(layer).aggregate is PTAGSConv.aggregate and own_class(layer).update is PTAGSConv.update

    def term(layer: PTAGSConv, parameters: Parameters, edges: InEdges, columns: Tensor, mine: slice) -> Tensor:
        twin = _with_weights(layer, {name: parameters[f"{name}.weight"][:, mine] for name in names})
        rows = columns[edges.row_id]
        if sends_rows:
            return twin.transform(rows, spmm(edges.csr, columns, reduce=reduce_of(layer)))  # type: ignore[arg-type]
        edge_index = torch.stack([edges.csr.index.long(), edges.csr.row_index().long()])
        size = columns.size(0), edges.num_rows
        aggregated = twin.propagate(edge_index, x=(columns, rows), edge_weight=edges.weight, size=size)
        return twin.transform(rows, aggregated)

    def rest(layer: PTAGSConv, total: Tensor) -> Tensor:
        return layer.apply_rows(total + _offset(layer, names, total))

    def width(layer: PTAGSConv) -> int:
        with torch.no_grad():
            return _offset(layer, names, layer.get_parameter(f"{names[0]}.weight")).size(1)

    weights = tuple(f"{name}.weight" for name in names)
    return Cut(weights, (), term, rest, width, arranged=None if sends_rows else lambda _, edges: edges.compact())


def _transforming(layer: PTAGSConv, linear: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the linear modules that ``transform`` calls on rows of features."""
    for width in {one.get_parameter("weight").size(1) for one in linear.values()}:
        called: list[str] = []

        def noted(name: str, called: list[str] = called) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                called.append(name)
                return functional.linear(x, layer.get_parameter(f"{name}.weight"))

            return run

        twin, rows = (
            stand_in(layer, **{name: noted(name) for name in linear}),
            next(layer.parameters()).new_zeros(1, width),
        )
        try:
            with torch.no_grad():
                twin.transform(rows, rows)
        except Exception:  # rows of another width: the next is tried, and a layer that takes none is refused
            continue
        if called:
            return list(dict.fromkeys(called))
    return []


def _with_weights(layer: PTAGSConv, weights: Mapping[str, Tensor]) -> PTAGSConv:
    """Return a copy of a layer, as it was before it was distributed, with weights and no biases."""
    twin = stand_in(layer, **{name: partial(functional.linear, weight=weight) for name, weight in weights.items()})
    twin.__class__ = own_class(layer)
    return twin


def _offset(layer: PTAGSConv, names: list[str], like: Tensor) -> Tensor:
    """Return what the biases add to the sum over columns, ``(1, H)``."""
    weights = {name: layer.get_parameter(f"{name}.weight") for name in names}
    zeros = like.new_zeros(1, weights[names[0]].size(1))
    return layer.transform(zeros, zeros) - _with_weights(layer, weights).transform(zeros, zeros)
