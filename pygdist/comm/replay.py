"""Several parts on one rank: they run one after another, and exchange rows between two runs.

If a part needs rows that another part has not computed yet, the part stores the rows that it sends, and stops
(:class:`Postponed`). When all parts of all ranks have stopped, ranks exchange the stored rows. Then each part runs
again from its beginning, gets the rows of the exchanges before, and goes on to its next exchange. So a part must do the
same each time, and runs N + 1 times for N exchanges. This takes more time, but memory holds only one part at a time;
the stored rows are in files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from pygdist.comm.communicator import Communicator
from pygdist.comm.plan import ExchangePlan
from pygdist.errors import InputError
from pygdist.memory.overflow import in_file


class Postponed(Exception):
    """Stops a part whose exchange needs rows that other parts have yet to compute."""


def run_parts(
    parts: Sequence[int],
    num_parts: int,
    run: Callable[[PartCommunicator], None],
    communicator: Communicator,
    folder: Path,
) -> int:
    """Run this rank's parts, again after each exchange, until all parts are done. Every rank makes the call.

    Args:
        parts: The parts of this rank: ``rank, rank + world_size, ...`` below ``num_parts``.
        num_parts: Number of parts of all ranks.
        run: Called with a part's :class:`PartCommunicator`; runs this part, without gradients, and does not catch
            :class:`~pygdist.comm.replay.Postponed`. The function must do the same each time; only the last call runs to
            its end.
        communicator: The ranks.
        folder: An empty folder for the rows that are exchanged.

    Returns:
        The number of times that each part ran.

    Raises:
        RuntimeError: On all ranks, if some parts end while others wait for an exchange.
    """
    answers = _Answers(parts, num_parts, communicator, folder)
    runs = 0
    while True:
        runs += 1
        asking = 0
        for part in parts:
            try:
                run(PartCommunicator(part, answers))
            except Postponed:
                asking += 1
        waiting = int(communicator.gather([float(asking)]).sum())
        if not waiting:
            return runs
        if waiting != num_parts:  # on all ranks: a rank that goes on alone would wait for ever
            raise RuntimeError(
                f"{waiting} of {num_parts} parts wait for an exchange and the others have ended: every part must make "
                "the same exchanges"
            )
        answers.exchange()


class PartCommunicator(Communicator):
    """A communicator of one part: ``rank`` is the part's number, ``world_size`` the number of parts.

    ``answers`` holds the rows that this rank's parts have received so far.
    """

    def __init__(self, part: int, answers: _Answers) -> None:
        super().__init__()
        self.rank, self.world_size = part, answers.num_parts
        self._answers, self._asked = answers, 0

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return Communicator, ()  # the answers are those of one pass

    @override
    def exchange_rows(
        self, x: Tensor, plan: ExchangePlan, *, label: str = "rows", ring: bool = False, wire: torch.dtype | None = None
    ) -> Tensor:
        sent = x.detach().index_select(0, plan.send_index)
        return self._ask(sent, plan.send_counts, plan.recv_counts).to(x.device)

    @override
    def sum_over_ranks(self, x: Tensor, *, label: str = "sum") -> Tensor:
        return self._from_all(x.detach()[None]).sum(dim=0)

    @override
    def gather(self, values: Sequence[float]) -> Tensor:
        return self._from_all(torch.tensor([values], dtype=torch.float64))

    @override
    def agree(self, error: str | None) -> None:
        # the exchange carries the reason, or parts that stop first would not know it
        letters = [] if error is None else list(error.encode())
        longest = int(self.gather([float(len(letters))]).max())
        if longest:
            reasons = self.gather([float(byte) for byte in letters] + [0.0] * (longest - len(letters)))
            first = next(row for row in reasons if row.any())
            raise InputError(bytes(int(byte) for byte in first if byte).decode())

    @override
    def all_to_all(self, outgoing: Sequence[Tensor], *, label: str) -> list[Tensor]:
        raise InputError(
            f"{label}: parts that run one after another exchange rows and sums, no plans; "
            "give each part a rank of its own"
        )

    def _from_all(self, row: Tensor) -> Tensor:
        """Return a row of every part, this one's included."""
        peers = [int(peer != self.rank) for peer in range(self.world_size)]
        others = self._ask(row.expand(self.world_size - 1, *row.shape[1:]), peers, peers).to(row.device)
        return torch.cat([others[: self.rank], row, others[self.rank :]])

    def _ask(self, sent: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        number, self._asked = self._asked, self._asked + 1
        rows = self._answers.find(number, self.rank)
        if rows is None:
            self._answers.leave(self.rank, sent, send_counts, recv_counts)
            raise Postponed
        return rows


class _Question(NamedTuple):
    """The rows that a part sends, grouped by receiver, and the number that it expects from each."""

    sent: Tensor
    send_counts: Sequence[int]
    recv_counts: Sequence[int]


class _Answers:
    """The exchanges of this rank's parts: one open, all earlier ones answered."""

    def __init__(self, parts: Sequence[int], num_parts: int, communicator: Communicator, folder: Path) -> None:
        self.num_parts = num_parts
        self._parts, self._communicator, self._folder = list(parts), communicator, folder
        self._answered = 0
        self._open: dict[int, _Question] = {}
        self._received: dict[tuple[int, int], Tensor] = {}

    def find(self, number: int, part: int) -> Tensor | None:
        """Return the rows that a part received in an exchange; ``None`` if that is still open."""
        return self._received[number, part] if number < self._answered else None

    def leave(self, part: int, sent: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        """Store the rows that a part sends in the open exchange."""
        self._open[part] = _Question(in_file(sent, self._folder / f"sent-{part}"), send_counts, recv_counts)

    def exchange(self) -> None:
        """Carry out the open exchange; every rank makes the call."""
        communicator, world_size = self._communicator, self._communicator.world_size
        for turn in range(-(-self.num_parts // world_size)):
            # the parts that receive their rows in this turn, one of each rank
            receivers = [turn * world_size + rank for rank in range(world_size)]
            outgoing = [torch.cat([self._block(part, receiver) for part in self._parts]) for receiver in receivers]
            arrived = communicator.all_to_all(outgoing, label="rows of parts")
            receiver = receivers[communicator.rank]
            if receiver >= self.num_parts:
                continue
            counts = self._open[receiver].recv_counts
            # from each rank the rows of its parts, one part after the other
            blocks: dict[int, Tensor] = {}
            for rank, rows in enumerate(arrived):
                senders = range(rank, self.num_parts, world_size)
                blocks |= zip(senders, rows.split([counts[sender] for sender in senders]), strict=True)
            rows = torch.cat([blocks[sender] for sender in range(self.num_parts)])
            path = self._folder / f"answer-{self._answered}-{receiver}"
            self._received[self._answered, receiver] = in_file(rows, path)
        self._answered += 1
        self._open.clear()

    def _block(self, part: int, receiver: int) -> Tensor:
        sent, counts, _ = self._open[part]
        return sent.split(list(counts))[receiver] if receiver < self.num_parts else sent[:0]
