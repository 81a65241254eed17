"""Rows of nodes that a vertex-cut splits: the leaves of a part, and those of other parts whose roots it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pygdist.comm import ExchangePlan


@dataclass(frozen=True)
class Clones:
    """Exchanges between the roots and the leaves of split nodes (DistGNN, Sec. 5.2), under the placement *edges*.

    Sums travel up: from leaves with in-edges, whose rows are partial, to their roots. Totals and features travel down:
    from roots to leaves with out-edges. Both plans are those of *down*, so *up* is sent the other way, as gradients are
    (:meth:`~pygdist.comm.Communicator.return_rows`).

    Attributes:
        up: Rows of leaves with in-edges.
        up_rows: Local rows of this part's leaves in ``up``, in the order of the plan; int64.
        down: Rows of leaves with out-edges.
        down_rows: Local rows of this part's leaves in ``down``.
    """

    up: ExchangePlan
    up_rows: Tensor
    down: ExchangePlan
    down_rows: Tensor

    @staticmethod
    def from_arrays(arrays: Mapping[str, np.ndarray], num_owned: int) -> Clones:
        """Make the plans of one part of a store, from the arrays that :func:`~pygdist.graph.open_part` returns."""
        plan = ExchangePlan(
            send_index=torch.from_numpy(np.asarray(arrays["send_index"]).astype(np.int64)),
            send_counts=tuple(arrays["send_counts"][0].tolist()),
            recv_counts=tuple(arrays["recv_counts"][0].tolist()),
        )
        plans = {}
        for name in ("in", "out"):
            sent, received = (torch.from_numpy(np.asarray(arrays[kind + name])) for kind in ("send_has_", "has_"))
            plans[name] = plan.chosen(sent, received), num_owned + received.nonzero().view(-1)
        return Clones(*plans["in"], *plans["out"])

    def to(self, device: torch.device | str) -> Clones:
        """Return a copy on ``device``."""
        return replace(
            self, up=self.up.to(device), up_rows=self.up_rows.to(device), down=self.down.to(device),
            down_rows=self.down_rows.to(device),
        )  # fmt: skip
