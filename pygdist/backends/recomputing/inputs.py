"""Inputs of a model on a rank that also computes rows of other ranks' nodes, whose input rows follow its own rows.

Inputs that stay the same are fetched once.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, TypeGuard

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
        wanted = self._to_extend(call, rows, shard)
        known, graded = self._agreed(wanted, communicator)
        place = itertools.count()

        def extend(value: Any, _: Kind) -> Any:
            at = next(place)
            if at not in wanted:
                return rows.adjacency if _is_of(shard, value) else value
            tensor, arrival = wanted[at]
            slot = id(arrival), at

            def fetch(tensor: Tensor) -> Tensor:
                arrived = communicator.exchange_rows(tensor, arrival.plan, label="replicas of the model's input")
                return torch.cat([tensor, in_order(arrived, arrival)])

            with torch.inference_mode(False):
                if at in graded:
                    # also with a gradient that other ranks alone need: all run the exchange of the backward pass
                    result = fetch(tensor if tensor.requires_grad else tensor.detach().clone().requires_grad_())
                elif at in known:
                    result = self._extended.get(slot, (tensor,), lambda: fetch(tensor))
                else:
                    with torch.no_grad():
                        result = self._extended.put(slot, (tensor,), fetch(tensor))
            return self._with_weight(rows, result) if isinstance(value, Adjacency) else result

        return call.changed(extend)

    def _to_extend(self, call: Call, rows: Rows, shard: Shard) -> dict[int, tuple[Tensor, Arrival]]:
        """Return the tensors that get rows of others, and their arrivals, by the place among the arguments."""
        wanted: dict[int, tuple[Tensor, Arrival]] = {}
        for at, (value, kind) in enumerate(call.values):
            if _is_of(shard, value):
                if value.value is not None:
                    wanted[at] = value.value, rows.edges
            elif kind is not None:
                wanted[at] = value, rows.edges if kind == "edge" else rows.inputs
        return wanted

    def _agreed(
        self, wanted: dict[int, tuple[Tensor, Arrival]], communicator: Communicator
    ) -> tuple[set[int], set[int]]:
        """Return the places of tensors that all ranks hold extended, and of those that get a gradient on any rank.

        A rank may change its own rows in place, or ask for their gradient alone; all make the same exchanges.
        """
        enabled = torch.is_grad_enabled()
        missing = [
            at for at, (value, arrival) in wanted.items() if not self._extended.knows((id(arrival), at), (value,))
        ]
        graded = [at for at, (value, _) in wanted.items() if value.requires_grad and enabled]
        ranks = communicator.gather([float(sum(1 << at for at in places)) for places in (missing, graded)])
        lacks, asks = (functools.reduce(operator.or_, map(int, column)) for column in ranks.T.tolist())
        return {at for at in wanted if not lacks >> at & 1}, {at for at in wanted if asks >> at & 1}

    def _with_weight(self, rows: Rows, weight: Tensor) -> Adjacency:
        """The edges with weights; the same object for the same weights, as results of hops are kept by that."""
        return self._weighted.get("edges", (rows.adjacency, weight), lambda: rows.adjacency.with_value(weight))


def _is_of(shard: Shard, value: Any) -> TypeGuard[Adjacency]:
    """True for edges of the shard, with weights or without."""
    return isinstance(value, Adjacency) and value.csr() is shard.adjacency.csr()
