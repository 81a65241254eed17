"""Degree normalisation over the whole graph, for layers that normalise their own edges (GCN and its relatives).

A rank has all in-edges of its nodes, so it knows their degrees. Degrees of halo rows come from their owners, or from
the store. The result is kept: on a fixed graph weights are computed, and degrees exchanged, once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.graph.identity import fixable
from pygdist.graph.memo import Memo
from pygdist.graph.self_loops import NO_LOOPS, insert_self_loops, is_self_loop, keep_entries
from pygdist.kernels import CSR
from pygdist.kernels.csr import narrowest
from pygdist.nn.norms import Ranks
from pygdist.nn.self_loops import num_rows_with_loops

_MOST_KEPT = 64  # results


class GlobalGCNNorm:
    r"""PyG's ``gcn_norm``, :math:`\hat{D}^{-1/2} \hat{A} \hat{D}^{-1/2}`, with the degrees of the whole graph.

    Takes the arguments of :func:`torch_geometric.nn.conv.gcn_conv.gcn_norm`, for the local edges of a shard. Unlike
    PyG's function, it returns the edges as an :class:`~pygdist.graph.Adjacency`, sorted by destination, with weights in
    this order. Differentiable in ``edge_weight``.

    Args:
        ranks: The backend, which knows or fetches the degrees of halo rows.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._results = Memo[tuple[Adjacency, Tensor]](_MOST_KEPT)  # by arguments
        self._looped = Memo[_Looped](_MOST_KEPT)

    def clear(self) -> None:
        """Forget all results; called when the backend gets another graph."""
        self._results.clear()
        self._looped.clear()

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
        """Return the normalised edges, sorted by destination, and their weights ``(num_edges,)``.

        Raises:
            InputError: If ``flow`` is not ``"source_to_target"``, or the edges are not the shard's adjacency and
                ``num_nodes`` is missing.
        """
        if flow != "source_to_target":
            raise InputError(f"gcn_norm with flow='{flow}' needs the out-edges of each node, but a shard has in-edges")
        arguments = (num_nodes, 2.0 if improved else 1.0, add_self_loops, dtype)
        if not isinstance(edge_index, Adjacency) or not fixable(edge_weight):
            return self._normalise(edge_index, edge_weight, *arguments)
        # one result for each set of arguments: weights that a model computes in every epoch replace the last ones
        slot, inputs = (id(edge_index), self._ranks.alone, *arguments), (edge_index, edge_weight)
        same, last = self._results.knows(slot, inputs), self._results.last(slot)
        if last is not None and edge_weight is not None:  # a model may change those of one rank alone
            same = self._ranks.max_over_ranks(int(not same)) == 0
        if last is None or not same:
            with torch.inference_mode(False), torch.no_grad():  # training may ask for what evaluation asked first
                result = self._normalise(edge_index, edge_weight, *arguments, edge_weight is not None)
                last = self._results.put(slot, inputs, result)
        return last

    def _normalise(
        self,
        edge_index: Tensor,
        edge_weight: Tensor | None,
        num_nodes: int | None,
        fill_value: float,
        add_self_loops: bool,
        dtype: torch.dtype | None,
        reuse_loops: bool = True,
    ) -> tuple[Adjacency, Tensor]:
        if not isinstance(edge_index, Adjacency):
            if num_nodes is None:
                raise InputError("gcn_norm on edges other than the shard's adjacency needs num_nodes=x.size(0)")
            num_src = max(num_nodes, int(edge_index[0].max()) + 1 if edge_index.numel() else 0)
            edge_index, perm = Adjacency.from_unsorted(edge_index, num_src=num_src, num_dst=num_nodes)
            edge_weight = None if edge_weight is None else edge_weight.index_select(0, perm)
            reuse_loops = False
        # a hop may compute fewer rows than it reads
        num_nodes = edge_index.num_dst if num_nodes is None else min(num_nodes, edge_index.num_dst)
        num_loops = num_rows_with_loops(self._ranks, num_nodes) if add_self_loops else 0
        looped = self._with_loops(edge_index, num_loops, reuse=reuse_loops)
        csr, counts = looped.csr, looped.csr.indptr.diff()
        looped_weight = None if edge_weight is None else looped.weights(edge_weight, fill_value)
        if looped_weight is None:
            degree = counts.to(torch.get_default_dtype() if dtype is None else dtype)
        else:
            degree = torch.segment_reduce(looped_weight, "sum", offsets=csr.indptr, initial=0)
        if self._ranks.splits_nodes:
            degree = self._ranks.sums_of_parts(degree)
        scale = _inverse_root(degree)
        degrees = self._ranks.source_degrees(degree.detach(), edge_weight, fill_value if add_self_loops else None)
        if degrees is None:
            source_scale = self._ranks.source_rows(scale)
        else:  # some rows may not have all their edges here
            source_scale = _inverse_root(degrees.to(scale))
            scale = source_scale[: scale.numel()]
        weight = source_scale.index_select(0, csr.index)
        weight = weight if looped_weight is None else weight * looped_weight
        weight = weight * torch.repeat_interleave(scale, counts, dim=0, output_size=csr.num_entries)
        rim_scale = self._ranks.rim_scale(weighted=edge_weight is not None)
        if rim_scale is not None:  # the edges that are here stand for the missing ones
            factor = rim_scale[: scale.numel()].to(weight)
            by_edge = torch.repeat_interleave(factor, counts, dim=0, output_size=csr.num_entries)
            weight = torch.where(is_self_loop(csr), weight, weight * by_edge)
        return looped.edges(source_scale.size(0)), weight

    def _with_loops(self, edge_index: Adjacency, num_loops: int, *, reuse: bool) -> _Looped:
        """Return the edges with self-loops; ``reuse`` returns the same object while only weights change."""
        if not reuse:
            return _Looped(edge_index, num_loops)
        return self._looped.get((id(edge_index), num_loops), (edge_index,), lambda: _Looped(edge_index, num_loops))


def _inverse_root(degree: Tensor) -> Tensor:
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0)


class _Looped:
    """Edges with one self-loop at each of the first nodes, as PyG's ``add_remaining_self_loops`` adds them.

    Args:
        adjacency: The edges.
        num_loops: Number of nodes that get a loop; with 0 the edges do not change.

    Attributes:
        csr: The edges with loops.
    """

    def __init__(self, adjacency: Adjacency, num_loops: int) -> None:
        self._adjacency, self._num_loops = adjacency, num_loops
        self._edges: Adjacency | None = None
        self.csr = adjacency.csr()
        self._none_before = adjacency.slot(NO_LOOPS) is True
        if num_loops:
            self._was_loop = is_self_loop(self.csr)
            others = self.csr if self._none_before else keep_entries(self.csr, ~self._was_loop)
            self.csr, self._is_loop = insert_self_loops(others, num_loops)

    def weights(self, weight: Tensor, fill_value: float) -> Tensor:
        """Return the weights of :attr:`csr`; loops that existed before keep their weights."""
        if not self._num_loops:
            return weight
        sources = self._sources
        loops = weight.new_full((self._num_loops, *weight.shape[1:]), fill_value)
        # as in PyG, the last of several loops at a node counts, and all of them get its gradient
        loops = loops.index_put((sources.nodes,), weight.index_select(0, sources.loops))
        return torch.cat([weight, loops]).index_select(0, sources.place)

    @functools.cached_property
    def _sources(self) -> _Sources:
        with torch.inference_mode(False):  # training uses what an evaluation began
            before = self._adjacency.csr()
            num_weights = before.num_entries + self._num_loops
            if self._none_before:
                loops, added = before.indptr[:0], self._is_loop.cumsum(0)
                every = torch.arange(num_weights, device=added.device)
                place = torch.where(self._is_loop, before.num_entries - 1 + added, every - added)
                return _Sources(loops, loops, place.to(narrowest(num_weights)))
            loops = self._was_loop.nonzero().squeeze(1)
            place = loops.new_empty(self.csr.num_entries, dtype=narrowest(num_weights))
            place[~self._is_loop] = (~self._was_loop).nonzero().squeeze(1).to(place)
            place[self._is_loop] = torch.arange(before.num_entries, num_weights, device=place.device).to(place)
            return _Sources(loops, before.index.index_select(0, loops).long(), place)

    def edges(self, num_src: int) -> Adjacency:
        """Return :attr:`csr` with ``num_src`` sources; the same object for the same number."""
        if self._edges is None or self._edges.num_src != num_src:
            with torch.inference_mode(False):
                self._edges = Adjacency.from_csr(CSR(self.csr.indptr, self.csr.index, num_src))
        return self._edges


class _Sources(NamedTuple):
    """Indices by which edges with loops get their weights; by masks, the host would wait for a GPU.

    Attributes:
        loops: The edges that are loops.
        nodes: The node of each.
        place: For each edge with the loops added, an index into the weights of all edges, followed by those of loops.
    """

    loops: Tensor
    nodes: Tensor
    place: Tensor
