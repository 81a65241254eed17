"""An exchange under way: rows travel between all pairs of ranks while this rank does something else.

In ring order (NeutronStar, Sec. 4.3) a rank sends to the next one first, then to the one after that, while it receives
from the one before, and so on: no two ranks send to the same one at once, so a link carries one chunk at a time, and
chunks arrive one after the other instead of all at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm.recorder import Span, recorded

if TYPE_CHECKING:
    from pygdist.comm.communicator import Communicator

__all__ = ["Transfer"]

_AHEAD = 2  # chunks on their way at once in ring order: while one arrives the next is already sent for


class Transfer:
    """What travels in one exchange; every rank makes one, with the same label.

    Args:
        communicator: The ranks.
        incoming: Contiguous memory for what each rank sends, one tensor for each; the own one is left as it is.
        label: Named when something goes wrong.
        ring: One chunk after the other; without, all are sent at once.
        back: The other way round the ring, as gradients travel.

    Attributes:
        targets: The other ranks in the order in which this one sends to them.
        sources: The other ranks in the order in which their rows are to be taken.

    Example:
        >>> transfer = Transfer(communicator, incoming, "rows", ring=True)
        >>> for rank in transfer.targets:
        ...     transfer.give(rank, rows_for[rank])
        >>> compute_something()
        >>> for rank in transfer.sources:
        ...     use(transfer.take(rank))
        >>> transfer.finish()
    """

    def __init__(
        self,
        communicator: Communicator,
        incoming: Sequence[Tensor],
        label: str,
        *,
        ring: bool = True,
        back: bool = False,
    ) -> None:
        rank, size = communicator.rank, communicator.world_size
        after, before = ([(rank + sign * step) % size for step in range(1, size)] for sign in (1, -1))
        self.targets, self.sources = (before, after) if back else (after, before)
        self._communicator, self._label, self._ring = communicator, label, ring
        self._incoming = incoming
        self._device = incoming[0].device
        self._outgoing: dict[int, Tensor] = {}
        self._receives: dict[int, list[Any]] = {}
        self._sends: dict[int, list[Any]] = {}
        self._posted = 0  # of the targets
        self._asked: int | None = None
        self._began = time.monotonic_ns()
        communicator.announce(label)
        communicator.meter.total.calls += 1
        if not communicator.is_nccl:
            self._try(self._post_receives)

    def give(self, rank: int, rows: Tensor) -> None:
        """Let contiguous ``rows`` go to ``rank``; they must stay as they are until :meth:`finish`."""
        self._outgoing[rank] = rows
        self._post(_AHEAD if self._ring else len(self.targets))

    def take(self, rank: int) -> Tensor:
        """What ``rank`` sends, once it is here."""
        step = self.sources.index(rank) + 1
        self._post(step + _AHEAD if self._ring else len(self.targets))
        self._wait(self._receives.pop(rank, []), rank)
        return self._incoming[rank]

    def finish(self) -> None:
        """Wait for all that has not arrived, and for what is sent to be gone."""
        for rank in self.sources:
            self.take(rank)
        self._post(len(self.targets))
        for rank, works in self._sends.items():
            self._wait(works, rank)
        self._sends.clear()
        if self._communicator.recorder is not None:
            end = time.monotonic_ns()
            self._communicator.recorder.spans.append(Span("travel", self._label, self._began, end))
        self._communicator.done()

    def _post(self, steps: int) -> None:
        """Send what there is, in order, as far as the first ``steps`` targets."""
        while self._posted < min(steps, len(self.targets)) and self.targets[self._posted] in self._outgoing:
            target, source = self.targets[self._posted], self.sources[self._posted]
            self._posted += 1
            self._try(partial(self._post_step, target, source))

    def _post_receives(self) -> None:
        for rank in self.sources:
            if self._incoming[rank].numel():
                self._receives[rank] = [self._start(dist.irecv, rank, self._incoming[rank])]

    def _post_step(self, target: int, source: int) -> None:
        communicator, rows = self._communicator, self._outgoing[target]
        with recorded(communicator.recorder, "send", self._label):
            if not communicator.is_nccl:
                if rows.numel():
                    self._sends[target] = [self._start(dist.isend, target, rows)]
                return
            pairs = [(dist.isend, target, rows), (dist.irecv, source, self._incoming[source])]
            todo = [(op, rank, self._counted(op, tensor)) for op, rank, tensor in pairs if tensor.numel()]
            ops = [dist.P2POp(op, tensor, group=communicator.group, group_peer=rank) for op, rank, tensor in todo]
            if ops:
                self._receives[source] = self._sends[target] = dist.batch_isend_irecv(ops)

    def _start(self, op: Callable[..., Any], rank: int, tensor: Tensor) -> Any:
        end = "group_dst" if op is dist.isend else "group_src"
        return op(self._counted(op, tensor), group=self._communicator.group, **{end: rank})

    def _counted(self, op: Callable[..., Any], tensor: Tensor) -> Tensor:
        """The tensor as bytes: every dtype travels on every transport."""
        meter = self._communicator.meter
        (meter.sent if op is dist.isend else meter.received)(tensor.nbytes)
        return tensor.view(torch.uint8)

    def _wait(self, works: list[Any], rank: int) -> None:
        if not works:
            return
        communicator, self._asked = self._communicator, rank
        with communicator.meter.waiting(self._device), recorded(communicator.recorder, "wait", self._label):
            for work in works:
                self._try(work.wait if communicator.is_nccl else partial(work.wait, communicator.timeout))

    def _try(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except RuntimeError as error:
            raise self._communicator.lost(self._label, error, self._asked) from error
