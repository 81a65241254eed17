"""Aggregations that pad each node's messages to a dense row: LSTM, GRU, set transformers and the like.

Their result depends on the length of that row, the largest in-degree of the *graph*; a rank knows only that of its own
nodes.
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
    x: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    dim_size: int | None = None,
    dim: int = -2,
    max_num_elements: int | None = None,
) -> Tensor:
    """Run the aggregation's own forward with the length of the longest row on any rank."""
    if max_num_elements is None and index is not None:
        longest = torch.bincount(index).amax() if index.numel() else torch.zeros(())
        max_num_elements = ranks.max_over_ranks(int(longest))
    return inner(x, index, ptr=ptr, dim_size=dim_size, dim=dim, max_num_elements=max_num_elements)
