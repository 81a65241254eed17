"""Folds: aggregations taken in parts and put together, with the rules by which their gradients are shared.

The parts are source groups of one rank that arrive one after the other (:mod:`pygdist.backends.fetching`), or rows of
one node on several ranks (:mod:`pygdist.backends.clones`). Sums
need no rule. Softmax has none in common: groups that arrive merge weighted sums and scale the older ones
(:func:`pygdist.kernels.chunked.merge_softmax`), while clones keep a weight for each edge, as the layer's own code reads
it, and so exchange the largest score first and then the divisor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.kernels.spmm import Reduce


def better_of(reduce: Reduce, out: Tensor, filled: Tensor, part: Tensor, part_filled: Tensor | bool = True) -> Tensor:
    r"""Put two parts of a maximum or minimum together.

    Args:
        reduce: ``"max"`` or ``"min"``.
        out: The extremum of one part of the edges of each row; any number in rows without edges.
        filled: Rows with edges in this part.
        part: The extremum of another part.
        part_filled: Rows with edges there; all by default.

    Shapes:
        ``out`` and ``part`` are :math:`(n, F)`, ``filled`` and ``part_filled`` :math:`(n, 1)`.
    """
    better = torch.maximum(out, part) if reduce == "max" else torch.minimum(out, part)
    both = torch.where(filled, better, part)
    return both if part_filled is True else torch.where(torch.as_tensor(part_filled, device=out.device), both, out)


def share_of_ties(grad: Tensor, count: Tensor, extremum: Tensor) -> Tensor:
    r"""Return the gradient of each edge that attains the extremum of its row.

    All edges that attain an extremum share its gradient. At an extremum of exactly 0 one more share is lost, as in
    :mod:`pygdist.kernels.spmm`.

    Args:
        grad: Gradient of the extrema.
        count: The number of edges that attain them, over all parts.
        extremum: The extrema.

    Shapes:
        All are :math:`(n, F)`.
    """
    return grad / (count + (extremum == 0)).clamp(min=1)
