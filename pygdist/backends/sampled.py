"""What makes up for how edges of a mini-batch were sampled (GraphSAINT, Zeng et al., ICLR 2020, Sec. 3.2).

A weight for each edge, by which a sum over the sampled neighbours is on average that over all. A layer that takes edge
weights gets it as one from the model. For those that take none, a sum or mean of neighbours' rows is weighted here, as
it is one sparse product; any other hop knows no such weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.layers import fuses
from pygdist.graph import Adjacency
from pygdist.kernels import CSR

__all__ = ["EDGE_NORM", "EdgeNorm"]

EDGE_NORM = "edge_norm"
"""Where an adjacency of a mini-batch has it, in :attr:`~pygdist.graph.Adjacency.derived`."""


@dataclass(frozen=True)
class EdgeNorm:
    """The weights of a mini-batch's edges, in the order of its adjacency.

    Attributes:
        of_sums: ``(E,)``, where neighbours are added.
        of_means: ``(E,)``, where they are averaged: over all that a node has, not those that were sampled. ``None``
            where nobody knows how many these are.
    """

    of_sums: Tensor
    of_means: Tensor | None

    @classmethod
    def of(cls, norm: Tensor, csr: CSR, in_degree: Tensor | None) -> EdgeNorm:
        """From GraphSAINT's norm of each edge, and how many in-edges each row has where nothing is sampled.

        Shapes:
            ``norm`` is :math:`(E)`, ``in_degree`` :math:`(n)`, and ``csr`` has :math:`n` rows and :math:`E` entries.
        """
        if in_degree is None:
            return cls(norm, None)
        share = csr.indptr.diff().to(norm.dtype) / in_degree.clamp(min=1)
        return cls(norm, norm * share[csr.row_index().long()])

    def on(self, layer: MessagePassing, edge_index: Tensor, kwargs: Mapping[str, Any]) -> Adjacency | None:
        """The edges of a hop with these weights; ``None`` if it is no sum or mean of rows, or has weights already."""
        weight = {"sum": self.of_sums, "add": self.of_sums, "mean": self.of_means}.get(str(layer.aggr))
        if weight is None or kwargs.get("edge_weight") is not None or not fuses(layer, edge_index, kwargs):
            return None
        assert isinstance(edge_index, Adjacency)
        return edge_index.with_value(weight)
