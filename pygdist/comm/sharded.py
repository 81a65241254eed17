"""Sharded weights: each rank trains the columns that it holds, and gradients never travel (P3, Sec. 3.2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pygdist.comm.communicator import Communicator


class ShardedWeights:
    """The first layer's weights, whose columns are divided among ranks as the feature columns are.

    Each rank has all columns of a weight. The columns of other ranks are out of date, and so are the entries for these
    columns in an optimiser's state. :meth:`gather` brings them up to date: before an evaluation, before a checkpoint
    and at the end of training.

    Args:
        parameters: The weights, ``(H, F)``.
        slices: For each rank, its slice of the columns.
        communicator: The ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], slices: Sequence[slice], communicator: Communicator) -> None:
        self.parameters, self._slices, self._communicator = list(parameters), list(slices), communicator

    def share(self) -> None:
        """Give all ranks the weights of rank 0, as DDP does for its parameters."""
        communicator = self._communicator
        for one in self.parameters:
            values, is_first = one.detach().contiguous(), communicator.rank == 0
            incoming = [values[:0].clone() for _ in range(communicator.world_size)]
            if not is_first:
                incoming[0] = torch.empty_like(values)
            outgoing = [values if is_first else values[:0]] * communicator.world_size
            communicator.send_and_receive(outgoing, incoming, "first weights")
            if not is_first:
                one.detach().copy_(incoming[0])

    def gather(self, optimizers: Iterable[Optimizer]) -> None:
        """Update all columns, of the weights and of the optimisers' state, from their ranks. Every rank calls it."""
        for one in self.parameters:
            states = [optimizer.state.get(one, {}) for optimizer in optimizers]
            alike = [
                value
                for state in states
                for value in state.values()
                if isinstance(value, Tensor) and value.shape == one.shape
            ]
            for values in (one.detach(), *alike):
                self._bring(values)

    def _bring(self, values: Tensor) -> None:
        communicator, mine = self._communicator, self._slices[self._communicator.rank]
        outgoing = values[:, mine].contiguous()
        incoming = [values.new_empty((values.size(0), one.stop - one.start)) for one in self._slices]
        communicator.send_and_receive([outgoing] * communicator.world_size, incoming, "first weights")
        for rank, one in enumerate(self._slices):
            if rank != communicator.rank:
                values[:, one] = incoming[rank]

    def norm_with(self, others: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients: these weights' on all ranks, and other parameters' on this rank.

        Every rank makes the call. Gradients of other parameters must be equal on all ranks.
        """
        mine = self._slices[self._communicator.rank]
        squares = [one.grad[:, mine].double().square().sum() for one in self.parameters if one.grad is not None]
        here = float(torch.stack(squares).sum()) if squares else 0.0
        total = self._communicator.gather([here])[:, 0].sum()
        further = [one.grad.double().square().sum() for one in others if one.grad is not None]
        return (total + (torch.stack(further).sum().cpu() if further else 0.0)).sqrt()
