"""The greedy choice of rows to compute, by the costs of computing and fetching them (NeutronStar, Algorithm 4)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.planning.hop_costs import HopCosts
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood
from pygdist.native import NativeDependencies, require

_GIB = 2**30
_COPIES = 3  # of a replica's row: itself, its gradient and what the layer keeps for the backward pass
# two orders of the edges: 2 numbers of 4 bytes and a value of 8 each; and 8 bytes of value here and at the owner
_BYTES_PER_EDGE = 4 * 4 + 2 * 8 + 2 * 8


@dataclass(frozen=True)
class Halo:
    """The halo rows of a rank. Each hop reads them, and the rank computes or fetches each.

    Attributes:
        around: The nodes around the rank: owned nodes first, then halo rows, then further nodes by hop.
        num_owned: Owned nodes.
        num_halo: Halo rows.
        widths: Values of a source row that each hop reads.
    """

    around: Neighbourhood
    num_owned: int
    num_halo: int
    widths: tuple[int, ...]

    @property
    def rows(self) -> slice:
        """Positions of the halo rows in ``around``."""
        return slice(self.num_owned, self.num_owned + self.num_halo)

    def choice(self, computed: Tensor | bool) -> Tensor:
        """Spread a choice over all rows of ``around``: for each hop a row, the mask that ``replicas_of`` takes.

        Args:
            computed: ``(hops, num_halo)``, True for halo rows that the rank computes for the hop; or one bool for all.

        Returns:
            ``(hops, N)`` bool, over all rows of ``around``; False outside the halo rows.
        """
        chosen = torch.zeros(len(self.widths), self.around.n_id.numel(), dtype=torch.bool)
        chosen[:, self.rows] = computed
        return chosen

    def native(self, **costs: Any) -> NativeDependencies:
        """Give rows, edges and ``costs`` to the native library, which reads their memory: keep this object alive."""
        return NativeDependencies(
            num_rows=self.around.n_id.numel(),
            num_owned=self.num_owned,
            num_halo=self.num_halo,
            indptr=self.around.indptr.data_ptr(),
            index=self.around.index.data_ptr(),
            num_hops=len(self.widths),
            **costs,
        )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds for one value, forward and backward together: NeutronStar's T_v, T_e and T_c.

    Args:
        vertex: Seconds to compute one value of a row, without aggregation over its edges.
        edge: Seconds to aggregate one value over one edge.
        value: Seconds to fetch one value of another rank's row.

    Raises:
        InputError: If a cost is negative or not finite.
    """

    vertex: float
    edge: float
    value: float

    def __post_init__(self) -> None:
        if not all(0 <= cost < math.inf for cost in (self.vertex, self.edge, self.value)):
            raise InputError(f"costs: vertex, edge and value must be finite numbers of seconds, 0 or more; got {self}")

    def by_hop(self, widths: tuple[int, ...]) -> HopCosts:
        """Return the costs of hops of these widths, by Eqs. 1 and 2. Features cost nothing to compute."""
        return HopCosts(
            row=(0.0, *(self.vertex * width for width in widths)),
            edge=tuple(self.edge * width for width in widths),
            fetch=tuple(self.value * width for width in widths),
        )


def greedy_choice(
    halo: Halo, costs: HopCosts, *, value_bytes: int, share: float | None = None, memory_gib: float | None = None
) -> Tensor:
    """Choose the halo rows that each hop computes: the cheapest first, as long as fetching a row would cost more.

    Args:
        halo: The rows to choose from.
        costs: Seconds to compute and to fetch rows.
        value_bytes: Bytes of one value of a row.
        share: Compute this share of the halo rows for each hop, the cheapest ones, at any cost of fetching; fewer rows
            if ``memory_gib`` is full.
        memory_gib: Most memory that replicas and their edges may take (Eq. 3); no limit by default.

    Returns:
        The choice, as :meth:`Halo.choice` describes it.
    """
    if share == 0 or (share == 1 and memory_gib is None):
        return halo.choice(bool(share))
    native = require("choosing which rows to compute", ", or use a backend that fetches or computes all rows")
    # by level: features are level 0, which has no edges
    levels = (costs.row, (0.0, *costs.edge), (0.0, *costs.fetch), (*halo.widths, 0))
    row_s, edge_s, fetch_s, widths = (torch.tensor(values, dtype=torch.float64) for values in levels)
    row_bytes = _COPIES * value_bytes * widths
    computed = torch.zeros(len(halo.widths), halo.num_halo, dtype=torch.uint8)
    dependencies = halo.native(
        row_s=row_s.data_ptr(),
        edge_s=edge_s.data_ptr(),
        fetch_s=fetch_s.data_ptr(),
        row_bytes=row_bytes.data_ptr(),
        bytes_per_edge=_BYTES_PER_EDGE,
        max_bytes=math.inf if memory_gib is None else memory_gib * _GIB,
        share=-1.0 if share is None else share,
    )
    if native.pygdist_choose_dependencies(ctypes.byref(dependencies), computed.data_ptr()) != 0:
        raise MemoryError("out of memory choosing rows: use more ranks, or cache_ratio=0, which reads only one hop")
    return halo.choice(computed.bool())
