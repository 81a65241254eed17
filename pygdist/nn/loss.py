"""The loss of a rank: a sum over its own nodes, so that the sum over ranks divided by the global count is the mean."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["labelled", "summed_loss"]


def labelled(y: Tensor, mask: Tensor) -> Tensor:
    """``mask`` without unlabelled nodes: label -1, or a row of NaN for several labels per node; ``(n,)`` bool."""
    return mask & (y >= 0 if y.dim() == 1 else ~torch.isnan(y).any(dim=1))


def summed_loss(output: Tensor, y: Tensor, mask: Tensor, weight: Tensor | None = None) -> tuple[Tensor, int]:
    r"""Sum of the losses over the labelled nodes of ``mask``, and how many they are.

    Cross-entropy for ``y`` of shape :math:`(n,)` int64; binary cross-entropy, averaged over classes, for
    :math:`(n, C)` float; each times ``weight``, if there is one. Without any node the sum is a zero that still reaches
    every parameter, so that the rank takes part in the backward exchanges.

    Shapes:
        ``output`` is :math:`(n, C)`; ``mask`` :math:`(n,)` bool; ``weight`` :math:`(n,)`.
    """
    chosen = labelled(y, mask)
    rows, labels = output[chosen], y[chosen]
    reduction = "sum" if weight is None else "none"
    if y.dim() == 1:
        found = functional.cross_entropy(rows, labels, reduction=reduction)
    else:
        found = functional.binary_cross_entropy_with_logits(rows, labels.to(rows.dtype), reduction=reduction)
        found = found / y.size(1)
    if weight is None:
        return found, int(chosen.sum())
    return (found if y.dim() == 1 else found.sum(dim=1)) @ weight[chosen].to(found.dtype), int(chosen.sum())
