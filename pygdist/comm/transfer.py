"""An exchange under way: rows travel between all pairs of ranks while this rank does something else.

In ring order (NeutronStar, Sec. 4.3) a rank sends to the next one first, then to the one after that, while it receives
from the one before, and so on: no two ranks send to the same one at once, so a link carries one chunk at a time, and
chunks arrive one after the other instead of all at the end.
"""

from __future__ import annotations

import queue
import threading
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

__all__ = ["Courier", "Transfer"]


_AHEAD = 2  # chunks that are sent for at once: ranks are not quite at the same pace, and no link should wait for them


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
        self._communicator, self._label = communicator, label
        self._incoming = incoming
        self._device = incoming[0].device
        self._outgoing: dict[int, Tensor] = {}
        self._receives: dict[int, list[Any]] = {}
        self._sends: dict[int, list[Any]] = {}
        self._posted = 0  # of the targets
        self._asked: int | None = None
        self._began, self._ended = time.monotonic_ns(), False
        self._round: _Round | None = None
        communicator.announce(label)
        communicator.meter.total.calls += 1
        if not communicator.is_nccl:  # which takes sends and receives in pairs, and one pair after the other anyway
            self._try(self._post_receives)
            if ring:
                self._round = _Round(self.targets, self.sources)
                communicator.courier.submit(self._go_round, self._round)

    def give(self, rank: int, rows: Tensor) -> None:
        """Let contiguous ``rows`` go to ``rank``; they must stay as they are until :meth:`finish`."""
        self._outgoing[rank] = rows
        if self._round is not None:
            self._round.given[rank].set()
            return
        while self._posted < len(self.targets) and self.targets[self._posted] in self._outgoing:
            target, source = self.targets[self._posted], self.sources[self._posted]
            self._posted += 1
            with recorded(self._communicator.recorder, "send", self._label):
                self._try(partial(self._post_step, target, source))

    def take(self, rank: int) -> Tensor:
        """What ``rank`` sends, once it is here."""
        if self._round is None:
            self._wait(self._receives.pop(rank, []), rank)
        elif not self._round.here[rank].is_set():
            communicator = self._communicator
            with communicator.meter.waiting(self._device), recorded(communicator.recorder, "wait", self._label):
                self._round.here[rank].wait()
        self._raise()
        return self._incoming[rank]

    def finish(self) -> None:
        """Wait for all that has not arrived, and for what is sent to be gone."""
        if self._ended:
            return
        assert self._outgoing.keys() == set(self.targets), "each rank is given its rows, or none, before the end"
        for rank in self.sources:
            self.take(rank)
        if self._round is not None:
            self._round.gone.wait()
            self._raise()
        for rank, works in self._sends.items():
            self._wait(works, rank)
        self._sends.clear()
        self._ended = True
        if self._round is None:
            self._note("all ranks", self._began)
        self._communicator.done()

    def _go_round(self, moves: _Round) -> None:
        """On the courier's thread: send to one rank and take from one, then to and from the next.

        A send is over when its rows are in a buffer of the kernel, so it is what arrives that tells when the link is
        free.
        """
        try:
            start = time.monotonic_ns()
            for step, source in enumerate(self.sources):
                while self._posted < min(step + _AHEAD, len(self.targets)):
                    target = self.targets[self._posted]
                    if not moves.given[target].wait(self._communicator.timeout.total_seconds()):
                        raise RuntimeError(f"rows for rank {target} were never given")
                    with recorded(self._communicator.recorder, "send", f"{self._label}, to rank {target}", aside=True):
                        self._post_step(target, self.sources[self._posted])
                    self._posted += 1
                self._asked = source
                for work in self._receives.pop(source, []):
                    work.wait(self._communicator.timeout)
                    self._note(f"rank {source}", start)
                moves.here[source].set()
                start = time.monotonic_ns()
            for target, works in self._sends.items():
                self._asked = target
                for work in works:
                    work.wait(self._communicator.timeout)
            self._sends.clear()
        except BaseException as error:  # raised again on the main thread
            moves.error = error
        finally:
            for here in moves.here.values():
                here.set()
            moves.gone.set()

    def _raise(self) -> None:
        if self._round is not None and self._round.error is not None:
            error = self._round.error
            if not isinstance(error, RuntimeError):
                raise error
            raise self._communicator.lost(self._label, error, self._asked) from error

    def _note(self, source: str, start: int) -> None:
        recorder = self._communicator.recorder
        if recorder is not None:
            recorder.spans.append(
                Span("travel", f"{self._label}, from {source}", start, time.monotonic_ns(), aside=True)
            )

    def _post_receives(self) -> None:
        for rank in self.sources:
            if self._incoming[rank].numel():
                self._receives[rank] = [self._start(dist.irecv, rank, self._incoming[rank])]

    def _post_step(self, target: int, source: int) -> None:
        communicator, rows = self._communicator, self._outgoing[target]
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


class _Round:
    """What the courier and the main thread tell each other."""

    def __init__(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        self.given = {rank: threading.Event() for rank in targets}
        self.here = {rank: threading.Event() for rank in sources}
        self.gone = threading.Event()
        self.error: BaseException | None = None


class Courier:
    """A thread that keeps rows moving while the main thread computes; it starts with the first exchange."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        """Run ``job(*args)`` after what was submitted before; it must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="pygdist-courier", daemon=True)
            self._thread.start()
        self._jobs.put((job, args))

    def __del__(self) -> None:
        if self._thread is not None:
            self._jobs.put((_stop, ()))


def _serve(jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    while True:
        job, args = jobs.get()
        if job is _stop:
            return
        job(*args)
        del job, args  # a transfer holds its communicator, and that its courier


def _stop() -> None:
    """The courier's last job."""
