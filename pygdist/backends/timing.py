"""What a model's hops cost: it trains a few times on some of each rank's rows and edges (NeutronStar, Sec. 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.arguments import tensors_of
from pygdist.backends.probe import Clock
from pygdist.backends.rehearsal import Call, Kind, Rehearsal, Rehearse, within
from pygdist.comm import Communicator
from pygdist.graph import Adjacency
from pygdist.kernels import CSR

__all__ = ["time_hops"]

_FIRST_ROWS, _FIRST_EDGES = 1_000, 20_000  # that a model is timed on at first
# Then on as many as a pass of that length allows: tensors that fit into the caches nearest to a core cost less than
# most do.
_PASS_S, _FOR_ROWS = 0.07, 0.6  # of a pass, and the share of it that is for rows
_MOST_ROWS, _MOST_EDGES = 30_000, 1_000_000
_WARM_UP, _ROUNDS = 1, 3  # passes before it is timed, and while


@dataclass(frozen=True)
class _Passes:
    """What one rank's passes took.

    Attributes:
        num_rows: Of the graph that they ran on.
        num_edges: Of it.
        first_s: Seconds in the hops of the first pass, which makes what is kept.
        seconds: Of each later pass, between hops (one more than there are hops) and in them; one row for each pass.
    """

    num_rows: int
    num_edges: int
    first_s: float
    seconds: Tensor


def time_hops(
    call: Call,
    rehearse: Rehearse,
    begin_pass: Callable[[], None],
    adjacency: Adjacency,
    communicator: Communicator,
    num_hops: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of a row between hops and of an edge in each hop, forward and backward.

    Every rank makes the call at the same time and gets the same.

    Args:
        call: The model, and what it is given.
        rehearse: Runs it by itself.
        begin_pass: Called before each pass.
        adjacency: The rank's edges.
        communicator: The ranks.
        num_hops: Of the model.
    """

    def timed(num_rows: int, num_edges: int, warm_up: int, rounds: int) -> tuple[Tensor, Tensor, float]:
        part = _part(adjacency, num_rows, num_edges)
        passes = _run(call, rehearse, begin_pass, part, communicator, num_hops, 1 + warm_up + rounds)
        return _by_row_and_edge(communicator, passes, num_hops, rounds)

    with torch.inference_mode(False), torch.enable_grad():
        row, edge, first = timed(_FIRST_ROWS, _FIRST_EDGES, 0, 1)
        num_rows = int(_PASS_S * _FOR_ROWS / max(float(row.sum()), 1e-9))
        num_edges = int(_PASS_S * (1 - _FOR_ROWS) / max(float(edge.sum()), first, 1e-9))
        row, edge, _ = timed(min(num_rows, _MOST_ROWS), min(num_edges, _MOST_EDGES), _WARM_UP, _ROUNDS)
    return tuple(row.tolist()), tuple(edge.tolist())


def _part(adjacency: Adjacency, num_rows: int, num_edges: int) -> Adjacency:
    """The first rows, and of the edges into them as many as asked for, evenly; sources fall among these rows."""
    csr = adjacency.csr()
    num_rows = min(csr.num_rows, num_rows)
    end = int(csr.indptr[num_rows])
    every = max(1, -(-end // max(num_edges, 1)))
    indptr = (csr.indptr[: num_rows + 1] + every - 1).div(every, rounding_mode="floor")
    return Adjacency.from_csr(CSR(indptr, csr.index[:end:every] % max(num_rows, 1), num_rows))


def _run(
    call: Call,
    rehearse: Rehearse,
    begin_pass: Callable[[], None],
    part: Adjacency,
    communicator: Communicator,
    num_hops: int,
    num_passes: int,
) -> _Passes:
    """Train the model on a part of the graph; a rank without any takes part in what ranks do together."""
    clock = Clock(part.device)
    rehearsal = Rehearsal(part.num_dst, clock)
    parameters: list[Tensor] = [one for one in call.model.parameters() if one.requires_grad]
    args, kwargs = call.changed(lambda value, kind: _cut(value, kind, part))

    def step() -> Tensor:
        rehearsal.begin_pass()
        begin_pass()
        return _loss(call.model.forward(*args, **kwargs))

    runs = part.num_dst > 0 and part.size(1) > 0
    taken: list[list[float]] = []
    with rehearse(rehearsal, True):
        for _ in range(num_passes):
            communicator.gather([])  # all at once: who computes alone on a shared machine is faster
            between, inside = (
                clock.seconds(step, parameters, num_hops) if runs else ([0.0] * (num_hops + 1), [0.0] * num_hops)
            )
            taken.append([*between, *inside])
    seconds = torch.tensor(taken, dtype=torch.float64)
    return _Passes(
        num_rows=part.num_dst if runs else 0,
        num_edges=part.size(1) if runs else 0,
        first_s=float(seconds[0, num_hops + 1 :].sum()),
        seconds=seconds,
    )


def _by_row_and_edge(
    communicator: Communicator, passes: _Passes, num_hops: int, rounds: int
) -> tuple[Tensor, Tensor, float]:
    """Over all ranks and the last ``rounds`` passes: seconds of a row, of an edge, and of an edge in the first pass."""
    seconds = passes.seconds[-rounds:]
    own = [float(passes.num_rows), float(passes.num_edges), passes.first_s, *seconds.mean(0).tolist()]
    everyone = communicator.gather([*own, *seconds.sum(1).tolist()])
    num_rows, num_edges = everyone[:, 0].sum().clamp(min=1), everyone[:, 1].sum().clamp(min=1)
    first = everyone[:, 2] / everyone[:, 1].clamp(min=1)
    # an epoch is as long as the slowest rank's; the median over passes, as others may use the machine too
    by_pass = everyone[everyone[:, 0] > 0, -rounds:]
    slowest = float(by_pass.amax(0).median() / by_pass.mean()) if by_pass.numel() else 1.0
    total = everyone[:, 3:-rounds].sum(0) * slowest
    return total[: num_hops + 1] / num_rows, total[num_hops + 1 :] / num_edges, float(first.max())


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
