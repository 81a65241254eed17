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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm.recorder import Span, recorded

if TYPE_CHECKING:
    from pygdist.comm.communicator import Communicator

__all__ = ["Courier", "Leg", "Transfer", "as_bytes", "part_of"]


_END_S = 5.0  # a courier that takes longer waits for a rank that does not answer
_AHEAD = 2  # chunks that are sent for at once: ranks are not quite at the same pace, and no link should wait for them


class Leg(NamedTuple):
    """What travels at a time: a part of the rows that go to a rank, or come from it."""

    rank: int
    part: int = 0


def part_of(num_rows: int, part: int, parts: int) -> slice:
    """Which of ``num_rows`` rows are a part of them; the same on both ends."""
    size = -(-num_rows // parts)
    return slice(min(part * size, num_rows), min((part + 1) * size, num_rows))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: every dtype travels on every transport."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    # dimensions of one may have any stride, which torch does not view as bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Transfer:
    """What travels in one exchange; every rank makes one, with the same label.

    Args:
        communicator: The ranks.
        incoming: Contiguous memory for what each rank sends, one tensor for each; the own one is left as it is.
        label: Named when something goes wrong.
        ring: One chunk after the other; without, all are sent at once.
        back: The other way round the ring, as gradients travel.
        parts: Send what goes to a rank in so many parts, each other rank's first part before anybody's second; the same
            on all ranks.
        further: This is another piece of the exchange before, and no call by itself.

    Attributes:
        targets: What this rank sends, in order.
        sources: What it takes, in order.

    Example:
        >>> transfer = Transfer(communicator, incoming, "rows", ring=True)
        >>> for leg in transfer.targets:
        ...     transfer.give(leg, rows_for[leg.rank])
        >>> compute_something()
        >>> for leg in transfer.sources:
        ...     use(transfer.take(leg))
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
        parts: int = 1,
        further: bool = False,
    ) -> None:
        rank, size = communicator.rank, communicator.world_size
        after, before = (
            [Leg((rank + sign * step) % size, part) for part in range(parts) for step in range(1, size)]
            for sign in (1, -1)
        )
        self.targets, self.sources = (before, after) if back else (after, before)
        self._communicator, self._label = communicator, label
        self._incoming = {
            leg: incoming[leg.rank][part_of(incoming[leg.rank].size(0), leg.part, parts)] for leg in self.sources
        }
        self._device = incoming[0].device
        self._outgoing: dict[Leg, Tensor] = {}
        self._receives: dict[Leg, list[Any]] = {}
        self._sends: dict[Leg, list[Any]] = {}
        self._posted = 0  # of the targets
        self._asked: int | None = None
        self._began, self._ended = time.monotonic_ns(), False
        self._round: _Round | None = None
        communicator.announce(label)
        communicator.meter.total.calls += not further
        if not communicator.is_nccl:  # which takes sends and receives in pairs, and one pair after the other anyway
            self._try(self._post_receives)
            if ring:
                self._round = _Round(self.targets, self.sources)
                communicator.courier.submit(self._go_round, self._round)

    def give(self, leg: Leg, rows: Tensor) -> None:
        """Let contiguous ``rows`` go; they must stay as they are until :meth:`finish`."""
        self._outgoing[leg] = rows
        if self._round is not None:
            self._round.given[leg].set()
            return
        while self._posted < len(self.targets) and self.targets[self._posted] in self._outgoing:
            target, source = self.targets[self._posted], self.sources[self._posted]
            self._posted += 1
            with recorded(self._communicator.recorder, "send", self._label):
                self._try(partial(self._post_step, target, source))

    def take(self, leg: Leg) -> Tensor:
        """What comes from a rank, once it is here."""
        if self._round is None:
            self._wait(self._receives.pop(leg, []), leg.rank)
        elif not self._round.here[leg].is_set():
            communicator = self._communicator
            with communicator.meter.waiting(self._device), recorded(communicator.recorder, "wait", self._label):
                self._round.here[leg].wait()
        self._raise()
        return self._incoming[leg]

    def finish(self) -> None:
        """Wait for all that has not arrived, and for what is sent to be gone."""
        if self._ended:
            return
        assert self._outgoing.keys() == set(self.targets), "each rank is given its rows, or none, before the end"
        for leg in self.sources:
            self.take(leg)
        if self._round is not None:
            self._round.gone.wait()
            self._raise()
        for leg, works in self._sends.items():
            self._wait(works, leg.rank)
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
                        raise RuntimeError(f"rows for rank {target.rank} were never given")
                    label = f"{self._label}, to rank {target.rank}"
                    with recorded(self._communicator.recorder, "send", label, aside=True):
                        self._post_step(target, self.sources[self._posted])
                    self._posted += 1
                self._asked = source.rank
                for work in self._receives.pop(source, []):
                    work.wait(self._communicator.timeout)
                    self._note(f"rank {source.rank}", start)
                moves.here[source].set()
                start = time.monotonic_ns()
            for target, works in self._sends.items():
                self._asked = target.rank
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
        for leg in self.sources:
            if self._incoming[leg].numel():
                self._receives[leg] = [self._start(dist.irecv, leg.rank, self._incoming[leg])]

    def _post_step(self, target: Leg, source: Leg) -> None:
        communicator, rows = self._communicator, self._outgoing[target]
        if not communicator.is_nccl:
            if rows.numel():
                self._sends[target] = [self._start(dist.isend, target.rank, rows)]
            return
        pairs = [(dist.isend, target.rank, rows), (dist.irecv, source.rank, self._incoming[source])]
        todo = [(op, rank, self._counted(op, tensor)) for op, rank, tensor in pairs if tensor.numel()]
        ops = [dist.P2POp(op, tensor, group=communicator.group, group_peer=rank) for op, rank, tensor in todo]
        if ops:
            self._receives[source] = self._sends[target] = dist.batch_isend_irecv(ops)

    def _start(self, op: Callable[..., Any], rank: int, tensor: Tensor) -> Any:
        end = "group_dst" if op is dist.isend else "group_src"
        return op(self._counted(op, tensor), group=self._communicator.group, **{end: rank})

    def _counted(self, op: Callable[..., Any], tensor: Tensor) -> Tensor:
        """The tensor as bytes, which are counted."""
        meter = self._communicator.meter
        (meter.sent if op is dist.isend else meter.received)(tensor.nbytes)
        return as_bytes(tensor)

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

    def __init__(self, targets: Sequence[Leg], sources: Sequence[Leg]) -> None:
        self.given = {leg: threading.Event() for leg in targets}
        self.here = {leg: threading.Event() for leg in sources}
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

    def close(self) -> None:
        """End the thread; what it does for an exchange that failed may take until its timeout, and is left alone."""
        if self._thread is not None:
            self._jobs.put((_stop, ()))
            self._thread.join(timeout=_END_S)
            self._thread = None

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
