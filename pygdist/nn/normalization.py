"""Degree normalisation over the whole graph, for the layers that normalise their own edges (GCN and its relatives).

A rank holds all in-edges of its nodes, so it knows their degrees; those of halo rows come from their owners. The
result is kept: on a fixed graph the weights are computed, and the degrees exchanged, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable, identity_of
from pygdist.graph.self_loops import insert_self_loops, is_self_loop, keep_entries
from pygdist.kernels import CSR
from pygdist.nn.norms import Ranks

__all__ = ["GlobalGCNNorm"]

_MOST_KEPT = 64  # results; what is kept longest goes first


class GlobalGCNNorm:
    r"""PyG's ``gcn_norm``, :math:`\hat{D}^{-1/2} \hat{A} \hat{D}^{-1/2}`, with the degrees of the whole graph.

    Same arguments and results as :func:`torch_geometric.nn.conv.gcn_conv.gcn_norm`, on the local edges of a shard;
    differentiable in ``edge_weight``.

    Args:
        ranks: Where the degrees of halo rows come from.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._kept: dict[tuple[object, ...], tuple[Any, Any, tuple[Adjacency, Tensor]]] = {}

    def clear(self) -> None:
        """Forget what was kept; called when the backend gets another graph."""
        self._kept.clear()

    def __call__(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Adjacency, Tensor]:
        """The normalised edges, sorted by destination, and their weights ``(num_edges,)``."""
        if flow != "source_to_target":
            raise InputError(f"gcn_norm with flow='{flow}' needs the out-edges of each node; a shard holds in-edges")
        arguments = (num_nodes, 2.0 if improved else 1.0, add_self_loops, dtype)
        if not isinstance(edge_index, Adjacency) or not fixable(edge_weight):
            return self._normalise(edge_index, edge_weight, *arguments)
        # one result for each kind of normalisation: weights that a model computes anew replace those before
        slot, version = (id(edge_index), *arguments), identity_of(edge_weight)
        kept = self._kept.get(slot)
        if kept is None or kept[0] != version:
            # the inputs are kept too, so that their ids and their memory stay theirs
            inputs = (edge_index, None if edge_weight is None else edge_weight.detach())
            with torch.inference_mode(False), torch.no_grad():  # training may ask for what evaluation asked first
                kept = (version, inputs, self._normalise(edge_index, edge_weight, *arguments))
            if slot not in self._kept and len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[slot] = kept
        return kept[2]

    def _normalise(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int | None,
        fill_value: float,
        add_self_loops: bool,
        dtype: torch.dtype | None,
    ) -> tuple[Adjacency, Tensor]:
        if num_nodes is None:
            if not isinstance(edge_index, Adjacency):
                raise InputError("gcn_norm on edges that are not the shard's adjacency needs num_nodes")
            num_nodes = edge_index.num_dst
        if not isinstance(edge_index, Adjacency):
            num_src = max(num_nodes, int(edge_index[0].max()) + 1 if edge_index.numel() else 0)
            edge_index, perm = Adjacency.from_unsorted(edge_index, num_src=num_src, num_dst=num_nodes)
            edge_weight = None if edge_weight is None else edge_weight.index_select(0, perm)
        num_nodes = min(num_nodes, edge_index.num_dst)  # a hop may compute fewer rows than it reads
        csr = edge_index.csr()
        if add_self_loops:
            csr, edge_weight = _with_remaining_self_loops(csr, edge_weight, fill_value, num_nodes)
        counts = csr.indptr.diff()
        if edge_weight is None:
            degree = counts.to(torch.get_default_dtype() if dtype is None else dtype)
        else:
            degree = torch.segment_reduce(edge_weight, "sum", offsets=csr.indptr, initial=0)
        scale = degree.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0)
        source_scale = self._ranks.source_rows(scale)
        weight = source_scale.index_select(0, csr.index)
        weight = weight if edge_weight is None else weight * edge_weight
        weight = weight * torch.repeat_interleave(scale, counts, dim=0, output_size=csr.num_entries)
        return Adjacency.from_csr(CSR(csr.indptr, csr.index, source_scale.size(0))), weight


def _with_remaining_self_loops(
    csr: CSR, weight: Tensor | None, fill_value: float, num_nodes: int
) -> tuple[CSR, Tensor | None]:
    """One self-loop at each node, as PyG's ``add_remaining_self_loops``: those that exist keep their weight.

    Without weights the value of a loop is not looked at, in PyG as here.
    """
    is_loop = is_self_loop(csr)
    keep = ~is_loop
    looped, is_new = insert_self_loops(keep_entries(csr, keep), num_nodes)
    if weight is None:
        return looped, None
    loops = weight.new_full((num_nodes, *weight.shape[1:]), fill_value)
    loops[csr.index[is_loop].long()] = weight[is_loop]
    out = weight.new_empty(looped.num_entries, *weight.shape[1:])
    out = out.index_put((~is_new,), weight[keep])
    return looped, out.index_put((is_new,), loops)
