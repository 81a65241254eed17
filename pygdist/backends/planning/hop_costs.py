"""Measures the costs of a model's hops: trains the model on some of each rank's rows and edges (NeutronStar, Sec. 3).

The paper's T_v and T_e are seconds per value, equal in all layers. Here each hop, and each step between hops, is timed
and has costs of its own: a layer of 600 features costs more than its width says, and a hop whose result is kept
(:class:`~pygdist.backends.Savings`) costs nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.passes.clock import Clock, running_s
from pygdist.backends.passes.rehearsal import Call, Kind, Rehearsal, Rehearse, within
from pygdist.comm import Communicator
from pygdist.graph import Adjacency
from pygdist.hops.arguments import copied, tensors_of
from pygdist.kernels import CSR, spmm

_FEW_ROWS, _FEW_EDGES = 8, 64  # a pass on so few takes the fixed time of any pass
_FIRST_ROWS, _FIRST_EDGES = 300, 6_000  # of the first part that a model is timed on
# The last part has as many rows as run for _ROWS_S, and about all edges into them: where rows have more edges, a hop
# takes less time for each edge. If these edges run for more than _EDGES_S, the part has fewer rows.
_ROWS_S, _EDGES_S = 0.03, 0.06
_LEAST_ROWS, _MOST_ROWS, _MOST_EDGES = 2_000, 30_000, 1_000_000
# Rows that stay in the processor's cache cost less than those of a graph. So the part has at least _FAR_BYTES of rows,
# or _MOST_SHARE of the rank's rows if that is less (a pass costs that share of an epoch), within the limits above.
_FAR_BYTES, _MOST_SHARE = 4 << 20, 0.4
_ROUNDS, _ROUND_S = 3, 0.05  # in each round all ranks make passes for _ROUND_S seconds, without waiting for each other
_FIRST_ROUND_S, _FEW_ROUND_S = 0.03, 0.02
_LEAST_S = 1e-9
_READ_EDGES, _MOST_COLUMNS, _TIMES = 100_000, 128, 2  # of the product that compares near and far reads
_OFTEN = 8  # from so many edges for each source on, kernels go slab by slab (worth_slabs in dispatch.cpp)


@dataclass(frozen=True, kw_only=True)
class HopCosts:
    """Seconds that rows and edges cost in each hop, forward and backward together.

    Attributes:
        row: ``row[l]`` for each row from hop ``l`` (the start for 0) to the next hop (the end after the last).
        edge: ``edge[l - 1]`` for each edge in hop ``l``.
        fetch: ``fetch[l - 1]`` for each row that is fetched for hop ``l``.
    """

    row: tuple[float, ...]
    edge: tuple[float, ...]
    fetch: tuple[float, ...]


@dataclass(frozen=True)
class Timed:
    """Measured seconds, forward and backward together, and counts.

    Attributes:
        row: Seconds of a row before the first hop, after it, and so on.
        edge: Seconds of an edge in each hop; 0 if the result of the hop is kept.
        fixed: Seconds of a pass that do not depend on the numbers of rows and edges.
        contention: Wall-clock seconds of a second of work, at least 1; more where ranks share a processor.
        exchanges: Exchanges of each hop: one of its rows, and those of each ``edge_updater`` before it.
        passes: Passes in which rows travel for each hop: forward, and backward if they need a gradient.
    """

    row: tuple[float, ...]
    edge: tuple[float, ...]
    fixed: float
    contention: float
    exchanges: tuple[int, ...]
    passes: tuple[int, ...]

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Timed:
        """Rebuild the object from ``dataclasses.asdict`` after JSON, which turns tuples into lists."""
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in saved.items()}
        return cls(**values)


@dataclass(frozen=True)
class _Average:
    """A pass on a part of the graph, averaged over all ranks.

    Attributes:
        rows: Rows of a rank's part.
        edges: Edges of it.
        between: Seconds between hops, one more than there are hops.
        inside: Seconds in each hop.
        first_edge_s: Seconds of an edge on the slowest rank, in the first pass: only it runs hops with a kept result.
        contention: See :class:`Timed`.
        counts: ``(3, hops)``: reads of the sources (1, or 2 with a backward pass), exchanges, passes (:class:`Timed`).
    """

    rows: float
    edges: float
    between: Tensor
    inside: Tensor
    first_edge_s: float
    contention: float
    counts: Tensor


@dataclass(frozen=True)
class _Trials:
    """Trains the model on parts of the graph, on all ranks at once, as a rank alone on a shared machine is faster."""

    call: Call
    rehearse: Rehearse
    begin_pass: Callable[[], None]
    adjacency: Adjacency
    communicator: Communicator
    num_hops: int

    def run(self, num_rows: int, num_edges: int, rounds: int, round_s: float) -> _Average:
        """Time passes on a part of about ``num_rows`` and ``num_edges``, in rounds of ``round_s`` seconds."""
        part = _part(self.adjacency, num_rows, num_edges)
        clock = Clock(part.device)
        rehearsal = Rehearsal(part.num_dst, clock)
        cut = self.call.changed(partial(_cut, part=part))

        def step() -> Tensor:
            rehearsal.begin_pass()
            self.begin_pass()
            args, kwargs = copied(self.call.model.forward, *cut)
            return _loss(self.call.model.forward(*args, **kwargs))

        runs = part.num_dst > 0 and part.size(1) > 0
        timed = partial(self._round, clock, step if runs else None)
        with self.rehearse(rehearsal, True):
            first, _ = timed(0.0)
            splits, pass_s = zip(*(timed(round_s) for _ in range(rounds)), strict=True)
        counts = [  # all of them 1 on a rank without rows
            (1 + (hop in clock.graded), 1 + rehearsal.exchanges.get(hop, 0), 1 + (hop in rehearsal.graded))
            for hop in range(1, self.num_hops + 1)
        ]
        rows, edges = (part.num_dst, part.size(1)) if runs else (0, 0)
        first_s = float(first[self.num_hops + 1 :].sum())
        numbers = [rows, edges, first_s, statistics.median(pass_s), *torch.tensor(counts).t().flatten().tolist()]
        return _average(self.communicator.gather([*numbers, *torch.stack(splits).mean(0).tolist()]), self.num_hops)

    def _round(self, clock: Clock, step: Callable[[], Tensor] | None, round_s: float) -> tuple[Tensor, float]:
        """Make passes for ``round_s``, at least one; return a pass's seconds: between and in hops, wall clock."""
        parameters: list[Tensor] = [one for one in self.call.model.parameters() if one.requires_grad]
        splits: list[Tensor] = []
        self.communicator.barrier()
        start = time.perf_counter()
        while step is not None and (not splits or time.perf_counter() - start < round_s):
            between, inside = clock.seconds(step, parameters, self.num_hops)
            splits.append(torch.tensor([*between, *inside], dtype=torch.float64))
        pass_s = (time.perf_counter() - start) / max(len(splits), 1)
        nothing = torch.zeros(2 * self.num_hops + 1, dtype=torch.float64)
        return torch.stack(splits).mean(0) if splits else nothing, pass_s


def _average(everyone: Tensor, num_hops: int) -> _Average:
    """The average of what ranks measured, a row each: see :meth:`_Trials.run`."""
    rows, edges, first_s, pass_s = everyone[:, :4].unbind(1)
    num_ranks = max(int((rows > 0).sum()), 1)
    split = everyone[:, 4 + 3 * num_hops :].sum(0) / num_ranks
    running = float(split.sum())
    # the slowest rank sets the epoch; pass_s are medians, as other processes may use the machine
    contention = float(pass_s.max()) / running if running else 1.0
    split *= contention
    return _Average(
        rows=float(rows.sum()) / num_ranks,
        edges=float(edges.sum()) / num_ranks,
        between=split[: num_hops + 1],
        inside=split[num_hops + 1 :],
        first_edge_s=float((first_s / edges.clamp(min=1)).max()),
        contention=max(contention, 1.0),
        counts=everyone[:, 4 : 4 + 3 * num_hops].amax(0).view(3, num_hops),
    )


def time_hops(
    call: Call,
    rehearse: Rehearse,
    begin_pass: Callable[[], None],
    adjacency: Adjacency,
    communicator: Communicator,
    widths: Sequence[int],
) -> Timed:
    """Measure the seconds of rows between hops and of edges in them; all ranks call it together, and get the same.

    Args:
        call: The model, and what it is called with.
        rehearse: Runs the model without exchanges; see :data:`~pygdist.backends.passes.rehearsal.Rehearse`.
        begin_pass: Called before each pass.
        adjacency: The rank's edges.
        communicator: The ranks.
        widths: Values of a source row that each hop reads.
    """
    floats = (one for one in call.model.parameters() if one.is_floating_point())
    like = next(floats, torch.empty(0, device=adjacency.device)).detach()
    trials = _Trials(call, rehearse, begin_pass, adjacency, communicator, len(widths))
    with torch.enable_grad():
        first = trials.run(_FIRST_ROWS, _FIRST_EDGES, 1, _FIRST_ROUND_S)
        few = trials.run(_FEW_ROWS, _FEW_EDGES, _ROUNDS, _FEW_ROUND_S)
        num_rows, num_edges = _enough(first, few, adjacency, _FAR_BYTES // (max(*widths, 1) * like.element_size()))
        many = trials.run(num_rows, num_edges, _ROUNDS, _ROUND_S)
    row = (many.between - few.between).clamp(min=_LEAST_S) / max(many.rows - few.rows, 1.0)
    edge = (many.inside - few.inside).clamp(min=_LEAST_S) / max(many.edges - few.edges, 1.0)
    # a part's rows may fit the cache, the graph's do not: add the extra time of far reads
    widths_read = [width if ran else 0 for width, ran in zip(widths, many.inside > 0, strict=True)]
    communicator.barrier()  # ranks share memory too
    far_s = {width: _far_read_s(adjacency, num_rows, width, like) for width in set(widths_read)}
    reads, exchanges, passes = many.counts
    edge += reads * many.contention * communicator.gather([far_s[width] for width in widths_read]).mean(0)
    edge = torch.where(many.inside > 0, edge, 0.0)  # a hop whose result is kept takes nothing
    fixed_row, fixed_edge = (few.between - row * few.rows).clamp(min=0), (few.inside - edge * few.edges).clamp(min=0)
    return Timed(
        row=tuple(row.tolist()),
        edge=tuple(edge.tolist()),
        fixed=float(fixed_row.sum() + fixed_edge.sum()),
        contention=many.contention,
        exchanges=tuple(exchanges.int().tolist()),
        passes=tuple(passes.int().tolist()),
    )


def _enough(first: _Average, few: _Average, adjacency: Adjacency, far_rows: int) -> tuple[int, int]:
    """Choose the rows and edges of a part that is large enough to time; ``far_rows`` rows overflow the cache."""

    def seconds(many: Tensor, some: Tensor, count: float) -> float:
        """Seconds of one row or edge without the pass's fixed cost; at least a quarter of those with the fixed cost."""
        return max(float(many.sum() - some.sum()), float(many.sum()) / 4) / max(count, 1.0)

    row_s = seconds(first.between, few.between, first.rows)
    edge_s = seconds(first.inside, few.inside, first.edges)
    num_rows = max(int(_ROWS_S / max(row_s, _LEAST_S)), min(far_rows, int(_MOST_SHARE * adjacency.num_dst)))
    num_edges = min(int(_EDGES_S / max(edge_s, first.first_edge_s, _LEAST_S)), _MOST_EDGES)
    degree = adjacency.size(1) / max(adjacency.num_dst, 1)
    return min(num_rows, _MOST_ROWS, max(int(num_edges / max(degree, 1.0)), _LEAST_ROWS)), num_edges


def _part(adjacency: Adjacency, num_rows: int, num_edges: int) -> Adjacency:
    """Cut a part: the first rows, and an even sample of about ``num_edges`` of their in-edges. Sources wrap into it."""
    csr = _sampled(adjacency, num_rows, num_edges)
    return Adjacency.from_csr(CSR(csr.indptr, csr.index % max(csr.num_rows, 1), csr.num_rows))


def _sampled(adjacency: Adjacency, num_rows: int, num_edges: int) -> CSR:
    """Take the first rows, and an even sample of about ``num_edges`` of their in-edges."""
    csr = adjacency.csr()
    num_rows = min(csr.num_rows, num_rows)
    end = int(csr.indptr[num_rows])
    step = max(1, -(-end // max(num_edges, 1)))
    indptr = (csr.indptr[: num_rows + 1] + step - 1).div(step, rounding_mode="floor")
    return CSR(indptr, csr.index[:end:step].contiguous(), csr.num_cols)


def _far_read_s(adjacency: Adjacency, num_rows: int, width: int, like: Tensor) -> float:
    """Extra seconds to read a source anywhere among the rank's sources, compared with one in a part's rows."""
    csr = adjacency.csr()
    if width == 0 or csr.num_entries == 0 or like.dtype not in (torch.float32, torch.float64):
        return 0.0
    # kernels read frequent sources a few columns at a time: take enough edges that they do so here, as in a hop
    often = csr.num_entries >= _OFTEN * csr.num_cols
    num_edges = min(max(_READ_EDGES, _OFTEN * csr.num_cols if often else 0), _MOST_EDGES)
    far = _sampled(adjacency, -(-num_edges * csr.num_rows // csr.num_entries), num_edges)
    near = CSR(far.indptr, far.index % max(num_rows, 1), min(max(num_rows, 1), far.num_cols))
    columns, taken = min(width, _MOST_COLUMNS), []
    with torch.no_grad():
        for edges in (near, far):
            x = like.new_ones(edges.num_cols, columns)
            spmm(edges, x)  # warm up
            start = running_s(x.device)
            for _ in range(_TIMES):
                spmm(edges, x)
            taken.append((running_s(x.device) - start) / _TIMES)
    near_s, far_s = taken
    return width / columns * max(far_s - near_s, 0.0) / max(far.num_entries, 1)


def _cut(value: Any, kind: Kind, part: Adjacency) -> Any:
    """An argument of the model, cut to the rows and edges of a part."""
    if isinstance(value, Adjacency):
        return part if value.value is None else part.with_value(value.value[: part.size(1)])
    rows = part.num_dst if kind == "node" else part.size(1)
    value = within(value, part.num_dst) if kind is None else value[:rows]
    # the model may write into what it gets, and autograd takes no tensor that was made in inference mode
    return value.clone() if isinstance(value, Tensor) else value


def _loss(out: Any) -> Tensor:
    """One number from all outputs of the model, at about the cost of a loss over classes."""
    parts = [one for one in tensors_of(out) if one.is_floating_point()]
    return sum((one.logsumexp(-1).sum() if one.dim() > 1 else one.sum() for one in parts), torch.zeros(()))
