"""The loss of a rank: a sum over its own nodes, so that the sum over ranks divided by the global count is the mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.errors import InputError

__all__ = ["labelled", "node_losses", "summed_loss"]


def labelled(y: Tensor, mask: Tensor) -> Tensor:
    """``mask`` without unlabelled nodes: label -1, or a row of NaN for several labels per node; ``(n,)`` bool."""
    return mask & (y >= 0 if y.dim() == 1 else ~torch.isnan(y).any(dim=1))


def node_losses(output: Tensor, y: Tensor) -> Tensor:
    r"""The loss of each node, :math:`(n)`.

    Cross-entropy for ``y`` of shape :math:`(n)` int64; binary cross-entropy, averaged over classes, for
    :math:`(n, C)` float.

    Shapes:
        ``output`` is :math:`(n, C)`.
    """
    if y.dim() == 1:
        return functional.cross_entropy(output, y, reduction="none")
    return functional.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none").mean(dim=1)


def summed_loss(
    output: Tensor,
    y: Tensor,
    mask: Tensor,
    weight: Tensor | None = None,
    losses: Callable[[Tensor, Tensor], Tensor] = node_losses,
) -> tuple[Tensor, int]:
    r"""Sum of the losses over the labelled nodes of ``mask``, and how many they are.

    Each is multiplied by ``weight``, if there is one. Without any node the sum is a zero that still reaches every
    parameter, so that the rank takes part in the backward exchanges.

    Args:
        output: What the model gives for each node.
        y: Labels.
        mask: Which nodes count.
        weight: How often.
        losses: The loss of each of some nodes, from their output and their labels.

    Shapes:
        ``output`` is :math:`(n, C)`; ``y`` :math:`(n)` or :math:`(n, C)`; ``mask`` :math:`(n)` bool; ``weight``
        :math:`(n)`.

    Raises:
        InputError: If ``losses`` does not give a value for each node.
    """
    chosen = labelled(y, mask)
    found = losses(output[chosen], y[chosen])
    count = int(chosen.sum())
    if found.shape != (count,):
        name = getattr(losses, "__qualname__", type(losses).__name__)
        raise InputError(
            f"{name} gives values of shape {tuple(found.shape)} for {count} nodes, expected one for each, as losses of "
            "torch give with reduction='none'"
        )
    return found.sum() if weight is None else found @ weight[chosen].to(found.dtype), count
