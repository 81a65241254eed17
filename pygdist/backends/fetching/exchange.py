"""The exchange of one hop: rows travel to the ranks that read them, and their gradients back to their owners.

The rows of each source group are aggregated while the rows of the next group travel. In the backward pass a rank
computes and sends the gradients of other ranks' rows, one rank after the other. While these travel, it computes the
gradients of its own rows (NeutronStar, Sec. 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pygdist.backends.fetching.arrival import Arrival
from pygdist.backends.fetching.groups import SourceGroup, SourceGroups
from pygdist.comm import Communicator, Message, Transfer, describe_rows, message_rows
from pygdist.comm.recorder import recorded
from pygdist.memory.overflow import Overflow

GradientOf: TypeAlias = Callable[[int, Message | None, SourceGroup, Any, Tensor | None], Tensor]
"""Called with the piece, the message (``None`` for own rows), the group, its rows if they are needed, and memory.

Returns the gradient of the rows, in the memory if that is given.
"""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Options and plan of the exchange of one hop on this rank.

    Attributes:
        communicator: The ranks.
        pieces: Rows that arrive: all in one piece, or one piece after the other to limit the memory.
        label: Names the hop in messages.
        ring: Exchange with one peer after the other.
        overlap: Aggregate while rows travel; otherwise wait for all of them first.
        wire: The dtype in which rows and gradients travel; ``None`` for their own.
        messages: Number of messages in which the rows of one rank travel; each is aggregated by itself.
        overflow: Holds the edges of a group until its rows are here; ``None`` for the device.
        whole: Returns all source rows of the hop, from this rank's rows; for aggregations that need all at once.
    """

    communicator: Communicator
    pieces: tuple[Arrival, ...]
    label: str
    ring: bool
    overlap: bool
    wire: torch.dtype | None
    messages: int
    overflow: Overflow | None
    whole: Callable[[Tensor], Tensor]

    @property
    def at_once(self) -> bool:
        """True if all rows arrive in one piece."""
        return len(self.pieces) == 1

    def positions_of(self, piece: int, message: Message) -> Tensor:
        """Places of the rows in a message, among the rows of this rank."""
        return self.pieces[piece].positions_of(message.rank, message.number, self.messages)

    def fetch(self, x: Tensor, piece: Arrival, *, keep: bool) -> Transfer:
        """Begin to fetch the rows of a piece; ``keep`` if the backward pass needs them."""
        plan, label = piece.plan, f"{self.label}, forward, {describe_rows(x)}"
        packed = self.communicator.pack(x, plan.send_index, self.label, self.wire).split(list(plan.send_counts))
        buffers = self.communicator.buffers
        halo = (
            x.new_empty((plan.num_received, *x.shape[1:]), dtype=self.wire)
            if keep
            else buffers.get("rows received", plan.num_received, x, self.wire)
        )
        incoming = halo.split(list(plan.recv_counts))
        transfer = Transfer(self.communicator, incoming, label, ring=self.ring, messages=self.messages)
        for message in transfer.targets:
            transfer.give(message, self._rows_in(packed, message))
        if not self.overlap:
            transfer.finish()
        return transfer

    def again(self, x: Tensor, number: int) -> dict[Message, Tensor]:
        """Fetch the rows of a piece once more; they stay until the next piece is fetched."""
        transfer = self.fetch(x, self.pieces[number], keep=False)
        rows = {message: transfer.take(message).to(x.dtype) for message in transfer.sources}
        transfer.finish()
        return rows

    def _rows_in(self, by_rank: Sequence[Tensor], message: Message) -> Tensor:
        rows = by_rank[message.rank]
        return rows[message_rows(rows.size(0), message.number, self.messages)]

    def give_back(self, gradients: Gradients, like: Tensor) -> Tensor:
        """Send the gradients of fetched rows to their owners, and return those of this rank's rows.

        Args:
            gradients: Computes the gradients.
            like: A tensor with their width and dtype.
        """
        out = None
        for number, piece in enumerate(self.pieces):
            gradients.turn_to(number)
            out = self._give_back(piece, gradients, like, out)
        assert out is not None
        return out

    def _give_back(self, piece: Arrival, gradients: Gradients, like: Tensor, local: Tensor | None) -> Tensor:
        plan, buffers = piece.plan, self.communicator.buffers
        label = f"{self.label}, backward, {describe_rows(like)}"
        arrived = buffers.get("gradients received", plan.num_sent, like, self.wire).split(list(plan.send_counts))
        computed = buffers.get("gradients sent", plan.num_received, like).split(list(plan.recv_counts))
        sent = computed
        if self.wire is not None:
            sent = buffers.get("gradients sent", plan.num_received, like, self.wire).split(list(plan.recv_counts))
        transfer = Transfer(self.communicator, arrived, label, ring=self.ring, back=True, messages=self.messages)
        if local is None and not self.overlap:
            local = self._computed(gradients.local)
        for message in transfer.targets:
            memory, rows = self._rows_in(computed, message), self._rows_in(sent, message)
            if rows.size(0):
                with recorded(self.communicator.recorder, "aggregate", f"gradient of rank {message.rank}'s rows"):
                    gradients.remote(message, memory)
                    if self.wire is not None:
                        rows.copy_(memory)
            if self.overlap:
                transfer.give(message, rows)
        out = self._computed(gradients.local) if local is None else local
        if not self.overlap:
            for message in transfer.targets:
                transfer.give(message, self._rows_in(sent, message))
            transfer.finish()
        for message in transfer.sources:
            rows = transfer.take(message) if self.overlap else self._rows_in(arrived, message)
            index = plan.send_index_of(message.rank)
            index = index[message_rows(index.numel(), message.number, self.messages)]
            self.communicator.add_rows(out, rows.to(out.dtype), index, self.label)
        if self.overlap:
            transfer.finish()
        return out

    def _computed(self, gradient: Callable[[], Tensor]) -> Tensor:
        with recorded(self.communicator.recorder, "aggregate", "gradient of own rows"):
            return gradient()

    def arriving(self, x: Tensor, groups: SourceGroups, first: Transfer, *, keep: bool) -> Iterator[ArrivedGroup]:
        """Yield source groups with their rows, in the order of arrival; the recorder notes the caller's time.

        Args:
            x: This rank's rows.
            groups: The edges.
            first: The transfer of the first piece, already begun.
            keep: The backward pass needs the rows.
        """
        for number, piece in enumerate(self.pieces):
            transfer = first if number == 0 else self.fetch(x, piece, keep=keep)
            remote = groups.remote[number]
            for message in transfer.sources:
                rows = transfer.take(message)
                if message in remote:
                    with recorded(self.communicator.recorder, "aggregate", f"rows of rank {message.rank}"):
                        yield ArrivedGroup(number, message, remote[message], rows.to(x.dtype))
            transfer.finish()


@dataclass(frozen=True)
class ArrivedGroup:
    """A source group whose rows are here, the number of their piece, and their message."""

    piece: int
    message: Message
    group: SourceGroup
    rows: Tensor


class Gradients:
    """Computes the gradients of the rows that a hop read: other ranks' rows, piece by piece, and this rank's.

    Args:
        of: Computes the gradient of one group's rows. It must not refer to this object: Python frees a reference cycle
            late.
        exchange: The exchange.
        groups: Its edges.
        x: This rank's rows, if their values are needed.
        arrived: The rows that arrived, if all of them are still here.
    """

    def __init__(
        self,
        of: GradientOf,
        exchange: Exchange,
        groups: SourceGroups,
        x: Tensor | None = None,
        arrived: dict[Message, Tensor] | None = None,
    ) -> None:
        self._of, self._exchange, self._groups, self._x, self._rows = of, exchange, groups, x, arrived
        self._piece = 0

    def turn_to(self, number: int) -> None:
        """Go on to piece ``number``."""
        self._piece = number
        if self._x is not None and not self._exchange.at_once:
            self._rows = self._exchange.again(self._x, number)

    def remote(self, message: Message, memory: Tensor) -> None:
        """Write the gradient of the rows in a message into ``memory``."""
        rows = None if self._rows is None else self._rows[message]
        gradient = self._of(self._piece, message, self._groups.remote[self._piece][message], rows, memory)
        if gradient is not memory:
            memory.copy_(gradient)

    def local(self) -> Tensor:
        """Gradient of this rank's rows by the edges between them."""
        return self._of(self._piece, None, self._groups.local, self._x, None)
