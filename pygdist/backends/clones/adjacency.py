"""The adjacency of a hop whose nodes have in-edges in several parts; it combines the partial sums of the parts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from pygdist.backends.clones.fold import HopFold, extremum_of_messages
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.recorder import recorded
from pygdist.graph.adjacency import Adjacency, Reduce
from pygdist.hops.routed_edges import RoutedAdjacency
from pygdist.kernels import spmm
from pygdist.kernels.chunked import extremum_grad, tie_counts


class SplitAdjacency(RoutedAdjacency[HopFold]):
    """Edges of a part; a layer that multiplies them gets the product over the edges of all parts."""

    @override
    def matmul(
        self,
        other: Tensor,
        input_value: Tensor | None = None,
        other_value: None = None,
        reduce: Reduce = "sum",
        transpose: bool = False,
    ) -> Tensor:
        """Aggregate over the edges of all parts."""
        value = self.value if input_value is None else input_value
        dim = 1 if other.dim() == 3 else 0  # layers that stack features have their nodes in the second place
        if reduce == "max" or reduce == "min":
            return self._extremum(other.movedim(dim, 0), value, reduce).movedim(0, dim)
        with recorded(self.way.exchange.communicator.recorder, "aggregate", self.way.label):
            z = self.origin.with_value(value).matmul(other, reduce="sum").movedim(dim, 0)
        return (self.way.mean(z) if reduce == "mean" else self.way.sum(z)).movedim(0, dim)

    def _extremum(self, rows: Tensor, value: Tensor | None, reduce: Literal["max", "min"]) -> Tensor:
        x = rows.flatten(1)
        plain = value is None or (value.dtype == x.dtype and not value.requires_grad)
        if plain and x.dtype in (torch.float32, torch.float64):
            z, count = _Product.apply(x.contiguous(), self.origin, value, reduce)  # type: ignore[no-untyped-call]
            return self.way.extremum(z, count, reduce).view(-1, *rows.shape[1:])
        source, target = self.origin.as_tensor()
        messages = x[source] if value is None else x[source] * value.view(-1, 1)
        z, count = extremum_of_messages(messages, target, self.num_dst, reduce)
        return self.way.extremum(z, count, reduce).view(-1, *rows.shape[1:])


class _Product(torch.autograd.Function):
    """Extrema over the edges here, and the numbers of edges that attain them. Each of these gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: Adjacency, value: Tensor | None, reduce: Any) -> tuple[Tensor, Tensor]:
        x = x.detach()
        z = spmm(edges.csr(), x, value, reduce)
        count = tie_counts(edges.csr(), x, None if value is None else value.view(-1, 1), z)
        filled = (edges.csr().indptr.diff() > 0).unsqueeze(-1)
        count = torch.where(z.isnan(), 1, torch.where(filled, count, 0)).to(torch.int32)
        ctx.edges, ctx.value = edges, value
        ctx.save_for_backward(x, z)
        ctx.mark_non_differentiable(count)
        return z.clone(), count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, z = ctx.saved_tensors
        transposed, value = ctx.edges.transposed(), ctx.value
        by_source = None if value is None else ctx.edges.transposed_weight(value).view(-1, 1)
        return extremum_grad(transposed.unpermuted(), x, by_source, z, grad.contiguous()), None, None, None
