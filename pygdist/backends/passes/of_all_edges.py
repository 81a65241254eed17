"""Results that ranks compute together from the edges of all, once for each set of edges."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from pygdist.comm import Communicator
from pygdist.graph.adjacency import Adjacency
from pygdist.nn.relations import of_relation

T = TypeVar("T")
_MOST_READERS = 128  # hops outside of a pass have ever new numbers


class OfAllEdges(Generic[T]):
    """Keeps what ranks made together of their edges, such as in-degrees over all parts.

    A rank's edges may be the same object as before while those of others are new: edges of a relation, or edges without
    self-loops. So ranks agree which sets of edges all of them know. They number these sets, each in the same order.

    Args:
        communicator: The ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._num_made = 0
        self._made: dict[int, tuple[Adjacency, T]] = {}  # with this rank's edges
        self._read_by: dict[Hashable, int] = {}

    def forget(self) -> None:
        """Drop all results; every rank makes the call."""
        self._made.clear()
        self._read_by.clear()

    def of(self, edges: Adjacency, make: Callable[[], T], *, reader: Hashable, asks: bool = False) -> T:
        """Return the result for this rank's edges and those of the others; every rank makes this call.

        Args:
            edges: This rank's edges.
            make: Makes the result on all ranks, outside inference mode and without gradients.
            reader: A hop; the same on all ranks. A result is dropped when all hops that read it have gone on to others.
            asks: True to ask the other ranks each time. Otherwise a reader that has the same edges as last time, not
                those of a relation, asks nobody.
        """
        edges, number = edges.origin, self._read_by.get(reader)
        if asks or number is None or self._made[number][0] is not edges or of_relation(edges):
            number = self._met_by_all(edges)
            if number is None:
                number, self._num_made = self._num_made, self._num_made + 1
                with torch.inference_mode(False), torch.no_grad():  # training uses what evaluation may ask for first
                    self._made[number] = edges, make()
            self._read_by.pop(reader, None)
            self._read_by[reader] = number
            if len(self._read_by) > _MOST_READERS:
                del self._read_by[next(iter(self._read_by))]  # who asked the longest time ago, on all ranks alike
            still_read = set(self._read_by.values())
            self._made = {one: entry for one, entry in self._made.items() if one in still_read}
        return self._made[number][1]

    def _met_by_all(self, edges: Adjacency) -> int | None:
        met = [1.0, *(float(one is edges) for one, _ in self._made.values())]
        by_all = self._communicator.gather(met).amin(0)[1:].tolist()
        return next((number for number, all_met in zip(self._made, by_all, strict=True) if all_met), None)
