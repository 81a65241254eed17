"""The loss of a rank, summed over its own nodes: the sum over ranks divided by the global count is the mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import functional

from pygdist.errors import InputError


def labelled(y: Tensor, mask: Tensor) -> Tensor:
    """Remove unlabelled nodes from ``mask``: label -1, or a row of NaN in a label matrix; ``(n,)`` bool."""
    return mask & (y >= 0 if y.dim() == 1 else ~torch.isnan(y).any(dim=1))


def node_losses(output: Tensor, y: Tensor) -> Tensor:
    r"""Return the loss of each node, :math:`(n)`.

    Cross-entropy for ``y`` of shape :math:`(n)` int64; binary cross-entropy, averaged over classes, for
    :math:`(n, C)` float.

    Shapes:
        ``output`` is :math:`(n, C)`.
    """
    if y.dim() == 1:
        return functional.cross_entropy(output, y, reduction="none")
    return functional.binary_cross_entropy_with_logits(output, y.to(output.dtype), reduction="none").mean(dim=1)


def summed_loss(
    output: Any,
    y: Tensor,
    mask: Tensor,
    weight: Tensor | None = None,
    losses: Callable[[Any, Tensor], Tensor] = node_losses,
) -> tuple[Tensor, int]:
    r"""Return the sum of the losses over the labelled nodes of ``mask``, and the number of these nodes.

    Without any node the sum is a zero that still depends on every parameter, so that the rank takes part in the
    backward exchanges.

    Args:
        output: Output of the model for each node, or several of them in a collection.
        y: Labels.
        mask: Nodes to sum over.
        weight: Factor on the loss of each node; 1 by default.
        losses: Computes the loss of each node from outputs and labels.

    Shapes:
        ``output`` is :math:`(n, C)`; ``y`` :math:`(n)` or :math:`(n, C)`; ``mask`` :math:`(n)` bool; ``weight``
        :math:`(n)`.

    Raises:
        InputError: If ``losses`` does not return one value for each node.
    """
    chosen = labelled(y, mask)
    values = losses(apply_to_collection(output, Tensor, partial(_chosen, chosen)), y[chosen])
    count = int(chosen.sum())
    if values.shape != (count,):
        name = getattr(losses, "__qualname__", type(losses).__name__)
        raise InputError(
            f"{name} returns values of shape {tuple(values.shape)} for {count} nodes, expected one for each; for "
            "losses of torch use reduction='none'"
        )
    return values.sum() if weight is None else values @ weight[chosen].to(values.dtype), count


def _chosen(chosen: Tensor, value: Tensor) -> Tensor:
    """The chosen rows of a tensor with a row for each node; any other tensor as it is."""
    return value[chosen] if value.dim() and value.size(0) == chosen.size(0) else value
