"""Aggregations whose result depends on more than a node's messages.

LSTM, GRU, set transformers and similar aggregations pad each node's messages to the largest in-degree of the *graph*; a
rank knows only the largest in-degree of its own nodes. Quantiles fail if the first node has no messages, and each rank
has another first node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation

from pygdist.nn.norms import Ranks


def pads(cls: type[nn.Module]) -> bool:
    """Tell if ``cls`` is an aggregation whose result depends on the length of the padded rows."""
    if not issubclass(cls, Aggregation) or cls.forward is Aggregation.forward:
        return False
    return "max_num_elements" in inspect.signature(cls.forward).parameters


def padded_aggregation(
    inner: Callable[..., Tensor],
    ranks: Ranks,
    more: int,
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    max_num_elements: int | None = None,
) -> Tensor:
    """Run the aggregation's own forward with rows as long as the longest row on any rank, plus ``more``."""
    if max_num_elements is None and index is not None:
        longest = torch.bincount(index).amax() if index.numel() else torch.zeros(())
        max_num_elements = ranks.max_over_ranks(int(longest)) + more
    return inner(x, index, ptr=ptr, dim_size=dim_size, dim=dim, max_num_elements=max_num_elements)


def quantile_aggregation(
    inner: Callable[..., Tensor],
    x: Tensor,
    index: Tensor,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
) -> Tensor:
    """Run the aggregation's own forward with an extra first node that has one message; drop this node's result."""
    dim = x.dim() + dim if dim < 0 else dim
    shape = list(x.shape)
    shape[dim] = 1
    x, index = torch.cat([x.new_zeros(shape), x], dim=dim), torch.cat([index.new_zeros(1), index + 1])
    out = inner(x, index, dim_size=None if dim_size is None else dim_size + 1, dim=dim)
    return out.narrow(dim, 1, out.size(dim) - 1)
