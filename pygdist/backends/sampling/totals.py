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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pygdist.comm import Communicator, Transfer
from pygdist.comm.derivatives import once_differentiable
from pygdist.comm.slices import columns_of
from pygdist.hops.first_layer import Cut, InEdges
from pygdist.kernels import CSR


class FirstLayer:
    """A model's first layer, computed by all ranks for all ranks.

    Args:
        layer: The layer.
        cut: The way in which it is cut.
        columns: This rank's columns of all nodes, ``(N, c)``.
        width: Number of columns of all ranks together.
        communicator: The ranks.

    Attributes:
        has_columns: For each rank, True if it holds any column.
    """

    def __init__(self, layer: nn.Module, cut: Cut, columns: Tensor, width: int, communicator: Communicator) -> None:
        self.layer, self.cut, self._columns, self.communicator = layer, cut, columns, communicator
        slices = [columns_of(width, rank, communicator.world_size) for rank in range(communicator.world_size)]
        self._mine, self.has_columns = slices[communicator.rank], [one.start < one.stop for one in slices]

    def terms(self, blocks: Sequence[InEdges], parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Return this rank's term for each batch, ``(D_q, H)``; in full precision, as they are summed."""
        dtype = parameters[self.cut.weights[0]].dtype
        with torch.autocast(self._columns.device.type, enabled=False):
            return [
                self.cut.partial(self.layer, parameters, *self._in_type(block, dtype), self._mine) for block in blocks
            ]

    def _in_type(self, edges: InEdges, dtype: torch.dtype) -> tuple[InEdges, Tensor]:
        """Return edges and the columns that they read in a type; of columns in another type, as on disk, only those."""
        if edges.weight is not None:
            edges = replace(edges, weight=edges.weight.to(dtype))
        if self._columns.dtype == dtype:
            return edges, self._columns
        index = edges.csr.index
        ids, place = torch.cat([index.long(), edges.row_id]).unique(return_inverse=True)
        local, row_id = place.split([index.numel(), edges.num_rows])
        csr = CSR(edges.csr.indptr, local.to(torch.int32), ids.numel())
        return replace(edges, csr=csr, row_id=row_id), self._columns[ids].to(dtype)

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

    Every rank makes the same calls, in the same order. Between two of them others may be made for other steps.

    Args:
        first: The layer.
        blocks: The edges of all ranks' batches, by rank.
        lasts: The parameters may change before :meth:`gradients`.

    Attributes:
        gradient: Gradient of this rank's sum, ``(D, H)``, once it is known.
    """

    def __init__(self, first: FirstLayer, blocks: Sequence[InEdges], *, lasts: bool = False) -> None:
        self._first, self._label, self._arrived = first, "", list[Tensor]()
        self._transfer: Transfer | None = None
        self.gradient: Tensor | None = None
        named = first.cut.parameters(first.layer)
        with torch.enable_grad():
            self._leaves = {
                name: (one.detach().clone() if lasts else one.detach()).requires_grad_(one.requires_grad)
                for name, one in named.items()
            }
            self._terms = first.terms(blocks, self._leaves)

    def post_terms(self) -> None:
        """Send each rank its term."""
        first, mine = self._first, self._own
        here = first.has_columns[first.communicator.rank]
        incoming = [mine.new_empty(mine.shape if has else (0, *mine.shape[1:])) for has in first.has_columns]
        outgoing = [one.detach().contiguous() if here else one.detach()[:0] for one in self._terms]
        self._post(outgoing, incoming, "pull, sums")

    def total(self) -> Tensor:
        """Wait for the terms of this rank's batch and return their sum, in rank order."""
        arrived = self._taken(self._own)
        with_columns = [one for one, has in zip(arrived, self._first.has_columns, strict=True) if has]
        total = with_columns[0] if with_columns else self._own
        for one in with_columns[1:]:
            total = total + one
        return total.clone() if len(with_columns) < 2 else total  # not the memory of a term

    def post_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of this rank's sum to all ranks that have columns."""
        first, gradient = self._first, gradient.contiguous()
        here = first.has_columns[first.communicator.rank]
        incoming = [gradient.new_empty(one.shape if here else (0, *one.shape[1:])) for one in self._terms]
        outgoing = [gradient if has else gradient[:0] for has in first.has_columns]
        self._post(outgoing, incoming, "push, gradients")
        self.gradient = gradient

    def gradients(self) -> list[Tensor | None]:
        """Wait for the gradients of all ranks' sums; return those of the parameters, from this rank's columns."""
        assert self.gradient is not None, "it was posted"
        grads = self._taken(self.gradient)
        wanted = [one for one in self._leaves.values() if one.requires_grad]
        graded = [(one, grad) for one, grad in zip(self._terms, grads, strict=True) if one.numel() and grad.numel()]
        by_leaf: dict[int, Tensor | None] = {}
        if graded and wanted:
            outs, grads_out = zip(*graded, strict=True)
            grads_in = torch.autograd.grad(outs, wanted, grads_out, allow_unused=True)
            by_leaf = dict(zip(map(id, wanted), grads_in, strict=True))
        self._terms = []
        none = [torch.zeros_like(one) if one.requires_grad else None for one in self._leaves.values()]
        results = [by_leaf.get(id(one)) for one in self._leaves.values()]
        return [zero if one is None else one for one, zero in zip(results, none, strict=True)]

    def drop(self) -> None:
        """Wait for what is on its way, and use nothing of it."""
        self._taken(self._own)

    @property
    def _own(self) -> Tensor:
        return self._terms[self._first.communicator.rank].detach()

    def _post(self, outgoing: list[Tensor], incoming: list[Tensor], label: str) -> None:
        transfer = Transfer(self._first.communicator, incoming, label, ring=False)
        for message in transfer.targets:
            transfer.give(message, outgoing[message.rank])
        self._first.communicator.done()  # nobody waits for it yet
        self._transfer, self._arrived, self._label = transfer, incoming, label

    def _taken(self, mine: Tensor) -> list[Tensor]:
        """Wait for what was posted last; ``mine`` stands for this rank's own."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._first.communicator.begin_wait(self._label)
            transfer.finish()
        arrived, self._arrived = self._arrived, []
        if arrived:
            arrived[self._first.communicator.rank] = mine
        return arrived


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
