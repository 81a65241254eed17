"""An exchange of rows under way: messages travel between all pairs of ranks while this rank computes.

In ring order (NeutronStar, Sec. 4.3) rank *r* first sends to *r + 1* and receives from *r - 1*, then sends to *r + 2*
and receives from *r - 2*, and so on. No two ranks send to the same one at once, so each link carries one message at a
time, and messages arrive one after the other instead of all at the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pygdist.comm.recorder import Span, recorded
from pygdist.comm.staging import HostCopy, landing
from pygdist.comm.transport import Transport
from pygdist.memory.ring import upload

_AHEAD = 2  # messages on their way at once: ranks are not quite at the same pace, and no link should wait for them


class Message(NamedTuple):
    """A message: rows that this rank sends to, or receives from, another rank together.

    ``rank`` is the other rank. ``number`` counts the messages of the exchange to that rank, or from it, from 0.
    """

    rank: int
    number: int = 0


def message_rows(num_rows: int, number: int, messages: int) -> slice:
    """Return the rows in message ``number`` if ``messages`` messages carry ``num_rows`` rows; the same at both ends."""
    size = -(-num_rows // messages)
    return slice(min(number * size, num_rows), min((number + 1) * size, num_rows))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes: in this form every dtype travels on every transport."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    # dimensions of one may have any stride, which torch does not view as bytes
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Transfer:
    """One exchange of rows under way. Every rank makes one, with the same label and options.

    Args:
        transport: The ranks.
        incoming: One contiguous tensor for each rank, into which that rank's rows arrive; the entry for this rank does
            not change.
        label: Name of the exchange in errors and recordings.
        ring: Send one message after the other, in ring order; otherwise post all messages at once.
        back: Go round the ring in the opposite direction, as gradients do.
        messages: Number of messages that carry the rows from one rank to another. The first messages to all ranks
            travel before the second messages.
        continues: True if this transfer is one more piece of the previous exchange, and does not count as a call.

    Attributes:
        targets: The messages that this rank sends, in order.
        sources: The messages that this rank receives, in order.

    Example:
        >>> transfer = Transfer(communicator, incoming, "rows", ring=True)
        >>> for message in transfer.targets:
        ...     transfer.give(message, rows_for[message.rank])
        >>> compute_something()
        >>> for message in transfer.sources:
        ...     use(transfer.take(message))
        >>> transfer.finish()
    """

    def __init__(
        self,
        transport: Transport,
        incoming: Sequence[Tensor],
        label: str,
        *,
        ring: bool = True,
        back: bool = False,
        messages: int = 1,
        continues: bool = False,
    ) -> None:
        rank, size = transport.rank, transport.world_size
        after, before = (
            [Message((rank + sign * step) % size, number) for number in range(messages) for step in range(1, size)]
            for sign in (1, -1)
        )
        self.targets, self.sources = (before, after) if back else (after, before)
        self._transport, self._label = transport, label
        self._incoming = {
            message: incoming[message.rank][message_rows(incoming[message.rank].size(0), message.number, messages)]
            for message in self.sources
        }
        self._device = incoming[0].device
        # gloo reads and writes memory of the host alone
        self._is_staged = self._device.type == "cuda" and not transport.is_nccl
        self._arriving = {
            message: landing(rows) if self._is_staged else rows for message, rows in self._incoming.items()
        }
        self._outgoing: dict[Message, Tensor | HostCopy] = {}
        self._receives: dict[Message, list[Any]] = {}
        self._sends: dict[Message, list[Any]] = {}
        self._posted = 0  # of the targets
        self._peer: int | None = None  # whose message is waited for
        self._began, self._ended = time.monotonic_ns(), False
        self._round: _Round | None = None
        transport.announce(label)
        self._tag = transport.tag
        if not continues:
            transport.meter.called()
        if not transport.is_nccl:  # which takes sends and receives in pairs, and one pair after the other anyway
            with transport.attempt(label):
                self._post_receives()
            if ring:
                self._round = _Round(self.targets, self.sources)
                transport.courier.submit(partial(self._go_round, self._round))

    def give(self, message: Message, rows: Tensor) -> None:
        """Send the contiguous ``rows`` of one of the targets; the rows must not change until :meth:`finish`."""
        self._outgoing[message] = HostCopy(rows) if self._is_staged and rows.numel() else rows
        if self._round is not None:
            self._round.given[message].set()
            return
        while self._posted < len(self.targets) and self.targets[self._posted] in self._outgoing:
            target, source = self.targets[self._posted], self.sources[self._posted]
            self._posted += 1
            with recorded(self._transport.recorder, "send", self._label), self._transport.attempt(self._label):
                self._post_step(target, source)

    def take(self, message: Message) -> Tensor:
        """Wait for one of the sources and return its rows, a view of ``incoming``."""
        if self._round is None:
            self._wait(self._receives.pop(message, []), message.rank)
        elif not self._round.here[message].is_set():
            transport = self._transport
            with transport.waiting(self._device), recorded(transport.recorder, "wait", self._label):
                self._round.here[message].wait()
        self._raise()
        arrived = self._arriving.pop(message, None)
        if arrived is not None and self._is_staged:
            upload(arrived, self._incoming[message])
        return self._incoming[message]

    def finish(self) -> None:
        """Wait until all messages for this rank have arrived, and all messages of this rank are sent."""
        if self._ended:
            return
        assert self._outgoing.keys() == set(self.targets), "give() must be called for every target before finish()"
        for message in self.sources:
            self.take(message)
        if self._round is not None:
            self._round.gone.wait()
            self._raise()
        for message, works in self._sends.items():
            self._wait(works, message.rank)
        self._sends.clear()
        self._ended = True
        if self._round is None:
            self._record("all ranks", self._began)
        self._transport.done()

    def _go_round(self, progress: _Round) -> None:
        """On the courier's thread: send to one rank and receive from one, then to and from the next.

        A send is over when its rows are in a buffer of the kernel, so only arrivals tell when the link is free.
        """
        try:
            start = time.monotonic_ns()
            for step, source in enumerate(self.sources):
                self._send_until(step + _AHEAD, progress)
                self._peer = source.rank
                for work in self._receives.pop(source, []):
                    work.wait(self._transport.timeout)
                    self._record(f"rank {source.rank}", start)
                progress.here[source].set()
                start = time.monotonic_ns()
            for target, works in self._sends.items():
                self._peer = target.rank
                for work in works:
                    work.wait(self._transport.timeout)
            self._sends.clear()
        except BaseException as error:  # raised again on the main thread
            progress.error = error
        finally:
            for here in progress.here.values():
                here.set()
            progress.gone.set()

    def _send_until(self, count: int, progress: _Round) -> None:
        """Post the first ``count`` targets, each when its rows are given."""
        while self._posted < min(count, len(self.targets)):
            target = self.targets[self._posted]
            if not progress.given[target].wait(self._transport.timeout.total_seconds()):
                raise RuntimeError(f"rows for rank {target.rank} were never given")
            label = f"{self._label}, to rank {target.rank}"
            with recorded(self._transport.recorder, "send", label, aside=True):
                self._post_step(target, self.sources[self._posted])
            self._posted += 1

    def _raise(self) -> None:
        error = None if self._round is None else self._round.error
        if isinstance(error, RuntimeError):
            raise self._transport.lost(self._label, error, self._peer) from error
        if error is not None:
            raise error

    def _record(self, source: str, start: int) -> None:
        if self._transport.recorder is not None:
            span = Span("travel", f"{self._label}, from {source}", start, time.monotonic_ns(), aside=True)
            self._transport.recorder.spans.append(span)

    def _post_receives(self) -> None:
        for message in self.sources:
            if self._incoming[message].numel():
                self._receives[message] = [self._start(dist.irecv, message.rank, self._arriving[message])]

    def _post_step(self, target: Message, source: Message) -> None:
        transport, rows = self._transport, self._outgoing[target]
        rows = rows.get() if isinstance(rows, HostCopy) else rows
        if not transport.is_nccl:
            if rows.numel():
                self._sends[target] = [self._start(dist.isend, target.rank, rows)]
            return
        pairs = [(dist.isend, target.rank, rows), (dist.irecv, source.rank, self._incoming[source])]
        todo = [(op, rank, self._counted(op, tensor)) for op, rank, tensor in pairs if tensor.numel()]
        ops = [dist.P2POp(op, tensor, group=transport.group, group_peer=rank) for op, rank, tensor in todo]
        if ops:
            self._receives[source] = self._sends[target] = dist.batch_isend_irecv(ops)

    def _start(self, op: Callable[..., Any], rank: int, tensor: Tensor) -> Any:
        end = "group_dst" if op is dist.isend else "group_src"
        return op(self._counted(op, tensor), group=self._transport.group, tag=self._tag, **{end: rank})

    def _counted(self, op: Callable[..., Any], tensor: Tensor) -> Tensor:
        """Count the bytes of a tensor and return it as bytes."""
        if op is dist.isend:
            self._transport.meter.sent(tensor.nbytes, self._label)
        else:
            self._transport.meter.received(tensor.nbytes)
        return as_bytes(tensor)

    def _wait(self, works: list[Any], rank: int) -> None:
        if not works:
            return
        transport, self._peer = self._transport, rank
        limit = [] if transport.is_nccl else [transport.timeout]
        with transport.waiting(self._device), recorded(transport.recorder, "wait", self._label):
            for work in works:
                with transport.attempt(self._label, rank):
                    work.wait(*limit)


class _Round:
    """Events that the courier and the main thread wait for, and the courier's error."""

    def __init__(self, targets: Sequence[Message], sources: Sequence[Message]) -> None:
        self.given = {message: threading.Event() for message in targets}
        self.here = {message: threading.Event() for message in sources}
        self.gone = threading.Event()
        self.error: BaseException | None = None
