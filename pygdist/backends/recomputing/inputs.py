"""Inputs of a model on a rank that also computes rows of other ranks: their input rows follow its own.

Inputs that stay the same are fetched once.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.passes.rehearsal import Call, Kind
from pygdist.backends.passes.rows import Rows, in_order
from pygdist.comm import Communicator
from pygdist.graph import Adjacency, Shard
from pygdist.graph.memo import Memo


class ModelInputs:
    """Extends the inputs of a model by those of a rank's replicas and their edges."""

    def __init__(self) -> None:
        self._extended: Memo[Tensor] = Memo()
        self._weighted: Memo[Adjacency] = Memo()

    @property
    def kept(self) -> list[Tensor]:
        """Extended inputs that are kept from pass to pass."""
        return self._extended.results

    def extended(
        self, call: Call, rows: Rows, shard: Shard, communicator: Communicator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, extended to ``rows``; every rank makes this call."""
        place = itertools.count()

        def extend(value: Any, kind: Kind) -> Any:
            at = next(place)
            if isinstance(value, Adjacency) and value.csr() is shard.adjacency.csr():
                weight = value.value
                return (
                    rows.adjacency if weight is None else self._with_weight(rows, extend_rows(weight, rows.edges, at))
                )
            return value if kind is None else extend_rows(value, rows.edges if kind == "edge" else rows.inputs, at)

        def extend_rows(value: Tensor, arrival: Arrival, at: int) -> Tensor:
            def fetch() -> Tensor:
                arrived = communicator.exchange_rows(value, arrival.plan, label="replicas of the model's input")
                return torch.cat([value, in_order(arrived, arrival)])

            if value.requires_grad and torch.is_grad_enabled():
                with torch.inference_mode(False):
                    return fetch()
            return self._extended.get((id(arrival), at), (value,), fetch)

        return call.changed(extend)

    def _with_weight(self, rows: Rows, weight: Tensor) -> Adjacency:
        """The edges with weights; the same object for the same weights, as results of hops are kept by that."""
        return self._weighted.get("edges", (rows.adjacency, weight), lambda: rows.adjacency.with_value(weight))
