"""Rows on their way to all ranks and back to their owners, piece by piece, while chunks are computed.

Inter-chunk pipelining (NeutronTP, Sec. 4.2.2): what the next chunk reads is on its way while one is computed, and so is
what the one before made. :class:`Outward` is a split, or a share where every rank needs whole rows, cut into the pieces
of a :data:`~pygdist.backends.slicing.chunk_plan.Queue`; :class:`Homeward` is a gather, or the sum of what all ranks
say of a row. Each is the other's backward pass. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pygdist.backends.slicing.chunk_plan import AHEAD, Piece, Queue, Rows, length_of
from pygdist.comm import Communicator, Transfer, describe_rows
from pygdist.comm.recorder import recorded
from pygdist.comm.slices import columns_of

__all__ = ["Freight", "Homeward", "Outward", "slices_of"]


def slices_of(width: int, world_size: int) -> tuple[slice, ...]:
    """The columns of each rank."""
    return tuple(columns_of(width, peer, world_size) for peer in range(world_size))


@dataclass(frozen=True, kw_only=True)
class Freight:
    r"""Something of which each rank has some rows, and reads all ranks' rows or some columns of these.

    Attributes:
        own: This rank's rows.
        every: The rows of all ranks, as this rank reads them; anywhere. Without, they are given as they are made.
        columns: Which of its columns each rank reads; all of them by default.
        start: Where the first of its own rows stands among all.
        queue: What travels for each chunk.
        label: Named when something goes wrong.

    Shapes:
        ``own`` is :math:`(n, *, C)`, ``every`` is :math:`(N, *, c)`.
    """

    own: Tensor
    every: Tensor | None = None
    columns: tuple[slice, ...] | None = None
    start: int
    queue: Queue
    label: str

    def part(self, rank: int) -> Tensor:
        """What a rank reads of this rank's own rows; a view."""
        return self.own if self.columns is None else self.own[..., self.columns[rank]]

    def own_rows(self, rows: Rows) -> Rows:
        """Where they stand among this rank's own."""
        if isinstance(rows, slice):
            return slice(rows.start - self.start, rows.stop - self.start)
        return rows.to(self.own.device).long() - self.start


class Outward:
    """Rows of this rank on their way to all, in the order of their queues; what is next is on its way meanwhile.

    Args:
        freights: What travels; side by side where a chunk reads several.
        communicator: The ranks.
        ahead: Pieces of each freight that are under way at once; with one, nothing travels during a computation.
        what: Names the exchange.
    """

    def __init__(
        self, freights: Sequence[Freight], communicator: Communicator, *, ahead: int = AHEAD, what: str = "split"
    ) -> None:
        self._freights, self._communicator, self._what = freights, communicator, what
        self._window = ahead * len(freights)
        # pieces in the order in which they travel, and after how many of them each chunk has all that it reads
        self._pieces: list[tuple[Freight, int, Piece]] = []
        self._needed = [0]
        made = [0] * len(freights)
        for chunk in zip(*(freight.queue for freight in freights), strict=True):
            for turn in range(max(map(len, chunk))):
                for number, (freight, pieces) in enumerate(zip(freights, chunk, strict=True)):
                    if turn < len(pieces):
                        self._pieces.append((freight, made[number], pieces[turn]))
                        made[number] += 1
            self._needed.append(len(self._pieces))
        self._under_way: deque[Transfer] = deque()
        self._taken = 0

    def take(self, num_chunks: int) -> None:
        """Wait for all that the first so many chunks read."""
        needed = self._needed[num_chunks] if self._freights else 0
        while self._taken < needed:
            while len(self._under_way) < min(self._window, len(self._pieces) - self._taken):
                self._under_way.append(self._begin(self._taken + len(self._under_way)))
            self._finish(self._under_way.popleft(), *self._pieces[self._taken])
            self._taken += 1

    def _begin(self, place: int) -> Transfer:
        freight, number, piece = self._pieces[place]
        memory, rank, slot = self._communicator.buffers, self._communicator.rank, place % self._window
        mine, incoming = freight.part(rank), []
        for peer, rows in enumerate(piece):
            there = mine[:0] if peer == rank else _in_place(freight, rows)  # this rank's own do not travel
            use = f"rows of rank {peer}, {slot}"
            incoming.append(memory.get(use, length_of(rows), mine) if there is None else there)
        label = f"{freight.label}, {describe_rows(freight.own)}, {self._what} {number}"
        transfer = Transfer(self._communicator, incoming, label, continues=number > 0)
        rows = freight.own_rows(piece[rank])
        for message in transfer.targets:
            part = freight.part(message.rank)
            with recorded(self._communicator.recorder, "pack", label):
                if isinstance(rows, slice):
                    part = part[rows]
                    if not part.is_contiguous():
                        part = memory.get(f"rows for rank {message.rank}, {slot}", part.size(0), part).copy_(part)
                else:
                    buffer = memory.get(f"rows for rank {message.rank}, {slot}", rows.numel(), part)
                    part = torch.index_select(part, 0, rows, out=buffer)
            transfer.give(message, part)
        return transfer

    def _finish(self, transfer: Transfer, freight: Freight, number: int, piece: Piece) -> None:
        rank, every = self._communicator.rank, freight.every
        assert every is not None
        own = freight.own_rows(piece[rank])
        _put(every, piece[rank], freight.part(rank)[own])
        for message in transfer.sources:
            rows = transfer.take(message)
            if _in_place(freight, piece[message.rank]) is None:
                _put(every, piece[message.rank], rows)
        transfer.finish()


class _Homecoming(NamedTuple):
    transfer: Transfer
    incoming: list[Tensor]
    freight: Freight
    piece: Piece


class Homeward:
    """Rows of all ranks, as this rank made its columns of them, on their way to their owners.

    What arrives is written to the freight's own rows: each rank's columns beside the others', or, of rows that every
    rank has whole, the sum of what all say.

    Args:
        freights: What may travel.
        communicator: The ranks.
        ahead: Pieces of each freight that are under way at once; with one, nothing travels during a computation.
        what: Names the exchange.
    """

    def __init__(
        self, freights: Sequence[Freight], communicator: Communicator, *, ahead: int = AHEAD, what: str = "gather"
    ) -> None:
        self._freights, self._communicator, self._what, self._ahead = freights, communicator, what, ahead
        self._window = ahead * max(len(freights), 1)
        self._under_way: deque[_Homecoming] = deque()
        self._sent = [0] * len(freights)

    def send_chunk(self, chunk: int) -> None:
        """Let all go that is complete after a chunk; its rows must stay as they are until the end."""
        for number, freight in enumerate(self._freights):
            for piece in freight.queue[chunk]:
                self._send_of_all(number, freight, piece)

    def send(self, piece: Piece, rows_for: Callable[[int], Tensor], number: int = 0) -> None:
        """Let a piece go.

        Args:
            piece: Of each rank, its rows.
            rows_for: Gives what travels to a rank: contiguous, where the owner's rows are. It is called for each, the
                own one last, and each goes when it is there. If it fails, NaN goes in place of what is missing.
            number: Of the freight.
        """
        if len(self._under_way) == self._window:  # its memory is used again
            self._take()
        freight, communicator = self._freights[number], self._communicator
        memory, rank, slot = communicator.buffers, communicator.rank, self.slot
        count = length_of(piece[rank])
        incoming = [
            freight.own[:0] if peer == rank  # its own do not travel
            else memory.get(f"own rows from {peer}, {slot}", count, freight.part(peer))
            for peer in range(communicator.world_size)
        ]  # fmt: skip
        turn = self._sent[number]
        label = f"{freight.label}, {describe_rows(freight.own)}, {self._what} {turn}"
        transfer = Transfer(communicator, incoming, label, continues=turn > 0)
        missing = list(transfer.targets)
        try:
            while missing:
                transfer.give(missing[0], rows_for(missing[0].rank))
                del missing[0]
            incoming[rank] = rows_for(rank)
        except BaseException:
            # the courier, and the others, wait for rows all the same, and would take those of the next exchange
            mine = freight.part(rank)
            for message in missing:
                shape = (length_of(piece[message.rank]), *mine.shape[1:])
                transfer.give(message, mine.new_full(shape, torch.nan if mine.is_floating_point() else 0))
            raise
        self._sent[number] += 1
        self._under_way.append(_Homecoming(transfer, incoming, freight, piece))
        if self._ahead == 1:
            self._take()

    def memory(self, rank: int, num_rows: int, like: Tensor) -> Tensor:
        """For the rows that travel to a rank in the piece that is sent next."""
        return self._communicator.buffers.get(f"rows back to {rank}, {self.slot}", num_rows, like)

    @property
    def slot(self) -> int:
        """Which of the memory the next piece may have."""
        return sum(self._sent) % self._window

    def finish(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._take()

    def _send_of_all(self, number: int, freight: Freight, piece: Piece) -> None:
        every, mine = freight.every, freight.part(self._communicator.rank)
        assert every is not None

        def rows_for(rank: int) -> Tensor:
            rows = piece[rank]
            if isinstance(rows, slice):
                return every[rows].to(mine.device)
            with recorded(self._communicator.recorder, "pack", freight.label):
                packed = self.memory(rank, rows.numel(), every)
                return torch.index_select(every, 0, rows, out=packed).to(mine.device)

        self.send(piece, rows_for, number)

    def _take(self) -> None:
        transfer, incoming, freight, piece = self._under_way.popleft()
        rank = self._communicator.rank
        place = freight.own_rows(piece[rank])
        if freight.columns is None:
            for message in transfer.sources:
                transfer.take(message)
            total = incoming[0].clone()
            for rows in incoming[1:]:  # in one order, so that runs repeat bit for bit
                total += rows
            _put(freight.own, place, total)
        else:
            _put(freight.part(rank), place, incoming[rank])
            for message in transfer.sources:
                _put(freight.part(message.rank), place, transfer.take(message))
        transfer.finish()


def _in_place(freight: Freight, rows: Rows) -> Tensor | None:
    """Where rows may arrive without being put anywhere."""
    every = freight.every
    here = every is not None and isinstance(rows, slice) and every.device == freight.own.device
    return every[rows] if here and every is not None else None


def _put(memory: Tensor, place: Rows, rows: Tensor) -> None:
    """Write rows to their place, on whatever device."""
    if isinstance(place, slice):
        memory[place] = rows
    else:
        memory.index_copy_(0, place.to(memory.device).long(), rows.to(memory.device))
