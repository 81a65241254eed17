"""What a hybrid plan says, what it is expected to cost, and where it is kept for the next run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygdist.backends.probe import HopCosts
from pygdist.backends.replicas import replicas_of
from pygdist.comm import Communicator
from pygdist.graph.neighbourhood import Neighbourhood

__all__ = ["Expected", "expected_epoch", "load_plan", "plan_key", "save_plan"]

log = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Seconds that an epoch is expected to take on the slowest rank, forward and backward.

    Attributes:
        epoch_s: All of it.
        compute_s: Computing, replicas included.
        exchange_s: Exchanging, whether it is hidden behind computing or not.
        other_s: What does not depend on the plan: averaging gradients over ranks.
        computed: Share of the remote rows that are computed again, by hop; over all ranks.
    """

    epoch_s: float
    compute_s: float
    exchange_s: float
    other_s: float
    computed: tuple[float, ...]


def expected_epoch(
    communicator: Communicator,
    found: Neighbourhood,
    num_owned: int,
    num_halo: int,
    chosen: Sequence[Tensor],
    costs: HopCosts,
    *,
    latency_s: float,
    other_s: float,
    overlap: bool,
) -> Expected:
    """What a choice costs; every rank makes the call and gets the same.

    Args:
        communicator: The ranks.
        found: The nodes around this rank.
        num_owned: The first so many are its own.
        num_halo: After them, the sources of its edges.
        chosen: Which of these are computed here, by hop; see :func:`~.replicas.replicas_of`.
        costs: Of rows and edges.
        latency_s: Of an exchange, there and back, whatever its size.
        other_s: What does not depend on the choice.
        overlap: Whether edges from this rank's own rows are aggregated while others' travel.
    """
    num_hops = len(chosen)
    needed = replicas_of(found, num_owned, list(chosen))
    own = torch.arange(found.n_id.numel()) < num_owned
    is_halo = torch.zeros_like(own)
    is_halo[num_owned : num_owned + num_halo] = True
    degree = found.indptr.diff()
    rows = [num_owned + int(mask.sum()) for mask in needed]
    compute = [costs.row[hop] * rows[hop] for hop in range(num_hops + 1)]
    compute.append(sum(costs.edge[hop] * float(degree[own | needed[hop + 1]].sum()) for hop in range(num_hops)))
    fetched = [is_halo & ~needed[hop] for hop in range(num_hops)]
    # a rank is as busy as what it receives or what others want of it
    size = communicator.world_size
    wants = torch.stack([torch.bincount(found.owner[mask], minlength=size) for mask in fetched]) if num_hops else None
    everyone = communicator.gather([] if wants is None else wants.flatten().double().tolist()).view(
        size, num_hops, size
    )
    received, sent = everyone.sum(2), everyone.sum(0).t()
    moved = torch.maximum(received, sent).amax(0)  # of the busiest rank, by hop
    exchange = [
        float(moved[hop]) * costs.fetch[hop] + (latency_s if moved[hop] > 0 else 0.0) for hop in range(num_hops)
    ]
    hidden = 0.0
    if overlap:
        for hop in range(num_hops):
            mine = own | needed[hop + 1]
            local = degree[mine].sum() - _edges_from(found, mine, fetched[hop])
            hidden += min(costs.edge[hop] * float(local), exchange[hop])
    total, busy = sum(compute), sum(exchange)
    figures = communicator.gather([total + busy - hidden, total]).amax(0).tolist()
    counts = communicator.gather([float(mask[is_halo].sum()) for mask in chosen] + [float(num_halo)]).sum(0)
    return Expected(
        epoch_s=figures[0] + other_s,
        compute_s=figures[1],
        exchange_s=busy,
        other_s=other_s,
        computed=tuple((counts[:-1] / max(float(counts[-1]), 1.0)).tolist()),
    )


def _edges_from(found: Neighbourhood, target: Tensor, source: Tensor) -> int:
    """Edges into some rows that come from some others."""
    into = torch.repeat_interleave(target, found.indptr.diff())
    return int((into & source[found.index]).sum())


def plan_key(facts: dict[str, Any]) -> str:
    """A name for what a plan was made for: the model's hops, the device, the ranks and the arguments."""
    text = json.dumps({"version": _VERSION, **facts}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def save_plan(
    folder: Path, key: str, rank: int, chosen: Sequence[Tensor], facts: dict[str, Any], expected: Expected
) -> None:
    """Keep a plan beside the partitioned graph; where that cannot be written, say so and go on."""
    try:
        folder.mkdir(exist_ok=True)
        bits = np.packbits(torch.stack(list(chosen)).numpy(), axis=1)
        with _replacing(folder / f"{key}.{rank}.npy").open("wb") as file:
            np.save(file, bits)
        _done(folder / f"{key}.{rank}.npy")
        if rank == 0:
            text = json.dumps({**facts, "expected": asdict(expected)}, indent=1) + "\n"
            _replacing(folder / f"{key}.json").write_text(text, encoding="utf-8")
            _done(folder / f"{key}.json")
    except OSError as error:
        log.warning("the plan could not be kept for the next run: %s: %s", folder, error.strerror or error)


def load_plan(
    communicator: Communicator, folder: Path | None, key: str, num_hops: int, num_rows: int
) -> tuple[list[Tensor], dict[str, Any]] | None:
    """What :func:`save_plan` kept, if it is there on all ranks; every rank makes the call."""
    found: tuple[list[Tensor], dict[str, Any]] | None = None
    if folder is not None:
        try:
            bits = np.load(folder / f"{key}.{communicator.rank}.npy")
            facts = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
            masks = np.unpackbits(bits, axis=1, count=num_rows).astype(bool)
            if masks.shape == (num_hops, num_rows):
                found = (list(torch.from_numpy(masks)), facts)
        except (OSError, ValueError, EOFError):  # none yet, or one that broke off: it is made anew
            found = None
    everywhere = bool(communicator.gather([float(found is not None)]).min() > 0)
    return found if everywhere else None


def _replacing(path: Path) -> Path:
    """Where a file is written first, so that half of one is never taken for whole."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _done(path: Path) -> None:
    _replacing(path).replace(path)
