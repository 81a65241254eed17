"""The cut of ``GATConv``: its scores are a sum over columns, and so is what they weigh.

A score needs a node's whole row, so ranks add up terms of scores before they weigh messages, and of their gradients
before these reach the weights (P3, Sec. 3.2.2, says nothing of attention).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GATConv
from torch_geometric.nn.aggr import SumAggregation

from pygdist.hops.cuts.cut import Cut, InEdges, Parameters, kept_share, plus
from pygdist.hops.layer import aggregation_of, is_linear
from pygdist.kernels import CSR, edge_softmax, gat, spmm


def gat_cut(layer: GATConv) -> Cut | str:
    """Return the cut of a layer, or the reason why there is none."""
    if layer.lin is None or not all(is_linear(one) for one in (layer.lin, layer.res) if one is not None):
        return "has a weight for sources and another one for destinations, or other linear modules than PyG's"
    if layer.edge_dim is not None:
        return "with edge_dim reads attributes of edges, which the ranks that compute it do not have"
    if aggregation_of(layer) is not SumAggregation or layer.lin.bias is not None:
        return "has another aggregation than PyG's, or a bias before its hop"
    weights = ("lin.weight",) if layer.res is None else ("lin.weight", "res.weight")
    return Cut(weights, ("att_src", "att_dst"), _term, _rest, _width, scores=_scores, arranged=_arranged)


def _width(layer: GATConv) -> int:
    return int(layer.out_channels * (layer.heads if layer.concat else 1))


def _rest(layer: GATConv, total: Tensor) -> Tensor:
    return plus(total, layer.bias)


def _arranged(layer: GATConv, edges: InEdges) -> tuple[InEdges, Tensor]:
    """Number the nodes, and add self-loops as the layer does; those that exist go first."""
    edges, ids = edges.compact()
    if not layer.add_self_loops:
        return edges, ids
    row, source = edges.csr.row_index().long(), edges.csr.index.long()
    stays = source != edges.row_id[row]
    target = torch.cat([row[stays], torch.arange(edges.num_rows)])
    csr = CSR.from_coo(target, torch.cat([source[stays], edges.row_id]), num_rows=edges.num_rows, num_cols=ids.numel())
    return replace(edges, csr=CSR(csr.indptr, csr.index, csr.num_cols)), ids


def _scores(layer: GATConv, parameters: Parameters, edges: InEdges, columns: Tensor, mine: slice) -> Tensor:
    weight = parameters["lin.weight"][:, mine].view(layer.heads, layer.out_channels, -1)
    of_source, of_target = (
        columns @ (weight * parameters[name].view(layer.heads, layer.out_channels, 1)).sum(1).t()
        for name in ("att_src", "att_dst")
    )
    return torch.cat([of_source, of_target[edges.row_id]])


def _term(layer: GATConv, parameters: Parameters, edges: InEdges, columns: Tensor, mine: slice) -> Tensor:
    assert edges.scores is not None, "they are summed first"
    product = functional.linear(columns, parameters["lin.weight"][:, mine])
    rows = product.view(-1, layer.heads, layer.out_channels)
    source, target = edges.scores.split([columns.size(0), edges.num_rows])
    keeps = 1 - layer.dropout if layer.training else 1.0
    if keeps == 1 and layer.negative_slope >= 0:
        out = gat(edges.csr, rows, source, target, negative_slope=layer.negative_slope)
    else:
        attention = edge_softmax(edges.csr, source=source, target=target, negative_slope=layer.negative_slope)
        out = spmm(edges.csr, rows, attention * kept_share(attention, keeps, edges.key))
    out = out.flatten(1) if layer.concat else out.mean(1)
    if layer.res is not None:
        out = out + functional.linear(columns[edges.row_id], parameters["res.weight"][:, mine])
    return out
