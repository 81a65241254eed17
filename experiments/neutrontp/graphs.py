"""A graph whose nodes are numbered by falling degree, as in a network that grew from its hubs."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import Data

from pygdist.graph import load_graph

__all__ = ["hubs_first"]


def hubs_first(**args: Any) -> Data:
    """Return the power-law graph, its nodes numbered by falling degree.

    Args:
        args: Arguments of the generator ``power-law``, which numbers its nodes at random.
    """
    data = load_graph("power-law", **args)
    assert data.edge_index is not None
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    order = degree.argsort(descending=True, stable=True)
    number = torch.empty_like(order)
    number[order] = torch.arange(order.numel())
    fields = {name: data[name][order] for name in ("x", "y", "train_mask", "val_mask", "test_mask")}
    return Data(edge_index=number[data.edge_index], **fields)
