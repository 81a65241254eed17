"""What a model is given where a rank computes rows of others too: their inputs beside its own.

Which arguments hold a row for each node, or for each edge, is told by their length, and by all ranks together: class
weights may be as long as one rank's nodes are many. What stays the same is fetched once.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.passes.rehearsal import Call, Kind
from pygdist.backends.passes.rows import Rows, in_order
from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Adjacency, Shard
from pygdist.graph.identity import fixable, identity_of
from pygdist.hops.arguments import mapped

__all__ = ["ModelInputs", "kinds_of"]


def kinds_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shard: Shard,
    communicator: Communicator,
    known: dict[tuple[object, ...], list[Kind]],
) -> tuple[tuple[object, ...], list[Kind]]:
    """What tells this call from others, and of what each argument holds a row; see :class:`~.rehearsal.Call`.

    Args:
        model: What is called.
        args: By position.
        kwargs: By name.
        shard: What the rank holds.
        communicator: The ranks; each makes the call.
        known: What was found before, by what tells calls apart; grows.

    Raises:
        InputError: If an argument holds another number of rows than before.
    """
    expected: dict[Kind, int] = {"node": shard.num_owned, "edge": shard.adjacency.size(1)}
    looks: list[tuple[str, object]] = []
    lengths: list[int] = []

    def look(name: str, value: Any) -> Any:
        rows = isinstance(value, Tensor) and not isinstance(value, Adjacency) and value.dim() > 0
        plain = value if isinstance(value, (bool, str)) else type(value)
        looks.append((name, value.dim() if rows else plain))
        lengths.append(value.size(0) if rows else -1)
        return value

    mapped(model.forward, args, kwargs, look)
    key = tuple(looks)
    if key not in known:
        fits = [length == expected[kind] for kind in ("node", "edge") for length in lengths]
        everywhere = communicator.gather([float(fit) for fit in fits]).amin(0).bool().tolist() if fits else []
        nodes, edges = everywhere[: len(lengths)], everywhere[len(lengths) :]
        known[key] = [_kind(name, *fit) for (name, _), *fit in zip(looks, nodes, edges, strict=True)]
    for (name, _), kind, length in zip(looks, known[key], lengths, strict=True):
        if kind is not None and length != expected[kind]:
            raise InputError(
                f"argument '{name or type(model).__name__}' of the model held a row for each {kind} of the rank "
                f"before, {expected[kind]}; now it has another number on rank {shard.rank}",
                of_one_rank=True,
            )
    return key, known[key]


def _kind(name: str, node: bool, edge: bool) -> Kind:
    """Of what an argument holds a row, by its name and whether it is as long as a rank has nodes, or edges."""
    if name.startswith("edge_"):
        return "edge" if edge else None
    return "node" if node else "edge" if edge else None


class ModelInputs:
    """Extends what a model is given by the rows and edges of a rank's replicas."""

    def __init__(self) -> None:
        # of each input that stays the same: what was given, so that its memory stays its own, and how it was told from
        # others; what the model gets for it
        self._known: dict[tuple[int, int], tuple[Tensor, tuple[object, ...], Tensor]] = {}
        self._adjacency: tuple[tuple[object, ...], Adjacency] | None = None

    @property
    def grown(self) -> list[Tensor]:
        """What is kept from pass to pass."""
        return [grown for _, _, grown in self._known.values()]

    def extended(
        self, call: Call, rows: Rows, shard: Shard, communicator: Communicator
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, on a rank with such rows; every rank makes the call."""
        place = itertools.count()

        def grown(value: Tensor, arrival: Arrival, at: int) -> Tensor:
            return self._grown(value, arrival, at, communicator)

        def extend(value: Any, kind: Kind) -> Any:
            at = next(place)
            if isinstance(value, Adjacency) and value.csr() is shard.adjacency.csr():
                weight = value.value
                return rows.adjacency if weight is None else self._weighted(rows, grown(weight, rows.edges, at))
            return value if kind is None else grown(value, rows.edges if kind == "edge" else rows.inputs, at)

        return call.changed(extend)

    def _weighted(self, rows: Rows, weight: Tensor) -> Adjacency:
        """The edges with weights, the same object for the same weights: what is derived from it is kept by that."""
        key = identity_of(weight)
        if self._adjacency is None or self._adjacency[0] != key:
            self._adjacency = (key, rows.adjacency.with_value(weight))
        return self._adjacency[1]

    def _grown(self, value: Tensor, arrival: Arrival, place: int, communicator: Communicator) -> Tensor:
        """Own rows, then others'."""
        fixed = fixable(value) and not (value.requires_grad and torch.is_grad_enabled())
        known = self._known.get((id(arrival), place))
        if fixed and known is not None and known[1] == identity_of(value):
            return known[2]
        with torch.inference_mode(False):
            arrived = communicator.exchange_rows(value, arrival.plan, label="replicas of the model's input")
            grown = torch.cat([value, in_order(arrived, arrival)])
        if fixed:
            self._known[id(arrival), place] = (value.detach(), identity_of(value), grown)
        return grown
