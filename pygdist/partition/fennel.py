"""Fennel: neighbours in a part against the cost of its size."""

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

__all__ = ["FennelPartitioner"]


@dataclass(frozen=True, kw_only=True)
class FennelPartitioner(Partitioner):
    r"""Gives each node to the part with the most neighbours, less what the size of the part costs.

    Fennel (Tsourakakis et al., WSDM 2014): the largest :math:`|N(v) \cap P_p| - \alpha \gamma |P_p|^{\gamma - 1}` with
    :math:`\alpha = |E| P^{\gamma - 1} / |V|^\gamma`, the emptiest of equals, and no part beyond the bound. Nodes come
    in the order of their ids; edges are read as by LDG.

    Args:
        gamma: The exponent :math:`\gamma` of the cost; above 1.
        balance: The most nodes of a part, over the mean; at least 1.
    """

    gamma: float = 1.5
    balance: float = 1.1

    name: ClassVar[str] = "fennel"

    def __post_init__(self) -> None:
        if not 1 < self.gamma < math.inf:
            raise InputError(f"fennel: gamma is {self.gamma}, expected a finite number above 1")
        if not 1 <= self.balance < math.inf:
            raise InputError(f"fennel: balance is {self.balance}, expected a finite number of at least 1")

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        alpha = edges.num_edges * num_parts ** (self.gamma - 1) / max(edges.num_nodes, 1) ** self.gamma
        return place_nodes(
            self.name, edges, num_parts, balance=self.balance, fennel=True, alpha=alpha, gamma=self.gamma
        )
