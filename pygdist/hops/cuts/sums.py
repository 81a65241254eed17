"""Cuts of layers that sum, average or take maxima of their neighbours' rows, over one hop or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GCNConv, GINConv, GraphConv, MessagePassing, SAGEConv, SGConv, TAGConv
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

from pygdist.hops.cheaper_side import first_linear, sg_of_product, tag_of_products
from pygdist.hops.cuts.cut import Cut, InEdges, Parameters, Term, plus
from pygdist.hops.kept import Kept
from pygdist.hops.layer import aggregation_of, is_linear, layer_name
from pygdist.kernels import CSR, spmm
from pygdist.sampler._native import place

_REDUCES = {SumAggregation: "sum", MeanAggregation: "mean", MaxAggregation: "max"}
Gather = Callable[[Any, Parameters, InEdges, Tensor], list[Tensor]]


def reduce_of(layer: MessagePassing) -> str | None:
    """Return the name of a layer's aggregation, if it is one that :func:`~pygdist.kernels.spmm` makes."""
    return _REDUCES.get(aggregation_of(layer))


def _products(weights: tuple[str, ...], gather: Gather) -> Term:
    """Return the term of a layer that multiplies each of the gathered tensors ``(D, c)`` by a weight, and adds them."""

    def term(layer: Any, parameters: Parameters, edges: InEdges, columns: Tensor, mine: slice) -> Tensor:
        gathered = gather(layer, parameters, edges, columns)
        total, *others = (
            functional.linear(rows, parameters[name][:, mine]) for name, rows in zip(weights, gathered, strict=True)
        )
        for one in others:
            total = total + one
        return total

    return term


def _width_of(weight: str) -> Callable[[Any], int]:
    return lambda layer: int(layer.get_parameter(weight).size(0))


# -- normalised sums ---------------------------------------------------------------------------------------------------


def gcn_cut(layer: GCNConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    if not is_linear(layer.lin) or reduce_of(layer) != "sum":
        return "has another linear module or aggregation than PyG's"

    def gather(layer: GCNConv, _: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        return [_normalised(layer, edges, columns) if layer.normalize else spmm(edges.csr, columns, edges.weight)]

    def rest(layer: GCNConv, total: Tensor) -> Tensor:
        return plus(total, layer.lin.bias, layer.bias)

    weights, degrees = ("lin.weight",), _degrees if layer.normalize else None
    return Cut(weights, (), _products(weights, gather), rest, _width_of("lin.weight"), degrees=degrees)


def sg_cut(layer: SGConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    if not is_linear(layer.lin) or reduce_of(layer) != "sum":
        return "has another linear module or aggregation than PyG's"
    if layer.cached:
        return "with cached=True keeps the rows of its first batch"

    def gather(layer: SGConv, _: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        return [_powers(layer, edges, columns, normalised=True)[-1]]

    def rest(layer: SGConv, total: Tensor) -> Tensor:
        return plus(total, layer.lin.bias)

    def late_hops(_: Kept, layer: SGConv, *args: Any, **kwargs: Any) -> Tensor:
        return sg_of_product(layer, *args, **kwargs)

    weights = ("lin.weight",)
    return Cut(weights, (), _products(weights, gather), rest, _width_of("lin.weight"), late_hops=late_hops)


def tag_cut(layer: TAGConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    if not all(is_linear(one) and one.bias is None for one in layer.lins) or reduce_of(layer) != "sum":
        return "has another linear module or aggregation than PyG's"

    def gather(layer: TAGConv, _: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        num_rows = edges.rows_after(max(layer.K, 1))
        hops = [one[:num_rows] for one in _powers(layer, edges, columns, normalised=layer.normalize)]
        return [columns[edges.row_id[:num_rows]], *hops]

    def rest(layer: TAGConv, total: Tensor) -> Tensor:
        return plus(total, layer.bias)

    def late_hops(kept: Kept, layer: TAGConv, _: Any, products: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        last_first = reversed(products.split(layer.out_channels, dim=1))
        return tag_of_products(kept, layer, last_first, *args, **kwargs)

    weights = tuple(f"lins.{number}.weight" for number in range(len(layer.lins)))
    return Cut(weights, (), _products(weights, gather), rest, _width_of(weights[0]), late_hops=late_hops)


def _powers(layer: Any, edges: InEdges, columns: Tensor, *, normalised: bool) -> list[Tensor]:
    """Return the rows after 1, 2, ... K hops, as many as can be computed."""
    if not layer.K:
        return []
    weight, loop_weight = _normalised_weights(layer, edges, columns.dtype) if normalised else (edges.weight, None)
    out = [_sum(edges.csr, columns, weight, loop_weight, edges.row_id)]
    if layer.K == 1:
        return out
    num_rows = edges.rows_after(2)
    later = _leading(edges.csr, num_rows)
    sources = _rows_of(edges, later.index)
    for hop in range(2, layer.K + 1):
        num_rows = edges.rows_after(hop)
        csr = _leading(later, num_rows)
        csr = CSR(csr.indptr, sources[: csr.num_entries], out[-1].size(0))
        loops = None if loop_weight is None else loop_weight[:num_rows]
        weights = None if weight is None else weight[: csr.num_entries]
        out.append(_sum(csr, out[-1], weights, loops, torch.arange(num_rows, device=csr.index.device)))
    return out


def _leading(csr: CSR, num_rows: int) -> CSR:
    """Return the edges into the first rows."""
    indptr = csr.indptr[: num_rows + 1]
    return CSR(indptr, csr.index[: int(indptr[-1])], csr.num_cols)


def _rows_of(edges: InEdges, ids: Tensor) -> Tensor:
    """Return the rows of nodes, which are all rows here, by their ids."""
    return ids if edges.is_compact else place(edges.row_id, ids.long())[1].to(torch.int32)


def _sum(csr: CSR, rows: Tensor, weight: Tensor | None, loop_weight: Tensor | None, own: Tensor) -> Tensor:
    """Sum rows along edges, and along a self-loop at each row if loops have weights."""
    total = spmm(csr, rows, weight)
    return total if loop_weight is None else total + rows[own] * loop_weight.unsqueeze(1)


def _normalised(layer: GCNConv, edges: InEdges, columns: Tensor) -> Tensor:
    """Sum rows as ``gcn_norm`` weighs them, with a self-loop at each node if the layer adds them."""
    return _sum(edges.csr, columns, *_normalised_weights(layer, edges, columns.dtype), edges.row_id)


def _normalised_weights(layer: Any, edges: InEdges, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the weights that ``gcn_norm`` gives edges, and the self-loops that it adds."""
    weight, loop_weight = _with_loops(layer, edges, dtype)
    degree = _sums(edges, weight, loop_weight)
    source_degree = edges.source_degree
    if source_degree is None:  # the other nodes of a sampled neighbourhood have no in-edge but the loop
        fill = 0.0 if loop_weight is None else _fill(layer, edges)
        source_degree = _at_sources(edges, degree, fill)
    scale, source_scale = (_inverse_root(one.to(dtype)) for one in (degree, source_degree))
    row_scale = scale.repeat_interleave(edges.csr.indptr.diff(), output_size=edges.csr.num_entries)
    return source_scale * weight * row_scale, None if loop_weight is None else scale * scale * loop_weight


def _degrees(layer: Any, edges: InEdges, dtype: torch.dtype) -> Tensor:
    """In-degrees of rows, with weights and with the self-loops that the layer adds."""
    return _sums(edges, *_with_loops(layer, edges, dtype))


def _sums(edges: InEdges, weight: Tensor, loop_weight: Tensor | None) -> Tensor:
    degree = torch.segment_reduce(weight, "sum", offsets=edges.csr.indptr, initial=0)
    return degree if loop_weight is None else degree + loop_weight


def _fill(layer: Any, edges: InEdges) -> float:
    # PyG's, without weights
    return 2.0 if getattr(layer, "improved", False) and edges.weight is not None else 1.0


def _with_loops(layer: Any, edges: InEdges, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the weights of edges, and of the self-loops that are added; loops that exist get 0 among the edges."""
    csr, weight = edges.csr, edges.weight
    weight = csr.index.new_ones(csr.num_entries, dtype=dtype) if weight is None else weight.to(dtype)
    if not getattr(layer, "add_self_loops", False):  # TAGConv adds none
        return weight, None
    row = csr.row_index().long()
    is_loop = csr.index == edges.row_id[row]
    # a loop that exists keeps its weight, the last one of several; a mask would let the host wait for a GPU
    entry = torch.arange(csr.num_entries, device=row.device).masked_fill(~is_loop, -1)
    last = row.new_full((csr.num_rows,), -1).scatter_reduce(0, row, entry, "amax")
    padded = torch.cat([weight, weight.new_full((1,), _fill(layer, edges))])
    loop_weight = padded[last]
    return weight.masked_fill(is_loop, 0.0), loop_weight


def _at_sources(edges: InEdges, value: Tensor, other: float) -> Tensor:
    """Look up values of rows at the sources of edges; ``other`` for sources that are no rows here."""
    if not edges.num_rows:
        return value.new_full((edges.csr.num_entries,), other)
    edges = edges if edges.is_compact else edges.compact()[0]
    return torch.cat([value, value.new_full((edges.csr.num_cols - edges.num_rows,), other)])[edges.csr.index.long()]


def _inverse_root(degree: Tensor) -> Tensor:
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0)


# -- neighbours and the node itself ------------------------------------------------------------------------------------


def sage_cut(layer: SAGEConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    if layer.project:
        return "with project=True is not linear in the rows that it gets"
    return _neighbours_and_self(layer, "lin_l", "lin_r" if layer.root_weight else None, weighted=False)


def graph_cut(layer: GraphConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    return _neighbours_and_self(layer, "lin_rel", "lin_root", weighted=True)


def _neighbours_and_self(layer: Any, neighbours: str, root: str | None, *, weighted: bool) -> Cut | str:
    reduce = reduce_of(layer)
    if reduce is None:
        return f"aggregates by {layer_name(layer.aggr_module)}, expected a sum, mean or maximum"
    lins = [name for name in (neighbours, root) if name is not None]
    if not all(is_linear(getattr(layer, name)) for name in lins):
        return "has other linear modules than PyG's"

    def gather(layer: Any, _: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        rows = [] if root is None else [columns[edges.row_id]]
        return [spmm(edges.csr, columns, edges.weight if weighted else None, cast(Any, reduce)), *rows]

    def rest(layer: Any, total: Tensor) -> Tensor:
        out = plus(total, *(getattr(layer, name).bias for name in lins))
        return functional.normalize(out, p=2.0, dim=-1) if getattr(layer, "normalize", False) else out

    weights = tuple(f"{name}.weight" for name in lins)
    return Cut(weights, (), _products(weights, gather), rest, _width_of(weights[0]))


def gin_cut(layer: GINConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    parts = first_linear(layer.nn)
    if parts is None or reduce_of(layer) != "sum":
        return "has a network that does not begin with a linear module, or is no sum"
    weight = next(name for name, one in layer.named_parameters() if one is parts[0].weight)

    def gather(_: GINConv, parameters: Parameters, edges: InEdges, columns: Tensor) -> list[Tensor]:
        return [spmm(edges.csr, columns) + (1 + parameters["eps"]) * columns[edges.row_id]]

    def rest(layer: GINConv, total: Tensor) -> Tensor:
        parts = first_linear(layer.nn)
        assert parts is not None, "it was when the layer was tried"
        return parts[1](total)

    return Cut((weight,), ("eps",), _products((weight,), gather), rest, _width_of(weight))
