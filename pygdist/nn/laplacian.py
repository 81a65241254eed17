"""PyG's graph Laplacian over the whole graph, for ``ChebConv`` and for models that call ``get_laplacian``.

The Laplacian is scaled by out-degrees, and ``ChebConv`` divides the Laplacian by its largest entry. A rank has only the
in-edges of its nodes. So each rank sums the weights of its edges by source, the owner of a node adds up the sums of all
ranks, and the degrees go back to all ranks that read the node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygdist.comm.derivatives import once_differentiable
from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.graph.memo import Memo
from pygdist.nn.norms import Ranks
from pygdist.nn.self_loops import KeptSelfLoops, num_rows_with_loops

_DEGREES = Slot[Memo[Tensor]]("out-degrees")


class GlobalLaplacian:
    """PyG's ``get_laplacian``, with the out-degrees of the whole graph; differentiable in ``edge_weight``.

    Args:
        ranks: The backend.
        self_loops: The object that removes and adds self-loops.
    """

    def __init__(self, ranks: Ranks, self_loops: KeptSelfLoops) -> None:
        self._ranks, self._self_loops = ranks, self_loops
        self.ready: tuple[Any, Tensor] | None = None  # the result of the next call, if it was made before

    def __call__(
        self,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        normalization: str | None = None,
        dtype: torch.dtype | None = None,
        num_nodes: int | None = None,
    ) -> tuple[Any, Tensor]:
        """Return the edges with self-loops, and their weights; arguments are those of PyG's ``get_laplacian``."""
        ready, self.ready = self.ready, None
        if ready is not None:
            return ready
        if num_nodes is None:
            raise InputError(
                "get_laplacian without num_nodes takes the number of nodes from the largest id of all edges, which no "
                "rank knows; pass num_nodes=x.size(0)"
            )
        edges, weight = self._self_loops.remove(edge_index, edge_weight)
        if weight is None:
            weight = torch.ones(edges.size(1), dtype=dtype, device=edges.device)
            degree = self._numbers_of_edges(edges, weight, num_nodes)
        else:
            degree = self._sums_by_source(edges, weight, num_nodes)
        source, target = edges[0], edges[1]
        if normalization == "sym":
            scale = degree.pow(-0.5)
            scale = scale.masked_fill(scale == float("inf"), 0)
            weight = scale[source] * weight * scale[target]
        elif normalization == "rw":
            scale = 1.0 / degree
            scale = scale.masked_fill(scale == float("inf"), 0)
            weight = scale[source] * weight
        on_loops = 0.0 if normalization is None else 1.0
        edges, laplacian = self._self_loops.add(edges, -weight, on_loops, num_nodes)
        assert laplacian is not None
        if normalization is None:
            loops = degree[: num_rows_with_loops(self._ranks, num_nodes)]
            laplacian = laplacian.masked_scatter(edges[0] == edges[1], loops)
        return edges, laplacian

    def largest(self, edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
        """Return the largest weight of any rank's edges; its gradient is shared by all edges with this weight."""
        ranks, own = self._ranks, edges[1] < self._num_with_edges(num_nodes)
        mine = weight.masked_fill(~own, float("-inf"))
        if ranks.alone:
            return mine.max()
        most = ranks.max_over_ranks(float(mine.detach().max()) if mine.numel() else float("-inf"))
        ties = own & (weight.detach() == most)
        total, count = ranks.sum_over_ranks(torch.stack([torch.where(ties, weight, 0).sum(), ties.sum().to(weight)]))
        largest: Tensor = total / count
        return largest

    def _num_with_edges(self, num_nodes: int) -> int:
        """Return the number of rows whose in-edges on this rank are on no other."""
        return num_nodes if self._ranks.splits_nodes else self._ranks.owned_rows(torch.empty(num_nodes, 0)).size(0)

    def _numbers_of_edges(self, edges: Any, ones: Tensor, num_nodes: int) -> Tensor:
        if not isinstance(edges, Adjacency):
            return self._sums_by_source(edges, ones, num_nodes)
        slot = (num_nodes, ones.dtype, self._ranks.alone)
        return edges.slot(_DEGREES, Memo).get(slot, (), lambda: self._sums_by_source(edges, ones, num_nodes))

    def _sums_by_source(self, edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
        """Return the sum of weights of each source's out-edges in the whole graph; every rank makes the call."""
        once = torch.where(edges[1] < self._num_with_edges(num_nodes), weight, 0.0)  # other rows' edges count elsewhere
        return self._ranks.source_rows(self._ranks.sums_at_owners(edges[0], once, num_nodes))


def sums_at_owners(source_rows: Callable[[Tensor], Tensor], source: Tensor, value: Tensor, num_rows: int) -> Tensor:
    """Sum the values of edges by source, over all ranks: the transpose of looking rows up at the sources of edges.

    Args:
        source_rows: Returns one row per source, given one row per row of this rank. Differentiable.
        source: Source of each edge, ``(E,)``.
        value: Values of edges, ``(E,)``.
        num_rows: Number of rows of this rank; the result has the sums of owned rows.
    """
    with torch.inference_mode(False), torch.enable_grad():
        own = torch.zeros(num_rows, dtype=value.dtype, device=value.device, requires_grad=True)
        rows = source_rows(own)
    here = rows.detach().index_add(0, source, value)
    total: Tensor = _Returned.apply(here, (own, rows), source_rows)  # type: ignore[no-untyped-call]
    return total


class _Returned(torch.autograd.Function):
    """Runs the backward pass of ``rows = source_rows(own)`` in the forward pass, and the other way round."""

    @staticmethod
    def forward(
        ctx: Any, here: Tensor, graph: tuple[Tensor, Tensor], source_rows: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the sum of ``here`` at the owners of rows."""
        ctx.source_rows, ctx.num_sources = source_rows, here.size(0)
        own, rows = graph
        (total,) = torch.autograd.grad(rows, own, here.detach())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        """Return the gradient of each sum to all its terms."""
        return ctx.source_rows(gradient)[: ctx.num_sources], None, None


def chebyshev_norm(norm: Callable[..., Any], laplacian: GlobalLaplacian) -> Callable[..., Any]:
    """Return ``ChebConv.__norm__`` with the largest entry of the Laplacian on all ranks in place of a rank's own."""

    @functools.wraps(norm)
    def run(
        self: Any,
        edge_index: Any,
        num_nodes: int,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: Any = None,
        dtype: torch.dtype | None = None,
        batch: Tensor | None = None,
    ) -> Any:
        if isinstance(lambda_max, Tensor) and lambda_max.numel() > 1:
            raise InputError(
                "ChebConv: lambda_max has a value for each of several graphs in one, but a distributed graph is one"
            )
        if lambda_max is None:
            made = laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
            lambda_max = 2.0 * laplacian.largest(*made, num_nodes)
            laplacian.ready = made  # which norm() asks for first
        try:
            return norm(self, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype)
        finally:
            laplacian.ready = None  # a user's norm may not ask

    return run
