"""PyG's readouts that sum or average all nodes, over the nodes of all ranks: equal to one process up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import InnerProductDecoder, MeanAggregation, SumAggregation

from pygdist.errors import InputError
from pygdist.graph import Adjacency
from pygdist.nn.norms import Ranks, full_precision


class Readouts:
    """PyG's ``global_add_pool`` and ``global_mean_pool`` for the nodes of all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def add(self, x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
        """Sum the rows of all nodes; see PyG's ``global_add_pool``."""
        dim = -1 if x.dim() == 1 else -2
        return _squeezed(_sum_of_nodes(self._ranks, x, dim, batch).to(x.dtype), dim)

    def mean(self, x: Tensor, batch: Tensor | None, size: int | None = None) -> Tensor:
        """Average the rows of all nodes; see PyG's ``global_mean_pool``."""
        dim = -1 if x.dim() == 1 else -2
        total = _sum_of_nodes(self._ranks, x, dim, batch)
        return _squeezed((total / self._ranks.num_nodes).to(x.dtype), dim)


def _squeezed(total: Tensor, dim: int) -> Tensor:
    return total if total.dim() <= 2 else total.squeeze(dim)


def _sum(
    module: nn.Module, ranks: Ranks, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    return _sum_of_nodes(ranks, x, dim, index, ptr).to(x.dtype)


def _mean(
    module: nn.Module, ranks: Ranks, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    return (_sum_of_nodes(ranks, x, dim, index, ptr) / ranks.num_nodes).to(x.dtype)


def _decode(module: InnerProductDecoder, ranks: Ranks, z: Tensor, edge_index: Tensor, sigmoid: bool = True) -> Tensor:
    """PyG's decoder, for pairs of rows that are here.

    Raises:
        InputError: If the pairs are the graph's edges, as in ``GAE.recon_loss``.
    """
    if isinstance(edge_index, Adjacency):
        raise InputError(
            "InnerProductDecoder (GAE.recon_loss) scores edges by the rows of both ends, but a rank has its own nodes' "
            "rows; train the encoder with pygdist's LinkPredictor"
        )
    scores: Tensor = InnerProductDecoder.forward(module, z, edge_index, sigmoid)
    return scores


READOUTS: dict[type[nn.Module], Callable[..., Tensor]] = {
    SumAggregation: _sum,
    MeanAggregation: _mean,
    InnerProductDecoder: _decode,
}
"""By class: the ``forward`` of a module outside of message passing layers, with the ranks as second argument."""


def _sum_of_nodes(ranks: Ranks, x: Tensor, dim: int, index: Tensor | None, ptr: Tensor | None = None) -> Tensor:
    """Return the sum of all nodes' rows, one row, in at least single precision.

    Raises:
        InputError: If ``x`` has other rows than the rank's nodes, or ``index`` tells several graphs apart.
    """
    if x.size(dim) != ranks.num_rows:
        raise InputError(
            f"a readout over all nodes got {x.size(dim)} rows, but this rank has {ranks.num_rows} nodes; give it a row "
            "for each node",
            of_one_rank=True,
        )
    if ptr is not None or (index is not None and index.numel() and bool(index.any())):
        raise InputError(
            "a readout got several graphs in one ('batch'), but a distributed graph is one", of_one_rank=True
        )
    owned = full_precision(ranks.owned_rows(x.movedim(dim, 0)))
    return ranks.sum_over_ranks(owned.sum(dim=0, keepdim=True)).movedim(0, dim)
