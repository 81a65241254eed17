"""PyG's label propagation and "correct and smooth" (Huang et al., ICLR 2021) on the parts of a graph.

Both pass labels along edges, as layers pass rows. Two values depend on all nodes: the number of classes, if labels are
numbers, and the mean absolute error at training nodes, by which "correct" scales the errors at other nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import one_hot

from pygdist.errors import InputError
from pygdist.nn.norms import Ranks


class OneHot:
    """PyG's ``one_hot``; without ``num_classes``, the largest number on any rank gives the width."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(
        self, index: Tensor, num_classes: int | None = None, dtype: torch.dtype | None = torch.float
    ) -> Tensor:
        """Encode numbers; see PyG's ``one_hot``."""
        if num_classes is None:
            num_classes = self._ranks.max_over_ranks(int(index.max()) + 1 if index.numel() else 0)
        out: Tensor = one_hot(index, num_classes, dtype)
        return out


def without_ids(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a ``LabelPropagation.forward`` that refuses masks of ids, for ranks that compute other ranks' rows too."""

    @functools.wraps(forward)
    def run(self: Any, y: Tensor, edge_index: Any, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if mask is not None and mask.dtype != torch.bool:
            raise InputError(
                "LabelPropagation: mask holds ids of a rank's nodes, but ranks also compute rows of other nodes here; "
                "pass a bool for each node"
            )
        return forward(self, y, edge_index, mask, *args, **kwargs)

    return run


def corrected(correct: Callable[..., Tensor], ranks: Ranks) -> Callable[..., Tensor]:
    """Return ``CorrectAndSmooth.correct`` with the mean error of all ranks' training nodes."""

    @functools.wraps(correct)
    def run(
        self: Any, y_soft: Tensor, y_true: Tensor, mask: Tensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        if not self.autoscale:
            return correct(self, y_soft, y_true, mask, edge_index, edge_weight)
        rows = y_soft[mask]
        if rows.size(0) != y_true.size(0):
            raise InputError(
                f"CorrectAndSmooth: y_true has {y_true.size(0)} rows, expected one for each of the rank's "
                f"{rows.size(0)} nodes in mask",
                of_one_rank=True,
            )
        if y_true.dtype == torch.long and y_true.size(0) == y_true.numel():
            y_true = one_hot(y_true.view(-1), num_classes=y_soft.size(-1), dtype=y_soft.dtype)
        error = torch.zeros_like(y_soft)
        error[mask] = y_true - rows
        smoothed = self.prop1(error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0))
        total = error[mask].abs().sum()
        total, count = ranks.sum_over_ranks(torch.stack([total, total.new_tensor(rows.size(0))]))
        scale = total / count / smoothed.abs().sum(dim=1, keepdim=True)
        scale[scale.isinf() | (scale > 1000)] = 1.0
        out: Tensor = y_soft + scale * smoothed
        return out

    return run
