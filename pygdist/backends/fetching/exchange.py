"""How the rows of a hop travel: forward to who reads them, group by group, and their gradients back to their owners.

Backward, the gradients of each rank's rows are computed and sent, one rank after the other, and the gradients of this
rank's own rows while they travel (NeutronStar, Sec. 4.3).
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

__all__ = ["ArrivedGroup", "Exchange", "Gradients"]

Whole: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One hop of a layer on this rank, and how its rows travel.

    Attributes:
        communicator: The ranks.
        pieces: What arrives: all at once, or piece by piece if the device is to hold no more than that at a time.
        label: Named when something goes wrong.
        ring: One peer after the other.
        overlap: Aggregate while rows travel; without, wait for all of them first.
        wire: The dtype in which rows and gradients travel; ``None`` for their own.
        messages: In how many messages the rows of a rank travel, and are aggregated.
        overflow: Where edges wait until their group is computed with; ``None`` for the device.
        whole: All rows that the hop reads, from those of this rank; for what cannot be done in groups.
    """

    communicator: Communicator
    pieces: tuple[Arrival, ...]
    label: str
    ring: bool
    overlap: bool
    wire: torch.dtype | None
    messages: int
    overflow: Overflow | None
    whole: Whole

    @property
    def at_once(self) -> bool:
        """Whether all rows may be here at a time."""
        return len(self.pieces) == 1

    def positions_of(self, piece: int, message: Message) -> Tensor:
        """Where rows belong that come with a message."""
        return self.pieces[piece].positions_of(message.rank, message.number, self.messages)

    def fetch(self, x: Tensor, piece: Arrival, *, keep: bool) -> Transfer:
        """Begin to fetch rows; ``keep`` where they are needed beyond the exchange."""
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
        """By message, the rows of a piece, fetched once more; until the next are."""
        transfer = self.fetch(x, self.pieces[number], keep=False)
        found = {message: transfer.take(message).to(x.dtype) for message in transfer.sources}
        transfer.finish()
        return found

    def _rows_in(self, by_rank: Sequence[Tensor], message: Message) -> Tensor:
        rows = by_rank[message.rank]
        return rows[message_rows(rows.size(0), message.number, self.messages)]

    def give_back(self, gradients: Gradients, like: Tensor) -> Tensor:
        """Send gradients to the owners of the rows that were fetched; returns those of this rank's rows.

        Args:
            gradients: Computes them.
            like: Rows of their width and dtype.
        """
        out = None
        for number, piece in enumerate(self.pieces):
            gradients.turn_to(number)
            out = self._give_back(piece, gradients, like, out)
        assert out is not None
        return out

    def _give_back(self, piece: Arrival, gradients: Gradients, like: Tensor, known: Tensor | None) -> Tensor:
        plan, buffers = piece.plan, self.communicator.buffers
        label = f"{self.label}, backward, {describe_rows(like)}"
        arrived = buffers.get("gradients received", plan.num_sent, like, self.wire).split(list(plan.send_counts))
        computed = buffers.get("gradients sent", plan.num_received, like).split(list(plan.recv_counts))
        sent = computed
        if self.wire is not None:
            sent = buffers.get("gradients sent", plan.num_received, like, self.wire).split(list(plan.recv_counts))
        transfer = Transfer(self.communicator, arrived, label, ring=self.ring, back=True, messages=self.messages)
        if known is None and not self.overlap:
            known = self._computed(gradients.own)
        for message in transfer.targets:
            memory, rows = self._rows_in(computed, message), self._rows_in(sent, message)
            if rows.size(0):
                with recorded(self.communicator.recorder, "aggregate", f"gradient of rank {message.rank}'s rows"):
                    gradients.remote(message, memory)
                    if self.wire is not None:
                        rows.copy_(memory)
            if self.overlap:
                transfer.give(message, rows)
        out = self._computed(gradients.own) if known is None else known
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
        """SourceGroups and their rows, in the order of arrival; the time until the next is noted as aggregation.

        Args:
            x: This rank's rows.
            groups: The edges.
            first: The first piece, under way.
            keep: Whether rows are needed beyond the exchange.
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
    """A group and the rows that it reads: of which piece, and how they came."""

    piece: int
    message: Message
    group: SourceGroup
    rows: Tensor


class Gradients:
    """Computes the gradients of a exchange: of each rank's rows, piece by piece, and of this rank's own.

    Args:
        of: From the piece and the message (``None`` for own rows), the group, and its rows if ``x`` is given: their
            gradient, which may be written into the memory given. It must not know of this object: what holds each
            other stays until Python looks for such circles.
        exchange: The exchange.
        groups: Its edges.
        x: This rank's rows, where their values are needed.
        kept: By message, the rows that arrived, if they are all still here.
    """

    def __init__(
        self,
        of: Callable[[int, Message | None, SourceGroup, Any, Tensor | None], Tensor],
        exchange: Exchange,
        groups: SourceGroups,
        x: Tensor | None = None,
        kept: dict[Message, Tensor] | None = None,
    ) -> None:
        self._of, self._exchange, self._chunks, self._x, self._rows = of, exchange, groups, x, kept
        self._piece = 0

    def turn_to(self, number: int) -> None:
        """The piece that comes next."""
        self._piece = number
        if self._x is not None and not self._exchange.at_once:
            self._rows = self._exchange.again(self._x, number)

    def remote(self, message: Message, memory: Tensor) -> None:
        """Writes the gradient of a rank's rows into memory."""
        rows = None if self._rows is None else self._rows[message]
        found = self._of(self._piece, message, self._chunks.remote[self._piece][message], rows, memory)
        if found is not memory:
            memory.copy_(found)

    def own(self) -> Tensor:
        """What this rank's own edges add to the gradient of its rows."""
        return self._of(self._piece, None, self._chunks.local, self._x, None)
