"""The adjacency of a hop over slices: a layer multiplies it with its rank's rows, and gets their sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from pygdist.backends.slicing.chunk_plan import SlicePlan, chunks_within, known_plan
from pygdist.backends.slicing.chunked_autograd import hop_in_chunks
from pygdist.backends.slicing.chunked_hop import Ranks, Taken, Waiting
from pygdist.backends.slicing.sums import aggregate_slices
from pygdist.comm import Communicator
from pygdist.comm.slices import columns_of, gather_columns, split_columns, with_phantom_column
from pygdist.graph import Adjacency
from pygdist.graph.adjacency import Reduce, Slot
from pygdist.graph.identity import version_of
from pygdist.graph.memo import Memo
from pygdist.kernels import CSR, transpose
from pygdist.memory.overflow import Overflow

__all__ = ["SlicedAdjacency", "SlicedEdges", "sum_of_slices"]

_TRANSPOSED, _WEIGHTS_BACK = Slot[CSR]("transposed, spilled"), Slot[Memo[Tensor]]("weights by source, spilled")
_PLANS = Slot[dict[tuple[object, ...], SlicePlan]]("plans of sums")
_SHARES = Slot[dict[torch.dtype, Tensor]]("one over in-degrees")
_CHUNKS, _LARGE = 4, 4 << 20  # by default, of slices of so many bytes: smaller ones travel in no time


@dataclass(frozen=True, kw_only=True)
class SlicedEdges:
    """The edges of all ranks, and how ranks run a hop over them.

    Attributes:
        edges: In-edges of all ranks' rows.
        counts: How many rows each rank has.
        communicator: The ranks.
        weights_of_all: The weights of all ranks' edges in a dtype, from those of this rank's.
        kept_weights_of_all: The same of weights that stay as they are from pass to pass; nothing of others.
        factors_of_all: A factor for each row, whose products are these weights, if there are such; ``(N, 1)``.
        num_chunks: In how many chunks sources are split and sums are gathered; chosen by default.
        overlap: While others are aggregated.
        overflow: Where edges and slices are but for those of one chunk; on the device by default.
        splits: Slices of rows that several hops of a layer read, with these rows and their version; split once.
        runs_in_one_chunk: Told where ``num_chunks`` is not for a hop.
    """

    edges: Adjacency
    counts: tuple[int, ...]
    communicator: Communicator
    weights_of_all: Callable[[Tensor, torch.dtype], Tensor]
    kept_weights_of_all: Callable[[Tensor, torch.dtype], Tensor | None] = lambda value, dtype: None
    factors_of_all: Callable[[Tensor], Tensor | None]
    num_chunks: int | None = None
    overlap: bool = True
    overflow: Overflow | None = None
    splits: dict[int, tuple[Tensor, int, Tensor]] | None = None
    runs_in_one_chunk: Callable[[], None] = lambda: None

    def split(self, x: Tensor, label: str) -> Tensor:
        """This rank's columns of all ranks' rows."""
        if self.splits is None:
            return split_columns(x, self.counts, self.communicator, label=label)
        known, wanted = self.splits.get(id(x)), x.requires_grad and torch.is_grad_enabled()
        # rows split under no_grad carry no gradient back
        if known is not None and known[1] == version_of(x) and (known[2].requires_grad or not wanted):
            return known[2]
        out = split_columns(x, self.counts, self.communicator, label=label)
        self.splits[id(x)] = x, version_of(x), out
        return out

    def sums(self, x: Tensor, value: Tensor | None) -> bool:
        """Whether :func:`sum_of_slices` takes rows and weights like these."""
        if self.splits is not None:
            return False
        plain = value is None or (value.dim() == 1 and not value.requires_grad)
        return plain and x.dim() == 2 and _dtype_of(x, value) in (torch.float32, torch.float64)

    def plan(self, x: Tensor, value: Tensor | None) -> SlicePlan:
        """The edges by destination, in chunks; made once for rows of a width."""
        return self._plan("forward", self.edges.csr, x, value)

    def plan_back(self, grad: Tensor, value: Tensor | None) -> SlicePlan:
        """The edges by source, in chunks; made once for rows of a width."""
        return self._plan("backward", lambda: self.transposed().unpermuted(), grad, value)

    def transposed(self) -> CSR:
        """The edges by source."""
        if self.overflow is None:
            return self.edges.transposed()
        empty = self.overflow.empty
        return self.edges.slot(_TRANSPOSED, lambda: transpose(self.edges.csr(), empty))

    def weights_back(self, value: Tensor) -> Tensor:
        """Weights that stay as they are, by :meth:`transposed`."""
        if self.overflow is None:
            return self.edges.transposed_weight(value)
        perm, empty = self.transposed().perm, self.overflow.empty
        assert perm is not None
        return self.edges.slot(_WEIGHTS_BACK, Memo).get(
            (), (value,), lambda: torch.index_select(value, 0, perm, out=empty(tuple(value.shape), value.dtype))
        )

    def _plan(self, way: str, csr: Callable[[], CSR], x: Tensor, value: Tensor | None) -> SlicePlan:
        known = self.edges.slot(_PLANS, dict)
        weight_bytes = 0 if value is None else value.element_size()
        facts = (way, x.size(1), x.element_size(), weight_bytes, self.num_chunks)
        if facts not in known:
            num_chunks = self._chunks(csr(), x, weight_bytes)
            known[facts] = known_plan(self.edges, way, csr, self.counts, num_chunks, overflow=self.overflow)
        return known[facts]

    def _chunks(self, csr: CSR, x: Tensor, weight_bytes: int) -> int:
        if self.overflow is not None:  # the other half is for sources that travel
            fit = chunks_within(self.overflow.budget // 2, csr, self.counts, x.size(1), x.element_size(), weight_bytes)
            return max(fit, self.num_chunks or 1)
        if self.num_chunks is not None:
            return self.num_chunks
        values = sum(self.counts) * x.size(1) // len(self.counts)
        return _CHUNKS if self.overlap and values * x.element_size() >= _LARGE else 1


class SlicedAdjacency(Adjacency):
    """This rank's edges, over which a layer aggregates slices of all ranks."""

    _sliced: SlicedEdges
    _label: str

    @classmethod
    def over(cls, adjacency: Adjacency, sliced: SlicedEdges, label: str) -> SlicedAdjacency:
        """The same edges and weights."""
        out = cls.from_csr(adjacency.csr(), adjacency.value)
        assert isinstance(out, SlicedAdjacency)
        out._origin, out._sliced, out._label = adjacency.origin, sliced, label
        return out

    @override
    def with_value(self, value: Tensor | None) -> SlicedAdjacency:
        """The same edges with other weights."""
        return SlicedAdjacency.over(self.origin.with_value(value), self._sliced, self._label)

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
        sliced, value = self._sliced, self.value if input_value is None else input_value
        if reduce not in ("max", "min") and sliced.sums(other, value):
            return sum_of_slices(other, sliced, label=self._label, value=value, mean=reduce == "mean")
        dim = 1 if other.dim() == 3 else 0  # layers that stack features have their nodes in the second place
        if sliced.overflow is not None:
            return self._in_chunks(sliced.overflow, other.movedim(dim, 0), reduce, value).movedim(0, dim)
        sliced.runs_in_one_chunk()
        every = None if value is None else sliced.weights_of_all(value, value.dtype)
        part = with_phantom_column(sliced.split(other if dim == 0 else other.movedim(dim, 0), self._label))
        part = sliced.edges.with_value(every).matmul(part.movedim(0, dim), reduce=reduce).movedim(dim, 0)
        ranks, width = sliced.communicator, other.size(-1)
        own = columns_of(width, ranks.rank, ranks.world_size)
        part = part[..., : own.stop - own.start]
        out = gather_columns(part, sliced.counts, width, ranks, label=self._label)
        return out.movedim(0, dim)

    def _in_chunks(self, overflow: Overflow, rows: Tensor, reduce: Reduce, value: Tensor | None) -> Tensor:
        """The same within a budget."""
        sliced, communicator = self._sliced, self._sliced.communicator
        own = columns_of(rows.size(-1), communicator.rank, communicator.world_size)
        stacked, weighted = rows.dim() == 3, value is not None  # neither is held for the backward pass

        def run(edges: Adjacency, taken: list[Taken]) -> Tensor:
            assert taken[0].source is not None
            part, weights = with_phantom_column(taken[0].source), taken[1].edge if weighted else None
            part = edges.with_value(weights).matmul(part.transpose(0, 1) if stacked else part, reduce=reduce)
            return (part.transpose(0, 1) if stacked else part)[..., : own.stop - own.start]

        waiting = [Waiting(rows=rows, source=True, way="split")]
        if value is not None:
            every = sliced.kept_weights_of_all(value, value.dtype)
            waiting.append(
                Waiting(rows=value, name="edge weights", way="share") if every is None else Waiting(rows=every)
            )
        ranks = Ranks(communicator=communicator, counts=sliced.counts, overflow=overflow, overlap=sliced.overlap)
        (out,) = hop_in_chunks(run, waiting, sliced.edges, ranks, label=self._label, width=rows.size(-1))
        return out


def sum_of_slices(
    x: Tensor,
    sliced: SlicedEdges,
    *,
    label: str,
    value: Tensor | None = None,
    mean: bool = False,
    rounds: int = 1,
    own: Tensor | None = None,
) -> Tensor:
    r"""Sums or means over in-edges, again and again, each rank some of the columns; one way there and one back.

    Args:
        x: This rank's rows.
        sliced: The edges.
        label: Named when something goes wrong.
        value: The weights of this rank's edges, which need no gradient.
        mean: Divide by the number of in-edges.
        rounds: How many hops.
        own: In each hop a row is added to its sum, times this; not to means. Its gradient is of this rank's columns.

    Shapes:
        ``x`` and the result are :math:`(n, C)`, ``value`` is :math:`(e)` and ``own`` is :math:`(rounds)`.
    """
    dtype = _dtype_of(x, value)
    # rows that are scaled before and after take the place of weights, of which there are many more
    scaled = value is not None and value.dtype == dtype and own is None
    factors = sliced.factors_of_all(value) if scaled and value is not None else None
    every = None if value is None or factors is not None else sliced.weights_of_all(value, dtype)
    out: Tensor = _SlicedSum.apply(x.to(dtype), sliced, label, every, factors, mean, rounds, own)  # type: ignore[no-untyped-call]
    return out


class _SlicedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sliced: SlicedEdges,
        label: str,
        value: Tensor | None,
        factors: Tensor | None,
        mean: bool,
        rounds: int,
        own: Tensor | None,
    ) -> Tensor:
        ctx.sliced, ctx.label, ctx.value, ctx.rounds, ctx.own = sliced, label, value, rounds, own
        ctx.rows = list[Tensor]()  # of each hop, if the gradient of ``own`` asks for them

        def keep(number: int, rows: Tensor) -> None:
            kept = torch.empty_like(rows) if sliced.overflow is None else sliced.overflow.empty(rows.shape, rows.dtype)
            ctx.rows.append(kept.copy_(rows))

        after = factors
        if mean:
            shares = _shares(sliced.edges, x)
            after = shares if factors is None else factors * shares.to(factors.device)
        ctx.scales = factors, after
        return aggregate_slices(
            x.detach().contiguous(), sliced.plan(x, value), sliced.communicator, label=f"{label}, forward",
            value=None if value is None else value.unsqueeze(1), rounds=rounds,
            before=ctx.scales[0], after=ctx.scales[1], own=None if own is None else own.tolist(),
            visit=keep if own is not None and ctx.needs_input_grad[7] else None, overlap=sliced.overlap,
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sliced, value, own = ctx.sliced, ctx.value, ctx.own
        grad_own = torch.zeros_like(own) if ctx.rows else None

        def compare(number: int, grads: Tensor) -> None:
            assert grad_own is not None
            hop = ctx.rounds - 1 - number
            grad_own[hop] = torch.dot(grads.flatten(), ctx.rows[hop].flatten())

        found = aggregate_slices(
            grad.contiguous(), sliced.plan_back(grad, value), sliced.communicator, label=f"{ctx.label}, backward",
            value=None if value is None else sliced.weights_back(value).unsqueeze(1), rounds=ctx.rounds,
            before=ctx.scales[1], after=ctx.scales[0], own=None if own is None else own.tolist()[::-1],
            visit=compare if ctx.rows else None, overlap=sliced.overlap,
        )  # fmt: skip
        return found, None, None, None, None, None, None, grad_own


def _dtype_of(x: Tensor, value: Tensor | None) -> torch.dtype:
    return x.dtype if value is None else torch.promote_types(x.dtype, value.dtype)


def _shares(edges: Adjacency, like: Tensor) -> Tensor:
    """One over the number of each row's in-edges, ``(N, 1)``."""
    known = edges.slot(_SHARES, dict)
    if like.dtype not in known:
        with torch.inference_mode(False):
            known[like.dtype] = edges.csr().indptr.diff().clamp(min=1).to(like.dtype).reciprocal().unsqueeze(1)
    return known[like.dtype]
