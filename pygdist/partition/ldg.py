"""Linear deterministic greedy: an assignment that follows the neighbours as long as a part has room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.graph import EdgeStream
from pygdist.partition.base import Partitioner, check_number
from pygdist.partition.node_stream import place_nodes


@dataclass(frozen=True, kw_only=True)
class LDGPartitioner(Partitioner):
    r"""Assigns each node to the part with most of its neighbours, weighted by the free share of the part.

    LDG (Stanton and Kliot, KDD 2012) takes the largest :math:`|N(v) \cap P_p| \, (1 - |P_p| / C)`. If parts are equal,
    the emptiest part gets the node. Nodes come in the order of their ids. The edges are read once to count degrees, and
    once for each window of nodes whose neighbour lists fit in memory.

    Args:
        balance: Largest number of nodes in a part (the capacity :math:`C`), relative to the mean; at least 1.
    """

    balance: float = 1.05

    name: ClassVar[str] = "ldg"

    def __post_init__(self) -> None:
        check_number(self, "balance", 1)

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        return place_nodes(self.name, edges, num_parts, balance=self.balance, fennel=False)
