"""Aggregations of one hop over all parts, from those over the edges of one part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import (
    Aggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.utils import scatter

from pygdist.backends.clones.delays import Delays
from pygdist.backends.clones.exchange import CloneExchange, Leaves, extremum, highest, summed
from pygdist.backends.passes.of_all_edges import OfAllEdges
from pygdist.comm.derivatives import once_differentiable
from pygdist.errors import InputError
from pygdist.graph.adjacency import Adjacency
from pygdist.hops.layer import stand_in
from pygdist.kernels.spmm import Reduce

_SOFTMAX = 1e-16  # which PyG adds to the sum


@dataclass(frozen=True, kw_only=True)
class HopFold:
    """Puts the results of one hop together.

    Attributes:
        exchange: The split nodes.
        of: The leaves that contribute.
        to: The leaves that get results.
        num_rows: Rows of the part. A result may have more; these are left as they are.
        edges: The hop's edges; ``None`` if they are no adjacency.
        in_degrees: The in-degrees that are known.
        delays: Brings the sums of other parts later; ``None`` exchanges them at once.
        label: Names the hop in errors.
    """

    exchange: CloneExchange
    of: Leaves
    to: Leaves
    num_rows: int
    edges: Adjacency | None
    in_degrees: OfAllEdges[Tensor]
    label: str
    delays: Delays | None = None

    def sum(self, z: Tensor, target: Tensor | None = None) -> Tensor:
        """Sum the rows ``(m, *)`` of each node; ``target`` is the end of each edge, unless edges are known."""
        if self.delays is None:
            return self._with_others(z, lambda rows: self._summed(rows, self.to, self.label))
        here, whole = (counts[: self.num_rows].double() for counts in self._counts(z.size(0), target))
        share = torch.where(here > 0, here / whole.clamp(min=1), 1.0)
        late = partial(self.delays.summed, share=share, of=self.of, to=self.to, label=self.label)
        return self._with_others(z, late)

    def mean(self, z: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the mean of all messages of each node, from their sums here and the end of each edge."""
        count = self._counts(z.size(0), target)[1].clamp(min=1).to(z.dtype)
        return self.sum(z, target) / count.view(-1, *[1] * (z.dim() - 1))

    def extremum(self, z: Tensor, count: Tensor, reduce: Reduce) -> Tensor:
        """Return the extremum over the rows ``(m, F)`` of each node, of which ``count`` edges attain the one here."""
        m, label = self.num_rows, self.label
        return self._with_others(
            z, lambda rows: extremum(rows, count[:m], self.exchange, of=self.of, to=self.to, reduce=reduce, label=label)
        )

    def softmax(self, src: Tensor, index: Tensor) -> Tensor:
        """Divide the exponential of each edge's score by the sum over all in-edges of its node; see PyG's ``softmax``.

        The largest score, which has no gradient, and the sum travel between leaves with in-edges and roots.
        """
        m = self.num_rows
        num_rows, shape = max(m, int(index.max()) + 1 if index.numel() else 0), src.shape[1:]
        most = src.new_full((num_rows, *shape), float("-inf"))
        places = index.view(-1, *[1] * len(shape)).expand_as(src)
        most = most.scatter_reduce(0, places, src.detach(), "amax")
        most = self._with_others(most, lambda rows: highest(rows, self.exchange, label=f"{self.label}, largest score"))
        out = (src - most.index_select(0, index)).exp()
        total = scatter(out, index, 0, num_rows, "sum")
        up, label = self.exchange.up, f"{self.label}, sum of exponentials"
        total = self._with_others(total, lambda rows: self._summed(rows, up, label))
        return out / (total + _SOFTMAX).index_select(0, index)

    def _summed(self, z: Tensor, to: Leaves, label: str) -> Tensor:
        return summed(z, self.exchange, of=self.of, to=to, label=label)

    def _with_others(self, z: Tensor, fold: Any) -> Tensor:
        """Apply ``fold`` to the rows of the part."""
        m = self.num_rows
        return fold(z) if z.size(0) == m else torch.cat([fold(z[:m]), z[m:]])

    def _counts(self, num_rows: int, target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Count the in-edges of each row here, and in all parts; on fixed edges the latter once."""
        if self.edges is not None:
            here = self.edges.csr().indptr.diff()
            everywhere = self._everywhere(self.edges, here)
            more = everywhere.new_ones(num_rows - everywhere.numel())
            return torch.cat([here, more]), torch.cat([everywhere, more])
        assert target is not None
        here = torch.bincount(target, minlength=num_rows)
        return here, self._with_others(here, self._count)

    def _everywhere(self, edges: Adjacency, here: Tensor) -> Tensor:
        if self.exchange.communicator.world_size == 1:
            return here.to(torch.int64)
        # a hop with delays does not wait for others, unless its edges are new
        return self.in_degrees.of(edges, partial(self._count, here), reader=self.label, asks=self.delays is None)

    def _count(self, here: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # training uses what evaluation may ask for first
            return self._summed(here.to(torch.int64), self.exchange.all, f"{self.label}, number of in-edges")


# -- messages ----------------------------------------------------------------------------------------------------------


def extremum_of_messages(messages: Tensor, target: Tensor, num_rows: int, reduce: Reduce) -> tuple[Tensor, Tensor]:
    r"""Return the extremum of the messages of each row, 0 without any, and the number of messages that attain it.

    Each of these gets the whole gradient of the extremum.

    Shapes:
        ``messages`` is :math:`(E, F)`, ``target`` :math:`(E)`, the results :math:`(N, F)`.
    """
    out: tuple[Tensor, Tensor] = _Messages.apply(messages, target, num_rows, reduce)  # type: ignore[no-untyped-call]
    return out


class _Messages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, messages: Tensor, target: Tensor, num_rows: int, reduce: Any) -> tuple[Tensor, Tensor]:
        messages = messages.detach()
        z = scatter(messages, target, 0, num_rows, reduce)
        attains = (messages == z[target]) | messages.isnan()
        count = scatter(attains.to(torch.int32), target, 0, num_rows, "sum")
        ctx.save_for_backward(attains, target)
        ctx.mark_non_differentiable(count)
        return z, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        attains, target = ctx.saved_tensors
        return torch.where(attains, grad.index_select(0, target), 0), None, None, None


FOLDED: tuple[type[Aggregation], ...] = (
    SumAggregation,
    MeanAggregation,
    MaxAggregation,
    MinAggregation,
    VarAggregation,
    StdAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    MultiAggregation,
    FusedAggregation,
)
"""PyG's aggregations that are sums and extrema, or are made of them."""


def folded(aggregation: Aggregation, fold: HopFold) -> Aggregation:
    """Return an aggregation of messages that takes those of all parts."""
    inner: dict[str, Any] = {"reduce": partial(reduced, fold)}
    for name, child in aggregation.named_children():
        if isinstance(child, nn.ModuleList):
            inner[name] = [folded(one, fold) for one in child if isinstance(one, Aggregation)]
        elif isinstance(child, Aggregation):
            inner[name] = folded(child, fold)
    if isinstance(aggregation, MultiAggregation):
        inner["fused_aggr"] = None  # which reads messages once for several reductions, and folds none
    return stand_in(aggregation, **inner)


def reduced(
    fold: HopFold,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    reduce: str = "sum",
) -> Tensor:
    """Reduce values of edges at their ends; see ``Aggregation.reduce`` of PyG."""
    assert index is not None, "layers pass the ends of edges"
    x, size = x.movedim(dim, 0), fold.num_rows if dim_size is None else dim_size
    if reduce in ("max", "min"):
        z, count = extremum_of_messages(x.flatten(1), index, size, reduce)  # type: ignore[arg-type]
        out = fold.extremum(z, count, reduce).view(-1, *x.shape[1:])  # type: ignore[arg-type]
    elif reduce not in ("sum", "add", "mean"):
        raise InputError(f"reduce='{reduce}' of values of edges cannot be put together from those of several parts")
    else:
        z = scatter(x, index, 0, size, "sum")
        out = fold.mean(z, index) if reduce == "mean" else fold.sum(z, index)
    return out.movedim(0, dim)
