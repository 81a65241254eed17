"""Dropout that drops the same values in all rows of a split node, which otherwise would differ.

A mask is a hash of four numbers: one that rank 0 draws for the forward pass, the number of the call of dropout in this
pass, the node and the column. So the mask is the same for any number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph.links import drawn
from pygdist.native.library import load

_BITS = 24  # of a mask's hash that are compared with the probability


class AgreeingDropout(TorchFunctionMode):
    """A context in which ``dropout`` of a tensor with the part's rows drops the same values in all rows of a node.

    Messages may draw any random numbers, as an edge is in one part. Other random numbers are refused; a change of the
    state of torch's generator reveals them.

    Args:
        n_id: Global ids of the rows, ``(m,)``.
        communicator: The ranks. The first dropout of a pass makes one exchange.
    """

    def __init__(self, n_id: Tensor, communicator: Communicator) -> None:
        super().__init__()
        self._n_id, self._communicator = n_id, communicator
        self._seed: int | None = None
        self._calls, self._in_hop = 0, False
        self._state = torch.get_rng_state()
        self.in_doubt = False  # whether others have drawn meanwhile

    @contextlib.contextmanager
    def in_hop(self) -> Iterator[None]:
        """Run a hop, which draws for edges."""
        self._check()
        before, self._in_hop = self._in_hop, True
        try:
            yield
        finally:
            self._in_hop, self._state = before, torch.get_rng_state()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Refuse a pass that drew for the rows of nodes.

        Raises:
            InputError: If it has, and has not failed otherwise.
        """
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._check()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        if func is functional.dropout and not self._in_hop:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Drop values of nodes by hash, and other values as torch does; arguments are those of torch's ``dropout``."""
        if not (training and 0 < p < 1 and input.dim() and input.size(0) == self._n_id.numel()):
            return functional.dropout(input, p, training, inplace)
        if self._seed is None:
            self._check()
            drawn = float(torch.randint(2**31, (1,)))
            self._seed, self._state = int(self._communicator.gather([drawn])[0, 0]), torch.get_rng_state()
        self._calls += 1
        columns = input[:1].numel() if input.size(0) else 1
        kept = keeps(self._n_id, columns, p, seed=self._seed, call=self._calls).view(input.shape)
        factor = kept.to(input.dtype).div_(1 - p)
        return input.mul_(factor) if inplace else input * factor

    def _check(self) -> None:
        if not self._in_hop and not self.in_doubt and not torch.equal(self._state, torch.get_rng_state()):
            raise InputError(
                "the model draws random numbers outside of messages, and backend 'delayed' has several rows of a node, "
                "which would get different ones; use torch.nn.functional.dropout on rows of nodes (n, ...), which "
                "agrees between them, or backend comm",
                of_one_rank=True,
            )


def keeps(n_id: Tensor, columns: int, p: float, *, seed: int, call: int) -> Tensor:
    r"""Tell which values dropout keeps.

    Args:
        n_id: Global ids of rows; int64.
        columns: Values of a row.
        p: Probability with which a value is dropped.
        seed: A number for each forward pass.
        call: The number of the call of dropout in it.

    Returns:
        bool of shape ``(m, columns)``; rows of the same id are equal.
    """
    threshold = round(p * (1 << _BITS))
    native = None if n_id.is_cuda else load()
    if native is not None:
        n_id, kept = n_id.contiguous(), torch.empty(n_id.numel(), columns, dtype=torch.bool)
        sizes = n_id.numel(), columns, seed, call, threshold, torch.get_num_threads()
        native.pygdist_keep_values(n_id.data_ptr(), *sizes, kept.data_ptr())
        return kept
    keys = torch.full_like(n_id, call)[:, None], n_id[:, None], torch.arange(columns, device=n_id.device)[None]
    hashed = drawn(seed, *keys) >> (64 - _BITS)
    return (hashed & ((1 << _BITS) - 1)) >= threshold
