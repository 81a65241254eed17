"""Chooses greedily which rows are computed here and which are fetched (NeutronStar, Algorithm 4)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pygdist.backends.planning.hop_costs import HopCosts
from pygdist.errors import InputError
from pygdist.graph.neighbourhood import Neighbourhood
from pygdist.native import NativeDependencies, require

__all__ = ["Costs"]


_GIB = 2**30


# in both orders, with a value of eight bytes in each, and where its own value comes from here and goes to at its owner
_BYTES_PER_EDGE = 4 * 4 + 2 * 8 + 2 * 8


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

    def by_hop(self, widths: tuple[int, ...]) -> HopCosts:
        """The same for hops of these widths, as Eqs. 1 and 2 have it: nothing for features, which are there."""
        return HopCosts(
            row=(0.0, *(self.vertex * width for width in widths)),
            edge=tuple(self.edge * width for width in widths),
            fetch=tuple(self.value * width for width in widths),
        )

    def __post_init__(self) -> None:
        if not all(0 <= cost < math.inf for cost in (self.vertex, self.edge, self.value)):
            raise InputError(f"costs: expected seconds, no negative numbers, got {self}")


def _chosen(
    found: Neighbourhood,
    num_owned: int,
    num_halo: int,
    row_bytes: Sequence[int],
    costs: HopCosts,
    share: float | None,
    memory_gib: float | None,
) -> np.ndarray:
    """Which halo rows each hop computes again, ``(hops, halo)``."""
    native = require("backend 'hybrid'", "; 'cache' and 'comm' work without")
    num_hops = len(row_bytes)
    chosen = np.zeros((num_hops, num_halo), dtype=np.uint8)
    indptr, index = found.indptr.numpy(), found.index.numpy()
    row, edge, fetch = (
        np.array(part, dtype=np.float64) for part in (costs.row, (0.0, *costs.edge), (0.0, *costs.fetch))
    )
    by_level = np.array([*row_bytes, 0], dtype=np.float64)
    given = NativeDependencies(
        num_rows=found.n_id.numel(),
        num_owned=num_owned,
        num_halo=num_halo,
        indptr=indptr.ctypes.data,
        index=index.ctypes.data,
        row_s=row.ctypes.data,
        edge_s=edge.ctypes.data,
        fetch_s=fetch.ctypes.data,
        row_bytes=by_level.ctypes.data,
        bytes_per_edge=_BYTES_PER_EDGE,
        max_bytes=math.inf if memory_gib is None else memory_gib * _GIB,
        share=-1.0 if share is None else share,
        num_hops=num_hops,
    )
    status = native.pygdist_choose_dependencies(ctypes.byref(given), chosen.ctypes.data)
    if status != 0:
        raise MemoryError("not enough memory to choose what is computed again")
    return chosen
