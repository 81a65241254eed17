"""What a model's hops cost: it trains a few times on some of each rank's rows and edges (NeutronStar, Sec. 3)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.passes.clock import Clock, running_s
from pygdist.backends.passes.rehearsal import Call, Kind, Rehearsal, Rehearse, within
from pygdist.comm import Communicator
from pygdist.graph import Adjacency
from pygdist.hops.arguments import tensors_of
from pygdist.kernels import CSR, spmm

__all__ = ["HopCosts", "Timed", "time_hops"]

_FEW_ROWS, _FEW_EDGES = 8, 64  # take as long as a pass takes however small the graph
_FIRST_ROWS, _FIRST_EDGES = 300, 6_000  # that a model is timed on at first
# Then on as many rows as take so long, and all edges into them: a hop takes some time for each row, however few edges
# go into it, and an edge less where they are many. If edges take longer, on fewer rows, but for some.
_ROWS_S, _EDGES_S = 0.03, 0.06
_LEAST_ROWS, _MOST_ROWS, _MOST_EDGES = 2_000, 30_000, 1_000_000
# Rows that stay in the processor's cache from one operation to the next cost less than those of a graph: at least so
# many bytes of them, but no more than a share of the rank's own, as each pass costs that share of an epoch.
_FAR_BYTES, _MOST_SHARE = 4 << 20, 0.4
_ROUNDS, _ROUND_S = 3, 0.05  # in each of which all ranks make passes for so long, without waiting for each other
_FIRST_ROUND_S, _FEW_ROUND_S = 0.03, 0.02
_LEAST_S = 1e-9
_EDGES_BY_WAY, _MOST_COLUMNS, _TIMES = 100_000, 128, 2  # that rows near and far are read over, and of each row
_OFTEN = 8  # edges for each source, from which on kernels go slab by slab (dispatch.cpp)


@dataclass(frozen=True, kw_only=True)
class HopCosts:
    """Seconds, forward and backward together, by hop.

    Attributes:
        row: ``row[l]`` for each row between hop ``l`` (0 for the start) and the next (the end).
        edge: ``edge[l - 1]`` for each edge in hop ``l``.
        fetch: ``fetch[l - 1]`` for each row that is fetched for hop ``l``.
    """

    row: tuple[float, ...]
    edge: tuple[float, ...]
    fetch: tuple[float, ...]

    def to_dict(self) -> dict[str, list[float]]:
        """For JSON."""
        return {name: list(values) for name, values in asdict(self).items()}


@dataclass(frozen=True)
class Timed:
    """Seconds, forward and backward.

    Attributes:
        row: Of a row before the first hop, after it, and so on.
        edge: Of an edge in each hop; 0 if what the hop makes is kept.
        fixed: Of a pass, however many rows and edges there are.
        contention: How long ranks take for what a processor does in a second, at least 1: they may have to share one.
        exchanges: How many exchanges each hop makes, that of its rows and those before it.
        passes: In how many passes rows travel for each hop: forward, and backward if they need a gradient.
    """

    row: tuple[float, ...]
    edge: tuple[float, ...]
    fixed: float
    contention: float
    exchanges: tuple[int, ...]
    passes: tuple[int, ...]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Timed:
        """From what came of JSON."""
        return cls(
            tuple(given["row"]), tuple(given["edge"]), float(given["fixed"]), float(given["contention"]),
            tuple(given["exchanges"]), tuple(given["passes"]),
        )  # fmt: skip


@dataclass(frozen=True)
class _Passes:
    """What passes took.

    Attributes:
        num_rows: Of the graph that this rank's ran on.
        num_edges: Of it.
        split_s: Seconds in which this rank ran between hops (one more than there are hops), then in hops.
        first_s: In the hops of the first pass, which makes what is kept.
        pass_s: Seconds of a pass on the slowest rank, whether it ran or waited for a processor.
        reads: How often each hop reads its sources: forward, and backward if it has such a pass.
        exchanges: See :class:`Timed`.
        passes: See :class:`Timed`.
    """

    num_rows: int
    num_edges: int
    split_s: Tensor
    first_s: float
    pass_s: float
    reads: Tensor
    exchanges: tuple[int, ...]
    passes: tuple[int, ...]


@dataclass(frozen=True)
class _Average:
    """What passes took, over all ranks.

    Attributes:
        rows: Of the graph of a rank.
        edges: Of it.
        between: Seconds between hops.
        inside: Seconds in each hop.
        first_edge_s: Seconds of an edge in the first pass, on the slowest rank.
        contention: See :class:`Timed`.
        reads: See :class:`_Passes`.
        exchanges: See :class:`Timed`.
        passes: See :class:`Timed`.
    """

    rows: float
    edges: float
    between: Tensor
    inside: Tensor
    first_edge_s: float
    contention: float
    reads: Tensor
    exchanges: tuple[int, ...]
    passes: tuple[int, ...]


def time_hops(
    call: Call,
    rehearse: Rehearse,
    begin_pass: Callable[[], None],
    adjacency: Adjacency,
    communicator: Communicator,
    widths: Sequence[int],
) -> Timed:
    """What rows cost between hops, and edges in them; every rank makes the call at the same time and gets the same.

    Args:
        call: The model, and what it is given.
        rehearse: Runs it by itself.
        begin_pass: Called before each pass.
        adjacency: The rank's edges.
        communicator: The ranks.
        widths: How many values of a source each hop reads.
    """
    num_hops = len(widths)
    like = next((one for one in call.model.parameters() if one.is_floating_point()), torch.empty(0)).detach()

    def timed(num_rows: int, num_edges: int, rounds: int, seconds: float) -> _Average:
        part = _part(adjacency, num_rows, num_edges)
        return _average(communicator, _train(call, rehearse, begin_pass, part, communicator, num_hops, rounds, seconds))

    with torch.enable_grad():
        first = timed(_FIRST_ROWS, _FIRST_EDGES, 1, _FIRST_ROUND_S)
        few = timed(_FEW_ROWS, _FEW_EDGES, _ROUNDS, _FEW_ROUND_S)
        row_s, edge_s = (
            max(float(many.sum() - some.sum()), float(many.sum()) / 4) / max(more, 1.0)
            for (many, more), (some, _) in zip(_parts_of(first), _parts_of(few), strict=True)
        )
        far = _FAR_BYTES // (max(*widths, 1) * like.element_size())
        num_rows = max(int(_ROWS_S / max(row_s, 1e-9)), min(far, int(_MOST_SHARE * adjacency.num_dst)))
        num_edges = min(int(_EDGES_S / max(edge_s, first.first_edge_s, 1e-9)), _MOST_EDGES)
        degree = adjacency.size(1) / max(adjacency.num_dst, 1)
        num_rows = min(num_rows, _MOST_ROWS, max(int(num_edges / max(degree, 1.0)), _LEAST_ROWS))
        found = timed(num_rows, num_edges, _ROUNDS, _ROUND_S)
    row, edge = (
        (many - some).clamp(min=_LEAST_S) / max(more - less, 1.0)
        for (many, more), (some, less) in zip(_parts_of(found), _parts_of(few), strict=True)
    )
    # the few rows of a part are nearer to the processor than those of the graph
    wide = [width if ran else 0 for width, ran in zip(widths, found.inside > 0, strict=True)]
    communicator.barrier()  # ranks share memory too
    known = {width: _farther(adjacency, num_rows, width, like) for width in set(wide)}
    farther = communicator.gather([known[width] for width in wide]).mean(0)
    edge += found.reads * found.contention * farther
    edge = torch.where(found.inside > 0, edge, 0.0)  # what is kept takes nothing
    fixed = float(
        (few.between - row * few.rows).clamp(min=0).sum() + (few.inside - edge * few.edges).clamp(min=0).sum()
    )
    return Timed(
        tuple(row.tolist()), tuple(edge.tolist()), fixed, found.contention, found.exchanges, found.passes,
    )  # fmt: skip


def _parts_of(average: _Average) -> tuple[tuple[Tensor, float], tuple[Tensor, float]]:
    """Seconds for rows and how many they are, and the same of edges."""
    return (average.between, average.rows), (average.inside, average.edges)


def _part(adjacency: Adjacency, num_rows: int, num_edges: int) -> Adjacency:
    """The first rows, and of the edges into them as many as asked for, evenly; sources fall among these rows."""
    csr = _sampled(adjacency, num_rows, num_edges)
    return Adjacency.from_csr(CSR(csr.indptr, csr.index % max(csr.num_rows, 1), csr.num_rows))


def _sampled(adjacency: Adjacency, num_rows: int, num_edges: int) -> CSR:
    csr = adjacency.csr()
    num_rows = min(csr.num_rows, num_rows)
    end = int(csr.indptr[num_rows])
    every = max(1, -(-end // max(num_edges, 1)))
    indptr = (csr.indptr[: num_rows + 1] + every - 1).div(every, rounding_mode="floor")
    return CSR(indptr, csr.index[:end:every].contiguous(), csr.num_cols)


def _farther(adjacency: Adjacency, num_rows: int, width: int, like: Tensor) -> float:
    """Seconds that reading a source takes more if it may be any that the rank's edges have, not one of a part."""
    csr = adjacency.csr()
    if width == 0 or csr.num_entries == 0 or like.dtype not in (torch.float32, torch.float64):
        return 0.0
    # where sources are read often they are read a few columns at a time, as those of a hop are
    often = csr.num_entries >= _OFTEN * csr.num_cols
    num_edges = min(max(_EDGES_BY_WAY, _OFTEN * csr.num_cols if often else 0), _MOST_EDGES)
    whole = -(-num_edges * csr.num_rows // csr.num_entries)  # rows that have so many, all of them
    far = _sampled(adjacency, whole, num_edges)
    near = CSR(far.indptr, far.index % max(num_rows, 1), min(max(num_rows, 1), far.num_cols))
    columns, taken = min(width, _MOST_COLUMNS), []
    with torch.no_grad():
        for one in (near, far):
            x = like.new_ones(one.num_cols, columns)
            spmm(one, x)  # what was read before is near
            start = running_s(x.device)
            for _ in range(_TIMES):
                spmm(one, x)
            taken.append((running_s(x.device) - start) / _TIMES)
    return width / columns * max(taken[1] - taken[0], 0.0) / max(far.num_entries, 1)


def _train(
    call: Call,
    rehearse: Rehearse,
    begin_pass: Callable[[], None],
    part: Adjacency,
    communicator: Communicator,
    num_hops: int,
    rounds: int,
    seconds: float,
) -> _Passes:
    """Train the model on a part of the graph, all ranks at once for as long as a round takes.

    Ranks may share a machine, and who computes alone there is faster.
    """
    clock = Clock(part.device)
    rehearsal = Rehearsal(part.num_dst, clock)
    parameters: list[Tensor] = [one for one in call.model.parameters() if one.requires_grad]
    args, kwargs = call.changed(lambda value, kind: _cut(value, kind, part))
    runs = part.num_dst > 0 and part.size(1) > 0

    def step() -> Tensor:
        rehearsal.begin_pass()
        begin_pass()
        return _loss(call.model.forward(*args, **kwargs))

    def one_round(seconds: float) -> tuple[Tensor, float]:
        """This rank's split of a pass, and a whole pass by the clock."""
        communicator.barrier()
        splits: list[Tensor] = []
        start = time.perf_counter()
        while runs and (not splits or time.perf_counter() - start < seconds):
            between, inside = clock.seconds(step, parameters, num_hops)
            splits.append(torch.tensor([*between, *inside], dtype=torch.float64))
        pass_s = (time.perf_counter() - start) / max(len(splits), 1)
        split = torch.stack(splits).mean(0) if runs else torch.zeros(2 * num_hops + 1, dtype=torch.float64)
        return split, pass_s

    with rehearse(rehearsal, True):
        first = one_round(0.0)[0]
        taken = [one_round(seconds) for _ in range(rounds)]
    splits, pass_s = zip(*taken, strict=True)
    reads = [1.0 + (hop in clock.graded) for hop in range(1, num_hops + 1)]  # a rank without rows has none of a pass
    exchanges = [1.0 + rehearsal.exchanges.get(hop, 0) for hop in range(1, num_hops + 1)]
    passes = [1.0 + (hop in rehearsal.graded) for hop in range(1, num_hops + 1)]
    facts = [statistics.median(pass_s), *reads, *exchanges, *passes]
    longest, *counts = communicator.gather(facts).amax(0).tolist()
    return _Passes(
        num_rows=part.num_dst if runs else 0,
        num_edges=part.size(1) if runs else 0,
        split_s=torch.stack(splits).mean(0),
        first_s=float(first[num_hops + 1 :].sum()),
        pass_s=longest,
        reads=torch.tensor(counts[:num_hops], dtype=torch.float64),
        exchanges=tuple(int(count) for count in counts[num_hops : 2 * num_hops]),
        passes=tuple(int(count) for count in counts[2 * num_hops :]),
    )


def _average(communicator: Communicator, passes: _Passes) -> _Average:
    """Over all ranks; each makes the call."""
    own = [float(passes.num_rows), float(passes.num_edges), passes.first_s]
    everyone = communicator.gather([*own, *passes.split_s.tolist()])
    ranks = max(int((everyone[:, 0] > 0).sum()), 1)
    num_rows, num_edges, *split_s = (everyone.sum(0) / ranks).tolist()
    split = torch.tensor(split_s[1:], dtype=torch.float64)
    running = float(split.sum())
    # an epoch is as long as the slowest rank's; the median, as others may use the machine too
    contention = passes.pass_s / running if running else 1.0
    split *= contention
    num_hops = split.numel() // 2
    return _Average(
        rows=num_rows,
        edges=num_edges,
        between=split[: num_hops + 1],
        inside=split[num_hops + 1 :],
        first_edge_s=float((everyone[:, 2] / everyone[:, 1].clamp(min=1)).max()),
        contention=max(contention, 1.0),
        reads=passes.reads,
        exchanges=passes.exchanges,
        passes=passes.passes,
    )


def _cut(value: Any, kind: Kind, part: Adjacency) -> Any:
    """What a model is given, for the rows and edges of a part."""
    if isinstance(value, Adjacency):
        return part if value.value is None else part.with_value(value.value[: part.size(1)])
    rows = part.num_dst if kind == "node" else part.size(1)
    value = within(value, part.num_dst) if kind is None else value[:rows]
    # what was made in inference mode cannot be trained on
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _loss(out: Any) -> Tensor:
    """A number made of all that a model puts out, for about what a loss over classes costs."""
    parts = [one for one in tensors_of(out) if one.is_floating_point()]
    return sum((one.logsumexp(-1).sum() if one.dim() > 1 else one.sum() for one in parts), torch.zeros(()))
