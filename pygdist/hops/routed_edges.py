"""Edges whose products a backend takes in its own way: what the adjacencies of backends have in common."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

from torch import Tensor
from typing_extensions import override

from pygdist.graph import Adjacency

W = TypeVar("W")


class RoutedAdjacency(Adjacency, Generic[W]):
    """The edges of a hop, with what a backend needs to multiply them.

    Attributes:
        way: How products are taken in this hop.
    """

    way: W

    @classmethod
    def over(cls, adjacency: Tensor, way: W) -> Self:
        """Return the same edges and weights, multiplied in this way."""
        assert isinstance(adjacency, Adjacency)
        out = cls.from_csr(adjacency.csr(), adjacency.value)
        assert isinstance(out, cls)
        out._origin, out.way = adjacency.origin, way
        return out

    @override
    def with_value(self, value: Tensor | None) -> Self:
        """Return the same edges with other weights."""
        return self.over(self.origin.with_value(value), self.way)
