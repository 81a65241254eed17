"""Linear deterministic greedy: to the neighbours, as far as there is room."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.partition.base import Partitioner
from pygdist.partition.node_stream import place_nodes

__all__ = ["LDGPartitioner"]


@dataclass(frozen=True, kw_only=True)
class LDGPartitioner(Partitioner):
    r"""Gives each node to the part with the most neighbours, times the share of the part that is left.

    LDG (Stanton and Kliot, KDD 2012): the largest :math:`|N(v) \cap P_p| \, (1 - |P_p| / C)`, the emptiest of equals.
    Nodes come in the order of their ids. The edges are read once to count, and once for each part of the neighbour
    lists that fits in memory.

    Args:
        balance: The capacity :math:`C`: the most nodes of a part, over the mean; at least 1.
    """

    balance: float = 1.05

    name: ClassVar[str] = "ldg"

    def __post_init__(self) -> None:
        if not 1 <= self.balance < math.inf:
            raise InputError(f"ldg: balance is {self.balance}, expected a finite number of at least 1")

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        return place_nodes(self.name, edges, num_parts, balance=self.balance, fennel=False)
