"""Fennel: an assignment that weighs the neighbours in a part against the size of the part."""

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
class FennelPartitioner(Partitioner):
    r"""Assigns each node to the part with most of its neighbours, less a cost that grows with the part.

    Fennel (Tsourakakis et al., WSDM 2014) takes the largest :math:`|N(v) \cap P_p| - \alpha \gamma |P_p|^{\gamma - 1}`
    with :math:`\alpha = |E| P^{\gamma - 1} / |V|^\gamma`. If parts are equal, the emptiest part gets the node. No part
    gets more nodes than ``balance`` allows. Nodes come in the order of their ids. The edges are read once to count
    degrees, and once for each window of nodes whose neighbour lists fit in memory.

    Args:
        gamma: Exponent :math:`\gamma` of the part's size in the cost; above 1.
        balance: Largest number of nodes in a part, relative to the mean; at least 1.
    """

    gamma: float = 1.5
    balance: float = 1.1

    name: ClassVar[str] = "fennel"

    def __post_init__(self) -> None:
        check_number(self, "gamma", 1, above=True)
        check_number(self, "balance", 1)

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        alpha = edges.num_edges * num_parts ** (self.gamma - 1) / max(edges.num_nodes, 1) ** self.gamma
        return place_nodes(
            self.name, edges, num_parts, balance=self.balance, fennel=True, alpha=alpha, gamma=self.gamma
        )
