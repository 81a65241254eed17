r"""Sums over ranks of a first layer cut by columns, for the batches of all ranks at once (P3, Sec. 3.2.2).

=========  ==========================  ==============================================  =======================
pass       a rank sends                it receives                                     and makes
=========  ==========================  ==============================================  =======================
forward    its term of batch q, to q   the terms of its own batch, :math:`(D, H)`      their sum, in rank order
           :math:`(D_q, H)`            from each rank
backward   the gradient of its sum,    those of all batches, :math:`(D_q, H)`          gradients of its columns
           :math:`(D, H)`, to each
=========  ==========================  ==============================================  =======================

Neither features travel nor products of features, except products of width H. Ranks that hold no column take no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pygdist.comm import Communicator, Transfer
from pygdist.comm.derivatives import once_differentiable
from pygdist.hops.cuts import Cut, InEdges


class FirstLayer:
    """A model's first layer, computed by all ranks for all ranks.

    Args:
        layer: The layer.
        cut: The way in which it is cut.
        columns: This rank's columns of all nodes, ``(N, c)``.
        slices: For each rank, its slice of all columns.
        communicator: The ranks.
        drops: Rate of dropout over the features.
        sharded: Each rank trains its columns of the weights by itself; else DDP takes the mean over ranks of gradients
            that are zero in the columns of others.

    Attributes:
        has_columns: For each rank, True if it holds any column.
    """

    def __init__(
        self,
        layer: nn.Module,
        cut: Cut,
        columns: Tensor,
        slices: Sequence[slice],
        communicator: Communicator,
        *,
        drops: float = 0.0,
        sharded: bool = False,
    ) -> None:
        self.layer, self.cut, self._columns, self.communicator = layer, cut, columns, communicator
        self._drops, self._mean_over = drops, communicator.world_size if sharded else 1
        self.mine, self.has_columns = slices[communicator.rank], [one.start < one.stop for one in slices]

    def prepared(self, blocks: Sequence[InEdges], parameters: Mapping[str, Tensor]) -> list[tuple[InEdges, Tensor]]:
        """Return, for each batch, its edges and this rank's columns as the cut layer's functions get them."""
        like = parameters[self.cut.weights[0]]
        return [
            self.cut.prepared(self.layer, block, self._columns, like, drops=self._drops, first=self.mine.start)
            for block in blocks
        ]

    def means(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Divide the weights' gradients by the number of ranks, where DDP does not."""
        return [
            one / self._mean_over if one is not None and number < len(self.cut.weights) else one
            for number, one in enumerate(gradients)
        ]

    def swap(self, outgoing: Sequence[Tensor], incoming: list[Tensor], label: str) -> Transfer:
        """Begin to send each rank a tensor, and to receive one of each."""
        transfer = Transfer(self.communicator, incoming, label, ring=False)
        for message in transfer.targets:
            transfer.give(message, outgoing[message.rank])
        self.communicator.done()  # nobody waits for it yet
        return transfer

    def to_owners(self, parts: Sequence[Tensor], label: str) -> tuple[Transfer, list[Tensor]]:
        """Begin to send each rank this rank's part of its sum; return the buffers for the parts of this rank's sum."""
        mine, here = parts[self.communicator.rank].detach(), self.has_columns[self.communicator.rank]
        incoming = [mine.new_empty(mine.shape if has else (0, *mine.shape[1:])) for has in self.has_columns]
        outgoing = [one.detach().contiguous() if here else one.detach()[:0] for one in parts]
        return self.swap(outgoing, incoming, label), incoming

    def to_columns(self, mine: Tensor, shapes: Sequence[torch.Size], label: str) -> tuple[Transfer, list[Tensor]]:
        """Begin to send a tensor of this rank to all ranks that have columns; return the buffers for theirs."""
        here = self.has_columns[self.communicator.rank]
        incoming = [mine.new_empty(shape if here else (0, *shape[1:])) for shape in shapes]
        outgoing = [mine if has else mine[:0] for has in self.has_columns]
        return self.swap(outgoing, incoming, label), incoming

    def added(self, arrived: Sequence[Tensor], mine: Tensor) -> Tensor:
        """Add up what ranks that have columns sent, in rank order; ``mine`` is this rank's."""
        arrived = [mine if rank == self.communicator.rank else one for rank, one in enumerate(arrived)]
        first, *others = [one for one, has in zip(arrived, self.has_columns, strict=True) if has] or [mine]
        total = first.clone()  # not the memory of a term
        for one in others:
            total += one
        return total

    def summed_everywhere(self, parts: Sequence[Tensor], label: str) -> list[Tensor]:
        """Sum each batch's parts over ranks at its owner, and send the sum back; every rank makes the call.

        Args:
            parts: This rank's part for each batch.
            label: Names the exchange.
        """
        communicator, mine = self.communicator, parts[self.communicator.rank].detach()
        transfer, arrived = self.to_owners(parts, f"pull, {label}")
        communicator.begin_wait(f"pull, {label}")  # after the posting, which tells that nobody waits
        transfer.finish()
        total = self.added(arrived, mine)
        transfer, totals = self.to_columns(total, [one.shape for one in parts], f"push, {label}")
        communicator.begin_wait(f"push, {label}")
        transfer.finish()
        totals[communicator.rank] = total
        return totals

    def total(self, blocks: Sequence[InEdges]) -> Tensor:
        """Return the sum of all ranks' terms for this rank's rows, ``(D, H)``; every rank makes the call.

        Its backward pass is one more exchange, which every rank runs: each parameter gets the gradient of this rank's
        columns, for the batches of all ranks.

        Args:
            blocks: The edges of all ranks' batches, by rank.
        """
        out: Tensor = _Total.apply(Flight(self, blocks), *self.parameters)  # type: ignore[no-untyped-call]
        return out

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that meet columns, in the order of :meth:`Flight.gradients`."""
        return list(self.cut.parameters(self.layer).values())


class Flight:
    """The first layer of one step's batches: this rank's terms, their sums and gradients on their way.

    Every rank makes the same calls, in the same order. Between two of them others may be made for other steps. A layer
    that needs scores exchanges these, and their gradients, at once: nothing else can be computed meanwhile.

    Args:
        first: The layer.
        blocks: The edges of all ranks' batches, by rank.
        lasts: The parameters may change before :meth:`gradients`.
        trains: :meth:`gradients` will be called.

    Attributes:
        gradient: Gradient of this rank's sum, ``(D, H)``, once it is known.
    """

    def __init__(
        self, first: FirstLayer, blocks: Sequence[InEdges], *, lasts: bool = False, trains: bool = True
    ) -> None:
        self._first, self._label, self._arrived = first, "", list[Tensor]()
        self._transfer: Transfer | None = None
        self.gradient: Tensor | None = None
        cut, layer = first.cut, first.layer
        named = cut.parameters(layer)
        self._leaves = {
            name: (one.detach().clone() if lasts else one.detach()).requires_grad_(one.requires_grad)
            for name, one in named.items()
        }
        device = self._leaves[cut.weights[0]].device.type
        # terms are summed in full precision
        with torch.set_grad_enabled(trains), torch.autocast(device, enabled=False):
            prepared = first.prepared(blocks, self._leaves)
            self._parts, self._scores = list[Tensor](), list[Tensor]()
            if cut.scores is not None:
                self._parts = [cut.scores(layer, self._leaves, *one, first.mine) for one in prepared]
                totals = first.summed_everywhere(self._parts, "scores")
                self._scores = [
                    total.requires_grad_(part.requires_grad) for part, total in zip(self._parts, totals, strict=True)
                ]
                # a rank without columns gets no sums, and its terms are zeros whatever the scores
                here = first.has_columns[first.communicator.rank]
                scores_here = self._scores if here else [one.detach() for one in self._parts]
                prepared = [
                    (replace(edges, scores=scores), columns)
                    for (edges, columns), scores in zip(prepared, scores_here, strict=True)
                ]
            self._terms = [cut.term(layer, self._leaves, *one, first.mine) for one in prepared]

    def post_terms(self) -> None:
        """Send each rank its term."""
        self._label = "pull, sums"
        self._transfer, self._arrived = self._first.to_owners(self._terms, self._label)

    def total(self) -> Tensor:
        """Wait for the terms of this rank's batch and return their sum, in rank order."""
        self._wait()
        return self._first.added(self._arrived, self._terms[self._first.communicator.rank].detach())

    def post_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of this rank's sum to all ranks that have columns."""
        self.gradient, self._label = gradient.contiguous(), "push, gradients"
        shapes = [one.shape for one in self._terms]
        self._transfer, self._arrived = self._first.to_columns(self.gradient, shapes, self._label)

    def gradients(self) -> list[Tensor | None]:
        """Wait for the gradients of all ranks' sums; return those of the parameters, from this rank's columns."""
        assert self.gradient is not None, "it was posted"
        self._wait()
        grads, self._arrived = self._arrived, []
        grads[self._first.communicator.rank] = self.gradient
        leaves = list(self._leaves.values())
        gradients = _gradients(self._terms, grads, [*leaves, *self._scores])
        by_leaf, of_scores = gradients[: len(leaves)], gradients[len(leaves) :]
        if of_scores:
            parts = [
                torch.zeros_like(one) if grad is None else grad
                for one, grad in zip(self._scores, of_scores, strict=True)
            ]
            totals = self._first.summed_everywhere(parts, "gradients of scores")
            through = _gradients(self._parts, totals, leaves)
            by_leaf = [
                other if one is None else one if other is None else one + other
                for one, other in zip(by_leaf, through, strict=True)
            ]
        self._terms, self._parts, self._scores = [], [], []
        return self._first.means(
            [
                torch.zeros_like(leaf) if grad is None and leaf.requires_grad else grad
                for leaf, grad in zip(leaves, by_leaf, strict=True)
            ]
        )

    def drop(self) -> None:
        """Wait for what is on its way, and use nothing of it."""
        self._wait()

    def _wait(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._first.communicator.begin_wait(self._label)
            transfer.finish()


def _gradients(outs: list[Tensor], grads: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of some tensors; ``None`` for those that need none, or that no output depends on.

    Outputs without a gradient have an empty one.
    """
    graded = [
        (out, grad) for out, grad in zip(outs, grads, strict=True) if out.numel() and grad.numel() and out.requires_grad
    ]
    asked = [one for one in wanted if one.requires_grad]
    if not (graded and asked):
        return [None] * len(wanted)
    outs_of, grads_of = zip(*graded, strict=True)
    gradients = iter(torch.autograd.grad(outs_of, asked, grads_of, allow_unused=True))
    return [next(gradients) if one.requires_grad else None for one in wanted]


class _Total(Function):
    """See :meth:`FirstLayer.total`."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, *parameters: Tensor) -> Tensor:
        ctx.flight = flight
        flight.post_terms()
        return flight.total()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.post_gradient(gradient)
        return (None, *ctx.flight.gradients())
