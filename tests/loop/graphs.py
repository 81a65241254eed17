"""The graph of the tests of loops."""

from __future__ import annotations

import torch
from torch_geometric.data import Data

from tests.lightning.runs import graph as small_graph


def masked_graph() -> Data:
    """A graph of 160 nodes, each in one of the three sets."""
    data = small_graph()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(160, generator=generator)
    masks = {name: torch.zeros(160, dtype=torch.bool) for name in ("train_mask", "val_mask", "test_mask")}
    for name, chosen in zip(masks, order.split((80, 40, 40)), strict=True):
        masks[name][chosen] = True
    return data.update(masks)
