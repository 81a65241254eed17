"""GraphSAINT's edge weights: they make up for the sampling of a mini-batch (Zeng et al., ICLR 2020, Sec. 3.2).

With these weights, a sum over the sampled neighbours is on average the sum over all. A layer that takes edge weights
gets them as such, from the model or, if the model passes none, from here; it normalises by the degrees of the part. For
layers that take none, a sum or mean of neighbours' rows is weighted here, as it is one sparse product. Other hops
cannot be weighted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.graph.adjacency import Adjacency, Slot
from pygdist.graph.self_loops import is_self_loop
from pygdist.hops.hop import Hop
from pygdist.kernels import CSR


@dataclass(frozen=True)
class EdgeNorm:
    """The norms of a mini-batch's edges, in the order of its adjacency.

    Attributes:
        weight: ``(E,)``, the norm of each edge.
        passed: ``(E,)``, the ``edge_weight`` that the model gets: the norm times the graph's own edge weight.
        missing: ``(n,)``, the number of in-edges of each row that were not sampled, for means; ``None`` if unknown.
        n_id: ``(n,)``, the rows of the part that are in the batch; ``None`` if unknown.
    """

    weight: Tensor
    passed: Tensor
    missing: Tensor | None = None
    n_id: Tensor | None = None

    @classmethod
    def of(
        cls, weight: Tensor, csr: CSR, *, edge_weight: Tensor | None, in_degree: Tensor | None, n_id: Tensor | None
    ) -> EdgeNorm:
        """Make it from GraphSAINT's norm of each edge, and the in-degree of each row in the part.

        Shapes:
            ``weight`` and ``edge_weight`` are :math:`(E)`, ``in_degree`` and ``n_id`` :math:`(n)`, and ``csr`` has
            :math:`n` rows and :math:`E` entries.
        """
        passed = weight if edge_weight is None else weight * edge_weight
        return cls(weight, passed, None if in_degree is None else in_degree - csr.indptr.diff(), n_id)

    def is_weighted_by_graph(self, edge_weight: Tensor) -> bool | None:
        """True if edge weights are norms times the graph's weights, False if norms alone, ``None`` if neither."""
        for norms in (self.weight, self.passed):
            if _same(edge_weight, norms):
                return norms is not self.weight
        return None

    def to_layer(
        self, layer: MessagePassing, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        """Pass the norms to a layer's ``forward`` as edge weights, if it takes edge weights and gets none.

        Returns:
            The arguments, and True if the norms alone are the edge weights: on the whole part the layer has none.
        """
        names = list(inspect.signature(forward).parameters)
        if "edge_weight" not in names:
            return args, kwargs, False
        at = names.index("edge_weight") - 1  # ``args`` begin after the layer itself
        edge_weight = args[at] if at < len(args) else kwargs.get("edge_weight")
        if edge_weight is not None:
            return args, kwargs, isinstance(edge_weight, Tensor) and self.is_weighted_by_graph(edge_weight) is False
        takes = _sums(layer) or (_averages(layer) and self.missing is not None)
        if not (takes and any(self._is_of(value) for value in (*args, *kwargs.values()))):
            return args, kwargs, False
        if at < len(args):
            return (*args[:at], self.weight, *args[at + 1 :]), kwargs, True
        return args, {**kwargs, "edge_weight": self.weight}, True

    def on(self, hop: Hop, *, in_weights: bool) -> tuple[Hop, bool]:
        """Weight a hop so that it makes up for the sampling.

        Args:
            hop: The hop; its edges may have self-loops.
            in_weights: True if edge weights of the layer, if it has any, hold the norm as a factor.

        Returns:
            The hop, and whether it makes up for the sampling.
        """
        layer, edge_index, edge_weight = hop.layer, hop.edge_index, hop.arguments.get("edge_weight")
        if edge_weight is None:
            weighted = self._weighted(hop)
            return (hop, False) if weighted is None else (replace(hop, edge_index=weighted), True)
        if not in_weights or layer.aggr is None or _sums(layer):
            return hop, in_weights
        if _averages(layer) and self.missing is not None and isinstance(edge_index, Adjacency):
            return _with_weight(hop, edge_weight * self._sampled_share(edge_index.csr())), True
        if self._is_of(edge_index):  # a maximum, say, is better off without
            hop = _with_weight(hop, edge_weight / self.weight)
        return hop, False

    def _weighted(self, hop: Hop) -> Adjacency | None:
        """The edges of a hop without weights, weighted by the norm; ``None`` if it is no sum or mean of rows."""
        edge_index = hop.edge_index
        if not (self._is_of(edge_index) and hop.is_product and isinstance(edge_index, Adjacency)):
            return None
        if _sums(hop.layer):
            return edge_index.with_value(self.weight)
        if _averages(hop.layer) and self.missing is not None:
            return edge_index.with_value(self.weight * self._sampled_share(edge_index.csr()))
        return None

    def _sampled_share(self, csr: CSR) -> Tensor:
        """Sampled share of the in-edges of each edge's row; self-loops of the layer count as sampled."""
        assert self.missing is not None
        sampled = csr.indptr.diff()
        share = sampled.to(self.weight.dtype) / (sampled + self.missing).clamp(min=1)
        return share[csr.row_index().long()]

    def _is_of(self, edges: Any) -> bool:
        return isinstance(edges, Adjacency) and edges.slot(EDGE_NORM) is self


EDGE_NORM = Slot[EdgeNorm]("edge_norm")
"""Slot of a mini-batch's adjacency that holds its norms."""


def in_degree_facts(csr: CSR, edge_weight: Tensor | None) -> Tensor:
    """Facts about the in-edges of each row, as :attr:`~pygdist.graph.surroundings.Surroundings.in_degree` has them."""
    row, loop = csr.row_index().long(), is_self_loop(csr)

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(csr.num_rows, dtype=torch.float64, device=row.device).index_add_(0, row, values.double())

    columns = [csr.indptr.diff().double(), summed(loop)]
    if edge_weight is not None:
        entry = torch.arange(row.numel(), device=row.device).masked_fill(~loop, -1)
        entry = row.new_full((csr.num_rows,), -1).scatter_reduce(0, row, entry, "amax")
        last = torch.cat([edge_weight.double(), columns[0].new_zeros(1)])[entry]  # of several loops
        columns += [summed(edge_weight), summed(edge_weight * loop), last]
    return torch.stack(columns, dim=1)


def in_degrees(facts: Tensor, weighted: bool, loop_weight: float | None) -> Tensor:
    """In-degrees from :func:`in_degree_facts`: with the self-loops that exist, or with one at every node."""
    number, loops, *weights = facts.unbind(1)
    if not weighted:
        return number if loop_weight is None else number - loops + 1
    total, of_loops, last = weights
    if loop_weight is None:
        return total
    return total - of_loops + torch.where(loops > 0, last, loop_weight)


def _same(one: Tensor, other: Tensor) -> bool:
    """True if two tensors share their memory, whatever their shapes."""
    return one.numel() == other.numel() > 0 and one.data_ptr() == other.data_ptr()


def _with_weight(hop: Hop, edge_weight: Tensor) -> Hop:
    return replace(hop, arguments={**hop.arguments, "edge_weight": edge_weight})


def _sums(layer: MessagePassing) -> bool:
    return layer.aggr in ("sum", "add")


def _averages(layer: MessagePassing) -> bool:
    return bool(layer.aggr == "mean")
