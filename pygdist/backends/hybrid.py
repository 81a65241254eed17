"""``hybrid``: each remote row is computed again or fetched, whichever costs less (NeutronStar, Sec. 3).

Exact, whatever is chosen. For every hop and every node of another rank that it reads, the cost of computing the node's
row here, with all that it needs from the features on and is not here yet (Eq. 1), stands against that of fetching it
(Eq. 2); the cheapest to compute are taken first, as long as there is memory (Eq. 3, Algorithm 4).
"""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from pygdist.backends.fetched import WireDtype
from pygdist.backends.recomputing import RecomputingBackend
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood
from pygdist.native import NativeDependencies, load

__all__ = ["Costs", "HybridBackend"]

log = logging.getLogger(__name__)

_GIB = 2**30
_BYTES_PER_VALUE = 3 * 4  # a row, its gradient and what the layer keeps for it
_BYTES_PER_EDGE = 2 * 8  # in both orders


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one value costs, in seconds, forward and backward together; NeutronStar's T_v, T_e and T_c.

    Args:
        vertex: To compute one value of a row, apart from its edges.
        edge: To aggregate one value over one edge.
        value: To fetch one value of a row of another rank.
    """

    vertex: float
    edge: float
    value: float

    def __post_init__(self) -> None:
        if not all(0 <= cost < math.inf for cost in (self.vertex, self.edge, self.value)):
            raise InputError(f"costs: expected seconds, no negative numbers, got {self}")


class HybridBackend(RecomputingBackend):
    """Compute some remote rows again and fetch the others (NeutronStar, SIGMOD 2022, Sec. 3, Algorithm 4).

    Args:
        cache_ratio: Compute this share of the remote rows that each hop reads, those that are cheapest to compute; 0 is
            ``comm``, 1 is ``cache``.
        costs: What decides where no share is given.
        memory_gib: Most memory that replicas may take on a rank; no limit by default.
        ring: As for ``comm``, and so the next two.
        overlap: Aggregate while rows travel.
        wire_dtype: ``"bfloat16"`` to halve the bytes.
    """

    name = "hybrid"

    def __init__(
        self,
        cache_ratio: float | None = None,
        costs: Costs | None = None,
        memory_gib: float | None = None,
        *,
        ring: bool = True,
        overlap: bool = True,
        wire_dtype: WireDtype | None = None,
    ) -> None:
        super().__init__(ring=ring, overlap=overlap, wire_dtype=wire_dtype)
        if cache_ratio is None and costs is None:
            raise InputError("backend 'hybrid' does not measure costs by itself yet: give it cache_ratio, or costs")
        if cache_ratio is not None and not 0 <= cache_ratio <= 1:
            raise InputError(f"cache_ratio is {cache_ratio}, expected a share from 0 to 1")
        if memory_gib is not None and memory_gib < 0:
            raise InputError(f"memory_gib is {memory_gib}, expected no negative number")
        self.cache_ratio, self.costs, self.memory_gib = cache_ratio, costs, memory_gib

    @override
    def choose(self, found: Neighbourhood, widths: tuple[int, ...]) -> list[Tensor]:
        own, halo, hops = self.shard.num_owned, self.shard.num_halo, len(widths)
        chosen, seconds = _chosen(found, own, halo, widths, self.costs, self.cache_ratio, self.memory_gib)
        shares = ", ".join(f"hop {hop + 1}: {chosen[hop].mean() if halo else 0:.0%}" for hop in range(hops))
        log.info("rank %d computes remote rows again, %s", self.shard.rank, shares)
        if self.costs is not None:
            again, fetch = seconds.sum(axis=0)
            log.info(
                "rank %d expects %.3g s an epoch for that, and %.3g s to fetch others", self.shard.rank, again, fetch
            )
        masks = torch.zeros((hops, found.n_id.numel()), dtype=torch.bool)
        masks[:, own : own + halo] = torch.from_numpy(chosen.astype(bool))
        return list(masks)


def _chosen(
    found: Neighbourhood,
    num_owned: int,
    num_halo: int,
    widths: tuple[int, ...],
    costs: Costs | None,
    share: float | None,
    memory_gib: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Which halo rows each hop computes again, ``(hops, halo)``, and seconds of that and of fetching, ``(hops, 2)``."""
    native = load()
    if native is None:
        raise InputError(
            "backend 'hybrid' plans in pygdist's native library, which was not built here: install a C++17 compiler "
            "(Debian, Ubuntu: apt install g++) and reinstall pygdist; 'cache' and 'comm' work without"
        )
    chosen, seconds = np.zeros((len(widths), num_halo), dtype=np.uint8), np.zeros((len(widths), 2))
    indptr, index = found.indptr.numpy(), found.index.numpy()
    width = np.array([0, *widths], dtype=np.float64)
    costs = costs or Costs(vertex=1.0, edge=1.0, value=0.0)
    given = NativeDependencies(
        num_rows=found.n_id.numel(),
        num_owned=num_owned,
        num_halo=num_halo,
        indptr=indptr.ctypes.data,
        index=index.ctypes.data,
        width=width.ctypes.data,
        vertex_s=costs.vertex,
        edge_s=costs.edge,
        value_s=costs.value,
        bytes_per_value=_BYTES_PER_VALUE,
        bytes_per_edge=_BYTES_PER_EDGE,
        max_bytes=math.inf if memory_gib is None else memory_gib * _GIB,
        share=-1.0 if share is None else share,
        num_hops=len(widths),
    )
    status = native.pygdist_choose_dependencies(ctypes.byref(given), chosen.ctypes.data, seconds.ctypes.data)
    if status != 0:
        raise MemoryError("not enough memory to choose what is computed again")
    return chosen, seconds
