r"""Splits and gathers in pieces, while chunks are computed.

Inter-chunk pipelining (NeutronTP, Sec. 4.2.2): while a chunk is computed, the rows for the next chunk and the results
of the previous chunk are under way. :class:`SplitPipeline` sends rows from their owners to all ranks; each rank gets
its columns, or whole rows, :math:`(n, *, C) \to (N, *, c)`. :class:`GatherPipeline` sends columns, or terms of sums, to
the owners of rows, :math:`(N, *, c) \to (n, *, C)`. In a backward pass each pipeline carries the gradients of the other
one's rows. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from pygdist.backends.slicing.all_nodes import SliceLayout
from pygdist.backends.slicing.chunk_plan import Piece, Positions, Queue, length_of
from pygdist.comm import Transfer, describe_rows
from pygdist.comm.recorder import recorded
from pygdist.memory.ring import uploaded


@dataclass(frozen=True, kw_only=True)
class Shipment:
    r"""A tensor that travels between the owners of its rows and all ranks.

    Attributes:
        owned: The rows that this rank owns.
        rows: The rows of all ranks as this rank reads them, in any memory; ``None`` if pieces are sent as they are
            made.
        columns: The columns that each rank reads; ``None`` if each reads all of them.
        start: Position of the first owned row among the rows of all ranks.
        queue: The pieces that travel for each chunk.
        label: Names the tensor in errors.

    Shapes:
        ``owned`` is :math:`(n, *, C)`, ``rows`` is :math:`(N, *, c)`.
    """

    owned: Tensor
    rows: Tensor | None = None
    columns: tuple[slice, ...] | None = None
    start: int
    queue: Queue
    label: str

    def read_by(self, rank: int) -> Tensor:
        """Return a view of the owned rows with the columns that a rank reads."""
        return self.owned if self.columns is None else self.owned[..., self.columns[rank]]

    def among_owned(self, positions: Positions) -> Positions:
        """Return the positions of rows among the owned ones."""
        if isinstance(positions, slice):
            return slice(positions.start - self.start, positions.stop - self.start)
        return uploaded(positions, self.owned.device).long() - self.start

    def in_place(self, positions: Positions) -> Tensor | None:
        """Return a view of :attr:`rows` into which rows can be received; ``None`` if they need a buffer."""
        if self.rows is None or not isinstance(positions, slice) or self.rows.device != self.owned.device:
            return None
        return self.rows[positions]


class SplitPipeline:
    """Sends owned rows to all ranks and receives theirs, in the order in which chunks read them.

    Args:
        shipments: The tensors that travel, side by side where a chunk reads several.
        layout: The ranks, and how much is under way at once.
        what: Names the exchange in errors.
    """

    def __init__(self, shipments: Sequence[Shipment], layout: SliceLayout, *, what: str = "split") -> None:
        self._communicator, self._what = layout.communicator, what
        self._window = layout.ahead * len(shipments)
        # pieces in the order in which they travel, each with its number among those of its tensor
        self._pieces: list[tuple[Shipment, int, Piece]] = []
        self._needed = [0]  # pieces that hold all rows of the first chunks
        numbers = [count() for _ in shipments]
        for chunk in zip(*(one.queue for one in shipments), strict=True):
            for turn in zip_longest(*chunk):
                self._pieces += [
                    (shipment, next(number), piece)
                    for shipment, number, piece in zip(shipments, numbers, turn, strict=True)
                    if piece is not None
                ]
            self._needed.append(len(self._pieces))
        self._under_way: deque[Transfer] = deque()
        self._num_finished = 0

    def wait_for(self, num_chunks: int) -> None:
        """Wait for all rows that the first ``num_chunks`` chunks read."""
        needed = self._needed[num_chunks] if self._pieces else 0
        while self._num_finished < needed:
            while len(self._under_way) < min(self._window, len(self._pieces) - self._num_finished):
                self._under_way.append(self._begin(self._num_finished + len(self._under_way)))
            self._finish(self._under_way.popleft(), *self._pieces[self._num_finished])
            self._num_finished += 1

    def _begin(self, turn: int) -> Transfer:
        shipment, number, piece = self._pieces[turn]
        buffers, rank, slot = self._communicator.buffers, self._communicator.rank, turn % self._window
        received, incoming = shipment.read_by(rank), []
        for peer, positions in enumerate(piece):
            memory = received[:0] if peer == rank else shipment.in_place(positions)  # owned rows do not travel
            if memory is None:
                memory = buffers.get(f"rows of rank {peer}, {slot}", length_of(positions), received)
            incoming.append(memory)
        label = f"{shipment.label}, {describe_rows(shipment.owned)}, {self._what} {number}"
        transfer = Transfer(self._communicator, incoming, label, continues=number > 0)
        positions = shipment.among_owned(piece[rank])
        for message in transfer.targets:
            rows, use = shipment.read_by(message.rank), f"rows for rank {message.rank}, {slot}"
            with recorded(self._communicator.recorder, "pack", label):
                if isinstance(positions, Tensor):
                    packed = buffers.get(use, positions.numel(), rows)
                    rows = torch.index_select(rows, 0, positions, out=packed)
                else:
                    rows = rows[positions]
                    rows = rows if rows.is_contiguous() else buffers.get(use, rows.size(0), rows).copy_(rows)
            transfer.give(message, rows)
        return transfer

    def _finish(self, transfer: Transfer, shipment: Shipment, number: int, piece: Piece) -> None:
        rank, rows = self._communicator.rank, shipment.rows
        assert rows is not None
        _write(rows, piece[rank], shipment.read_by(rank)[shipment.among_owned(piece[rank])])
        for message in transfer.sources:
            received = transfer.take(message)
            if shipment.in_place(piece[message.rank]) is None:
                _write(rows, piece[message.rank], received)
        transfer.finish()


class _Gathered(NamedTuple):
    """A piece on its way to the owners of its rows."""

    transfer: Transfer
    incoming: list[Tensor]
    shipment: Shipment
    piece: Piece


class GatherPipeline:
    """Sends this rank's columns of all rows to the owners of the rows, and receives other columns of its own.

    Arriving columns are written beside each other into the shipment's owned rows. Of rows that every rank has whole,
    the sum over ranks is written.

    Args:
        shipments: The tensors that travel.
        layout: The ranks, and how much is under way at once.
        what: Names the exchange in errors.
    """

    def __init__(self, shipments: Sequence[Shipment], layout: SliceLayout, *, what: str = "gather") -> None:
        self._shipments, self._communicator, self._what = shipments, layout.communicator, what
        self._at_once = not layout.overlap
        self._window = layout.ahead * max(len(shipments), 1)
        self._under_way: deque[_Gathered] = deque()
        self._num_sent = [0] * len(shipments)

    def send_chunk(self, chunk: int) -> None:
        """Send all rows that are complete after a chunk; they must stay as they are until :meth:`finish`."""
        for number, shipment in enumerate(self._shipments):
            for piece in shipment.queue[chunk]:
                self._send_rows(number, shipment, piece)

    def send(self, piece: Piece, rows_for: Callable[[int], Tensor], number: int = 0) -> None:
        """Send a piece.

        Args:
            piece: The rows of each rank.
            rows_for: Gives the rows that travel to a rank: contiguous, on the device of the owned rows. It is called
                for each rank, this one last, and rows leave as soon as they are made. If it fails, NaN is sent in place
                of the missing rows.
            number: Number of the shipment.
        """
        if len(self._under_way) == self._window:  # its memory is used again
            self._finish_first()
        shipment, communicator = self._shipments[number], self._communicator
        buffers, rank, slot = communicator.buffers, communicator.rank, self._slot
        num_owned = length_of(piece[rank])
        incoming = [
            shipment.owned[:0] if peer == rank  # owned rows do not travel
            else buffers.get(f"own rows from {peer}, {slot}", num_owned, shipment.read_by(peer))
            for peer in range(communicator.world_size)
        ]  # fmt: skip
        turn = self._num_sent[number]
        label = f"{shipment.label}, {describe_rows(shipment.owned)}, {self._what} {turn}"
        transfer = Transfer(communicator, incoming, label, continues=turn > 0)
        missing = list(transfer.targets)
        try:
            while missing:
                transfer.give(missing[0], rows_for(missing[0].rank))
                del missing[0]
            incoming[rank] = rows_for(rank)
        except BaseException:
            # the courier and the other ranks wait for rows all the same, and would take those of the next exchange
            like = shipment.read_by(rank)
            for message in missing:
                shape = (length_of(piece[message.rank]), *like.shape[1:])
                transfer.give(message, like.new_full(shape, torch.nan if like.is_floating_point() else 0))
            raise
        self._num_sent[number] += 1
        self._under_way.append(_Gathered(transfer, incoming, shipment, piece))
        if self._at_once:
            self._finish_first()

    def buffer(self, rank: int, num_rows: int, like: Tensor) -> Tensor:
        """Return memory for the rows that travel to a rank in the piece that is sent next."""
        return self._communicator.buffers.get(f"rows back to {rank}, {self._slot}", num_rows, like)

    @property
    def _slot(self) -> int:
        """Number of the buffers that the next piece may use."""
        return sum(self._num_sent) % self._window

    def finish(self) -> None:
        """Wait for all pieces that are under way."""
        while self._under_way:
            self._finish_first()

    def _send_rows(self, number: int, shipment: Shipment, piece: Piece) -> None:
        rows, device = shipment.rows, shipment.owned.device
        assert rows is not None

        def rows_for(rank: int) -> Tensor:
            positions = piece[rank]
            if isinstance(positions, slice):
                return uploaded(rows[positions], device)
            with recorded(self._communicator.recorder, "pack", shipment.label):
                packed = self.buffer(rank, positions.numel(), rows)
                return uploaded(torch.index_select(rows, 0, positions, out=packed), device)

        self.send(piece, rows_for, number)

    def _finish_first(self) -> None:
        transfer, incoming, shipment, piece = self._under_way.popleft()
        rank = self._communicator.rank
        positions = shipment.among_owned(piece[rank])
        if shipment.columns is None:
            for message in transfer.sources:
                transfer.take(message)
            total = incoming[0].clone()
            for rows in incoming[1:]:  # in one order, so that runs repeat bit for bit
                total += rows
            _write(shipment.owned, positions, total)
        else:
            _write(shipment.read_by(rank), positions, incoming[rank])
            for message in transfer.sources:
                _write(shipment.read_by(message.rank), positions, transfer.take(message))
        transfer.finish()


def _write(memory: Tensor, positions: Positions, rows: Tensor) -> None:
    """Write rows to their positions, on whatever device."""
    if isinstance(positions, slice):
        memory[positions] = rows
    else:
        memory.index_copy_(0, uploaded(positions, memory.device).long(), uploaded(rows, memory.device))
