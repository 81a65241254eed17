"""Layers with a fault that no GPU forgives."""

from __future__ import annotations

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from typing_extensions import override


class Asking(pyg.GraphConv):
    """Asks the GPU for a number in each pass."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, edge_index)
        return out * (1.0 if float(out.detach().sum()) < 1e9 else 2.0)


class Elsewhere(pyg.GraphConv):
    """Adds a row that is on the host."""

    @override
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, edge_index)
        return out + torch.ones(out.size(1), dtype=out.dtype)
