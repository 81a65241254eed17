"""The loss of a rank: a sum over its own nodes, to be added up over ranks and divided by the number of all terms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from pygdist.errors import InputError
from pygdist.nn.nested import each_value

Losses = Callable[[Any, Tensor], Tensor]
"""Returns the loss of each node, ``(n,)``, from a model's outputs for these nodes and their labels."""
Regression = Literal["mse", "l1", "huber"]
_OF_NUMBERS: dict[str, Callable[..., Tensor]] = {
    "mse": functional.mse_loss, "l1": functional.l1_loss, "huber": functional.huber_loss,
}  # fmt: skip


def labelled(y: Tensor, mask: Tensor) -> Tensor:
    """Return ``mask`` without unlabelled nodes (class -1, the number NaN, or a matrix row with NaN); ``(n,)`` bool."""
    if not y.is_floating_point() and y.dim() == 1:
        return mask & (y >= 0)
    return mask & ~torch.isnan(y).flatten(1).any(dim=1) if y.dim() > 1 else mask & ~torch.isnan(y)


def labelled_rows(y: Tensor, mask: Tensor) -> Tensor:
    """Return the numbers of the rows that :func:`labelled` keeps, ``(k,)`` int64, sorted; the host waits for a GPU."""
    return labelled(y, mask).nonzero().squeeze(1)


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


def value_losses(output: Tensor, y: Tensor, *, loss: Regression = "mse") -> Tensor:
    r"""Return the regression loss of each node, averaged over the numbers of the node: :math:`(n)`.

    The loss is the squared error (``mse``), the absolute error (``l1``), or torch's ``huber_loss`` with its default
    ``delta`` of 1. The mean over nodes equals torch's mean over all entries.

    Shapes:
        ``output`` and ``y`` are both :math:`(n, k)`, with any number of further dimensions; for :math:`k = 1`,
        ``output`` may be :math:`(n)`.

    Raises:
        InputError: If the shapes differ; torch would broadcast :math:`(n)` against :math:`(n, 1)` to :math:`(n, n)`.
    """
    if output.dim() == 1 and y.shape[1:] == (1,):
        output = output.unsqueeze(1)
    if output.shape != y.shape:
        raise InputError(f"the model returns values of shape {tuple(output.shape)} for targets of {tuple(y.shape)}")
    dtype = torch.promote_types(output.dtype, y.dtype)  # bfloat16 outputs do not round the targets
    return _OF_NUMBERS[loss](output.to(dtype), y.to(dtype), reduction="none").flatten(1).mean(dim=1)


def summed_loss(
    output: Any,
    y: Tensor,
    chosen: Tensor,
    weight: Tensor | None = None,
    losses: Losses = node_losses,
) -> tuple[Tensor, int]:
    r"""Return the sum of the losses over the labelled nodes of a mask, and the number of these nodes.

    Without any node the sum is a zero that still depends on every parameter, so that the rank takes part in the
    exchanges of the backward pass.

    Args:
        output: Output of the model: a tensor, or tensors in a collection. A tensor whose first size is the number of
            nodes has a row for each node; other tensors, and parameters, are passed to ``losses`` whole.
        y: Labels.
        chosen: Nodes to sum over: a mask, or the result of :func:`labelled_rows`, which avoids waiting for a GPU.
        weight: Factor on the loss of each node; 1 by default.
        losses: Computes the loss of each node from outputs and labels.

    Shapes:
        ``output`` is :math:`(n, C)`; ``y`` :math:`(n)` or :math:`(n, C)`; ``chosen`` :math:`(n)` bool or :math:`(k)`
        int64; ``weight`` :math:`(n)`.

    Raises:
        InputError: If ``losses`` does not return one value for each node.
    """
    rows = labelled_rows(y, chosen) if chosen.dtype == torch.bool else chosen
    values = losses(each_value(output, Tensor, partial(_chosen, y.size(0), rows)), y.index_select(0, rows))
    if values.shape != rows.shape:
        name = getattr(losses, "__qualname__", type(losses).__name__)
        raise InputError(
            f"{name} returns values of shape {tuple(values.shape)} for {len(rows)} nodes, expected one for each; for "
            "losses of torch use reduction='none'"
        )
    values = values.to(torch.promote_types(values.dtype, torch.float32))  # a sum in half precision overflows
    if weight is not None:
        values = values * weight.index_select(0, rows).to(values.dtype)  # autocast would round a product of vectors
    return values.sum(), len(rows)


def _chosen(num_nodes: int, rows: Tensor, value: Tensor) -> Tensor:
    """Return some rows of a tensor with a row for each node; any other tensor, and a parameter, as it is."""
    by_node = value.dim() > 0 and value.size(0) == num_nodes and not (value.is_leaf and value.requires_grad)
    return value.index_select(0, rows) if by_node else value
