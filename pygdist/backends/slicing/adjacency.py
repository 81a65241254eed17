r"""The adjacency of a hop on slices: a layer multiplies it with its rank's rows and gets the rank's sums.

Rows travel :math:`(n, C) \to (N, c)` before the product and results :math:`(N, c) \to (n, C)` after it; the layer runs
unchanged and sees neither. This holds for hops that are one sparse product, which mixes no columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from pygdist.backends.slicing.all_nodes import SliceLayout
from pygdist.backends.slicing.chunk_plan import ChunkBytes, ChunkPlan, plan_for
from pygdist.backends.slicing.chunked_autograd import hop_in_chunks
from pygdist.backends.slicing.chunked_hop import ChunkInput, ChunkRows
from pygdist.backends.slicing.sums import Rounds, aggregate_slices
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.slices import with_phantom_column
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Reduce, Slot
from pygdist.graph.identity import version_of
from pygdist.graph.memo import Memo
from pygdist.hops.routed_edges import RoutedAdjacency
from pygdist.kernels import CSR, transpose

_TRANSPOSED, _WEIGHTS_BACK = Slot[CSR]("transposed, spilled"), Slot[Memo[Tensor]]("weights by source, spilled")
_SHARES = Slot[dict[torch.dtype, Tensor]]("one over in-degrees")
_CHUNKS, _LARGE = 4, 4 << 20  # by default, for slices of so many bytes: smaller ones travel in no time


@dataclass(frozen=True, kw_only=True)
class SlicedEdges:
    """The edges of all ranks, and the means by which ranks run a hop over them.

    Attributes:
        edges: In-edges of all ranks' rows.
        layout: The rows of each rank.
        label: Names the hop in errors.
        weights_of_all: Turns the weights of this rank's edges into those of all ranks' edges, in a dtype.
        kept_weights_of_all: The same for weights that stay the same from pass to pass; ``None`` for others.
        factors_of_all: Finds a factor for each row such that weights are products of these, ``(N, 1)``, or ``None``.
        num_chunks: Number of chunks of sums; by default a few where slices are large. More if memory asks for them.
        splits: Cache of slices of rows that several hops of a layer read, with these rows and their version.
        runs_in_one_chunk: Called for a hop to which ``num_chunks`` does not apply.
    """

    edges: Adjacency
    layout: SliceLayout
    label: str
    weights_of_all: Callable[[Tensor, torch.dtype], Tensor]
    kept_weights_of_all: Callable[[Tensor, torch.dtype], Tensor | None] = lambda value, dtype: None
    factors_of_all: Callable[[Tensor], Tensor | None]
    num_chunks: int | None = None
    splits: dict[int, tuple[Tensor, int, Tensor]] | None = None
    runs_in_one_chunk: Callable[[], None] = lambda: None

    def split(self, x: Tensor) -> Tensor:
        """Return this rank's columns of all ranks' rows; once for rows that several hops read."""
        if self.splits is None:
            return self.layout.split(x, self.label)
        if id(x) in self.splits:
            _, version, slices = self.splits[id(x)]
            needs_gradient = x.requires_grad and torch.is_grad_enabled()
            # rows split under no_grad carry no gradient back
            if version == version_of(x) and (slices.requires_grad or not needs_gradient):
                return slices
        slices = self.layout.split(x, self.label)
        self.splits[id(x)] = x, version_of(x), slices
        return slices

    def sums(self, x: Tensor, value: Tensor | None) -> bool:
        """True if :func:`sum_of_slices` takes such rows and weights."""
        if self.splits is not None:
            return False
        plain = value is None or (value.dim() == 1 and not value.requires_grad)
        return plain and x.dim() == 2 and _dtype_of(x, value) in (torch.float32, torch.float64)

    def transposed(self) -> CSR:
        """Return the edges by source; made once."""
        overflow = self.layout.overflow
        if overflow is None:
            return self.edges.transposed()
        return self.edges.slot(_TRANSPOSED, lambda: transpose(self.edges.csr(), overflow.empty))

    def weights_back(self, value: Tensor) -> Tensor:
        """Return the weights in the order of :meth:`transposed`; made once for weights that stay the same."""
        overflow, perm = self.layout.overflow, self.transposed().perm
        if overflow is None:
            return self.edges.transposed_weight(value)
        assert perm is not None
        return self.edges.slot(_WEIGHTS_BACK, Memo).get(
            (), (value,), lambda: torch.index_select(value, 0, perm, out=overflow.empty(value.shape, value.dtype))
        )

    def plan(self, x: Tensor, value: Tensor | None, *, back: bool = False) -> ChunkPlan:
        """Return the chunks of the edges by destination, or by source if ``back``."""
        way, csr = ("backward", lambda: self.transposed().unpermuted()) if back else ("forward", self.edges.csr)
        layout, (_, width) = self.layout, x.shape
        if layout.overflow is None:
            values = layout.num_rows * width // len(layout.counts)
            large = layout.overlap and values * x.element_size() >= _LARGE
            return plan_for(self.edges, way, csr, layout, self.num_chunks or (_CHUNKS if large else 1))
        held = -(-width // len(layout.counts)) * x.element_size()
        edge = 0 if value is None else value.element_size()
        needs = ChunkBytes(read=held, edge=edge, made=held, whole=width * x.element_size())
        return plan_for(self.edges, way, csr, layout, self.num_chunks or 1, needs)


class SlicedAdjacency(RoutedAdjacency[SlicedEdges]):
    """This rank's edges, over which a layer aggregates slices of all ranks' rows."""

    @override
    def matmul(
        self,
        other: Tensor,
        input_value: Tensor | None = None,
        other_value: None = None,
        reduce: Reduce = "sum",
        transpose: bool = False,
    ) -> Tensor:
        """Aggregate; ``other`` and the result hold the rows of this rank alone."""
        sliced, value = self.way, self.value if input_value is None else input_value
        if reduce not in ("max", "min") and sliced.sums(other, value):
            return sum_of_slices(other, sliced, value=value, mean=reduce == "mean")
        dim = 1 if other.dim() == 3 else 0  # layers that stack features have their nodes in the second place
        rows = other if dim == 0 else other.movedim(dim, 0)  # rows that are split once are known by object
        if sliced.layout.overflow is not None:
            return self._in_chunks(rows, reduce, value).movedim(0, dim)
        sliced.runs_in_one_chunk()
        edges = sliced.edges.with_value(None if value is None else sliced.weights_of_all(value, value.dtype))
        out = _product(edges, sliced.split(rows), reduce)
        return sliced.layout.gather(out, other.size(-1), sliced.label).movedim(0, dim)

    def _in_chunks(self, rows: Tensor, reduce: Reduce, value: Tensor | None) -> Tensor:
        """Aggregate chunk by chunk, within the budget."""
        sliced, width = self.way, rows.size(-1)
        held = sliced.layout.held(width)

        def compute(edges: Adjacency, of_chunk: list[ChunkRows]) -> Tensor:
            sources, weights = of_chunk[0].source, of_chunk[1].edge if len(of_chunk) > 1 else None
            assert sources is not None
            return _product(edges.with_value(weights), sources, reduce)[..., :held]

        inputs = [ChunkInput(rows=rows, source=True, way="split")]
        if value is not None:
            weights = sliced.kept_weights_of_all(value, value.dtype)
            travels = ChunkInput(rows=value, name="edge weights", way="share")
            inputs.append(travels if weights is None else ChunkInput(rows=weights))
        (out,) = hop_in_chunks(compute, inputs, sliced.edges, sliced.layout, label=sliced.label, width=width)
        return out


def _product(edges: Adjacency, rows: Tensor, reduce: Reduce) -> Tensor:
    """Aggregate rows, ``(N, c)`` or stacked ``(N, K, c)``; a rank without columns aggregates a phantom column."""
    dim = 1 if rows.dim() == 3 else 0
    return edges.matmul(with_phantom_column(rows).movedim(0, dim), reduce=reduce).movedim(dim, 0)


def sum_of_slices(
    x: Tensor,
    sliced: SlicedEdges,
    *,
    value: Tensor | None = None,
    mean: bool = False,
    rounds: int = 1,
    own_factors: Tensor | None = None,
) -> Tensor:
    r"""Sum or average over in-edges ``rounds`` times, each rank some columns; rows travel once each way.

    Args:
        x: This rank's rows.
        sliced: The edges.
        value: Weights of this rank's edges, which need no gradient.
        mean: Divide by the number of in-edges.
        rounds: Number of hops.
        own_factors: In each hop a row is added to its sum, times this; not with ``mean``. The gradient that each rank
            gets is that of its columns.

    Shapes:
        ``x`` and the result are :math:`(n, C)`, ``value`` is :math:`(e)` and ``own_factors`` is :math:`(rounds)`.
    """
    dtype = _dtype_of(x, value)
    # rows that are scaled before and after stand for weights, of which there are many more
    scaled = value is not None and value.dtype == dtype and own_factors is None
    factors = sliced.factors_of_all(value) if scaled and value is not None else None
    weights = None if value is None or factors is not None else sliced.weights_of_all(value, dtype)
    x, after = x.to(dtype), factors
    if mean:
        shares = _shares(sliced.edges, dtype)
        after = shares if factors is None else factors * shares.to(factors.device)
    numbers = None if own_factors is None else own_factors.tolist()
    hops = Rounds(number=rounds, before=factors, after=after, own_factors=numbers)
    out: Tensor = _SlicedSum.apply(x, own_factors, sliced, weights, hops)  # type: ignore[no-untyped-call]
    return out


class _SlicedSum(torch.autograd.Function):
    r"""Sums and means over in-edges: rows :math:`(n, C) \to (N, c)`, hops, then :math:`(N, c) \to (n, C)`.

    The backward pass sends the gradient of the result the same way, over the edges by source: each rank its columns of
    all rows' gradients, then to the owner of each row all columns of its gradient. The gradient of ``own_factors`` is
    each rank's own, of its columns.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own_factors: Tensor | None, sliced: SlicedEdges, weights: Tensor | None, hops: Rounds
    ) -> Tensor:
        ctx.sliced, ctx.weights, ctx.hops, ctx.own_factors = sliced, weights, hops, own_factors
        ctx.rows = list[Tensor]()  # before each hop, if the gradient of ``own_factors`` needs them
        overflow = sliced.layout.overflow

        def keep(hop: int, rows: Tensor) -> None:
            copy = torch.empty_like(rows) if overflow is None else overflow.empty(tuple(rows.shape), rows.dtype)
            ctx.rows.append(copy.copy_(rows))

        if ctx.needs_input_grad[1]:
            hops = replace(hops, visit=keep)
        x, plan = x.detach().contiguous(), sliced.plan(x, weights)
        value = None if weights is None else weights.unsqueeze(1)
        return aggregate_slices(x, plan, sliced.layout, hops, label=f"{sliced.label}, forward", value=value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sliced, weights, hops, rows_before = ctx.sliced, ctx.weights, ctx.hops.reversed(), ctx.rows
        grad_own_factors, last = torch.zeros_like(ctx.own_factors) if rows_before else None, hops.number - 1

        def compare(number: int, grads: Tensor) -> None:
            assert grad_own_factors is not None
            grad_own_factors[last - number] = torch.dot(grads.flatten(), rows_before[last - number].flatten())

        if rows_before:
            hops = replace(hops, visit=compare)
        grad, plan = grad.contiguous(), sliced.plan(grad, weights, back=True)
        value = None if weights is None else sliced.weights_back(weights).unsqueeze(1)
        grad_x = aggregate_slices(grad, plan, sliced.layout, hops, label=f"{sliced.label}, backward", value=value)
        return grad_x, grad_own_factors, None, None, None


def _dtype_of(x: Tensor, value: Tensor | None) -> torch.dtype:
    return x.dtype if value is None else torch.promote_types(x.dtype, value.dtype)


def _shares(edges: Adjacency, dtype: torch.dtype) -> Tensor:
    """Return one over the number of each row's in-edges, ``(N, 1)``; made once for a dtype."""
    by_dtype = edges.slot(_SHARES, dict)
    if dtype not in by_dtype:
        with torch.inference_mode(False):
            by_dtype[dtype] = edges.csr().indptr.diff().clamp(min=1).to(dtype).reciprocal().unsqueeze(1)
    return by_dtype[dtype]
