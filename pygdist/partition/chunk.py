"""Contiguous ranges of node ids, balanced by the work they bring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from pygdist.errors import InputError
from pygdist.graph import EdgeStream
from pygdist.partition.base import Partitioner, check_num_parts

__all__ = ["ChunkPartitioner"]


@dataclass(frozen=True, kw_only=True)
class ChunkPartitioner(Partitioner):
    r"""Cuts the ids ``0 .. N - 1`` into ranges of equal :math:`\alpha\,|V_p| + |E_p|`.

    The chunk-based partitioning of Gemini (Zhu et al., OSDI 2016, Sec. 4.2), which NeutronStar uses. Two passes of
    arithmetic and no look at the structure: as good as the numbering of the nodes, which in many data sets follows
    communities. In-edges count for the part of their target, which aggregates them. Every part owns at least one node.

    Args:
        node_weight: The weight :math:`\alpha` of a node against an in-edge. A GCN with 128 features does on a node the
            dense work of about 16 edges; 0 balances edges alone, a large number nodes alone.
    """

    node_weight: float = 16.0

    name: ClassVar[str] = "chunk"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.node_weight) and self.node_weight >= 0):
            raise InputError(f"chunk: node_weight is {self.node_weight}, expected a finite number of at least 0")

    @override
    def assign(self, edges: EdgeStream, num_parts: int) -> NDArray[np.int32]:
        num_nodes = edges.num_nodes
        check_num_parts(num_nodes, num_parts)
        in_degree = np.zeros(num_nodes, dtype=np.int64)
        for chunk in edges.chunks():
            np.add.at(in_degree, chunk[1], 1)  # not bincount: an array of all nodes for every chunk
        work = np.cumsum(in_degree + self.node_weight)
        inner = np.arange(1, num_parts)
        cuts = np.searchsorted(work, work[-1] * inner / num_parts, side="left") + 1
        # A hub may swallow several targets: push the cuts apart so that each part keeps a node, from both ends.
        cuts = np.maximum.accumulate(cuts - inner) + inner
        cuts = np.minimum(cuts, num_nodes - num_parts + inner)
        return np.searchsorted(cuts, np.arange(num_nodes), side="right").astype(np.int32)
