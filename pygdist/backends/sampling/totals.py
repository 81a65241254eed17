r"""Sums over ranks of a first layer cut by columns, for the batches of all ranks at once (P3, Sec. 3.2.2).

=========  ==========================  ==============================================  =======================
pass       a rank sends                it receives                                     and makes
=========  ==========================  ==============================================  =======================
forward    its term of batch q, to q   the terms of its own batch, :math:`(D, H)`      their sum, in rank order
           :math:`(D_q, H)`            from each rank
backward   the gradient of its sum,    those of all batches, :math:`(D_q, H)`          gradients of its columns
           :math:`(D, H)`, to each
=========  ==========================  ==============================================  =======================

No feature travels, and no product of them before it has the width H. Ranks that hold no column take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pygdist.comm import Communicator
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.slices import columns_of
from pygdist.hops.first_layer import Cut, InEdges


class FirstLayer:
    """A model's first layer, computed by all ranks for all ranks.

    Args:
        layer: The layer.
        cut: The way in which it is cut.
        columns: This rank's columns of all nodes, ``(N, c)``.
        width: Columns of all ranks.
        communicator: The ranks.
    """

    def __init__(self, layer: nn.Module, cut: Cut, columns: Tensor, width: int, communicator: Communicator) -> None:
        self.layer, self.cut, self._columns, self._communicator = layer, cut, columns, communicator
        slices = [columns_of(width, rank, communicator.world_size) for rank in range(communicator.world_size)]
        self._mine, self._has_columns = slices[communicator.rank], [one.start < one.stop for one in slices]

    def total(self, blocks: Sequence[InEdges]) -> Tensor:
        """Return the sum of all ranks' terms for this rank's rows, ``(D, H)``; every rank makes the call.

        Its backward pass is one more exchange, which every rank runs: each parameter gets the gradient of this rank's
        columns, for the batches of all ranks.

        Args:
            blocks: The edges of all ranks' batches, by rank.
        """
        parameters = self.cut.parameters(self.layer)
        out: Tensor = _Total.apply(self, list(blocks), *parameters.values())  # type: ignore[no-untyped-call]
        return out

    def terms(self, blocks: Sequence[InEdges], parameters: dict[str, Tensor]) -> list[Tensor]:
        """Return this rank's term for each batch, ``(D_q, H)``; in full precision, as they are summed."""
        with torch.autocast(self._columns.device.type, enabled=False):
            return [self.cut.partial(self.layer, parameters, block, self._columns, self._mine) for block in blocks]

    def summed(self, terms: Sequence[Tensor]) -> Tensor:
        """Send each rank its term; return the sum of those of this rank's batch."""
        mine, rank = terms[self._communicator.rank], self._communicator.rank
        incoming = [mine.new_empty(mine.shape if has else (0, *mine.shape[1:])) for has in self._has_columns]
        here = self._has_columns[rank]
        outgoing = [one.contiguous() if here else one[:0] for one in terms]
        self._communicator.send_and_receive(outgoing, incoming, "pull, sums")
        incoming[rank] = mine
        total: Tensor | None = None
        for one, has in zip(incoming, self._has_columns, strict=True):
            if has:
                total = one if total is None else total + one
        return mine if total is None else total

    def spread(self, gradient: Tensor, terms: Sequence[Tensor]) -> list[Tensor]:
        """Send the gradient of this rank's sum to all; return those of all batches, by rank."""
        rank, here = self._communicator.rank, self._has_columns[self._communicator.rank]
        incoming = [gradient.new_empty(one.shape if here else (0, *one.shape[1:])) for one in terms]
        gradient = gradient.contiguous()
        outgoing = [gradient if has else gradient[:0] for has in self._has_columns]
        self._communicator.send_and_receive(outgoing, incoming, "push, gradients")
        incoming[rank] = gradient
        return incoming


class _Total(Function):
    """See :meth:`FirstLayer.total`."""

    @staticmethod
    def forward(ctx: Any, first: FirstLayer, blocks: list[InEdges], *parameters: Tensor) -> Tensor:
        names = first.cut.parameters(first.layer)
        with torch.enable_grad():
            leaves = {
                name: one.detach().requires_grad_(one.requires_grad)
                for name, one in zip(names, parameters, strict=True)
            }
            terms = first.terms(blocks, leaves)
        ctx.first, ctx.terms, ctx.leaves = first, terms, leaves
        return first.summed([one.detach() for one in terms])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        terms, leaves = ctx.terms, ctx.leaves
        gradients = ctx.first.spread(gradient, terms)
        wanted = [one for one in leaves.values() if one.requires_grad]
        graded = [(one, grad) for one, grad in zip(terms, gradients, strict=True) if one.numel() and grad.numel()]
        found: dict[int, Tensor | None] = {}
        if graded and wanted:
            outs, grads = zip(*graded, strict=True)
            found = dict(zip(map(id, wanted), torch.autograd.grad(outs, wanted, grads, allow_unused=True), strict=True))
        ctx.terms = ctx.leaves = None
        zeros = [None if not one.requires_grad else torch.zeros_like(one) for one in leaves.values()]
        results = [found.get(id(one)) for one in leaves.values()]
        return (None, None, *(zero if one is None else one for one, zero in zip(results, zeros, strict=True)))
