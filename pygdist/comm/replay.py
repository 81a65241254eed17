"""A rank that stands for several: parts run one after another, and what they ask of each other is answered in passes.

A part that asks for what another one has not computed yet leaves its contribution and stops (:class:`Postponed`). When
all parts have stopped, on all ranks, contributions are exchanged; then each part begins anew and finds what it asked
for, up to the next question. So whatever runs must do the same each time, and with N questions it runs N + 1 times:
time for memory, which holds one part at a time. What was asked and answered lies in files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from pygdist.comm.communicator import Communicator
from pygdist.comm.plan import ExchangePlan
from pygdist.errors import InputError

__all__ = ["PartCommunicator", "Postponed", "run_parts"]


class Postponed(Exception):
    """A part asked for something that other parts have yet to compute."""


def run_parts(
    parts: Sequence[int],
    num_parts: int,
    run: Callable[[PartCommunicator], None],
    communicator: Communicator,
    folder: Path,
) -> int:
    """Run each part of this rank until all are done; every rank makes the call.

    Args:
        parts: This rank's: ``rank, rank + world_size, ...`` below ``num_parts``.
        num_parts: Of all ranks.
        run: Runs the part that ``communicator.rank`` names, without gradients, and lets :class:`Postponed` through. It
            does the same in each pass; in the last one it comes to its end.
        communicator: The ranks.
        folder: An empty folder, for what is asked and answered.

    Returns:
        The number of passes.
    """
    answers = _Answers(parts, num_parts, communicator, folder)
    passes = 0
    while True:
        passes += 1
        asking = 0
        for part in parts:
            try:
                run(PartCommunicator(part, answers))
            except Postponed:
                asking += 1
        in_all = int(communicator.gather([float(asking)]).sum())
        if not in_all:
            return passes
        if in_all != num_parts:  # on all ranks: who goes on alone would wait for ever
            raise RuntimeError(f"{in_all} of {num_parts} parts ask for something, not all")
        answers.exchange()


class PartCommunicator(Communicator):
    """What a backend needs of the other parts; its rank is the part, and there are as many ranks as parts.

    Args:
        part: Which part it speaks for.
        answers: What is known already.
    """

    def __init__(self, part: int, answers: _Answers) -> None:
        super().__init__()
        self.rank, self.world_size = part, answers.num_parts
        self._answers, self._asked = answers, 0

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
        # the question carries the reason, or parts that stop first would not know it
        told = [] if error is None else list(error.encode())
        longest = int(self.gather([float(len(told))]).max())
        if longest:
            reasons = self.gather([float(byte) for byte in told] + [0.0] * (longest - len(told)))
            first = next(row for row in reasons if row.any())
            raise InputError(bytes(int(byte) for byte in first if byte).decode())

    @override
    def swap(self, outgoing: Sequence[Tensor], *, label: str) -> list[Tensor]:
        raise InputError(f"{label}: parts that run one after another exchange rows and sums, no plans")

    def _from_all(self, row: Tensor) -> Tensor:
        """A row of every part, this one's included."""
        peers = [int(peer != self.rank) for peer in range(self.world_size)]
        others = self._ask(row.expand(self.world_size - 1, *row.shape[1:]), peers, peers).to(row.device)
        return torch.cat([others[: self.rank], row, others[self.rank :]])

    def _ask(self, sent: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        number, self._asked = self._asked, self._asked + 1
        found = self._answers.find(number, self.rank)
        if found is None:
            self._answers.leave(self.rank, sent, send_counts, recv_counts)
            raise Postponed
        return found


@dataclass(frozen=True)
class _Question:
    """What a part left: its rows, grouped by receiver, and how many it wants of each."""

    sent: Tensor
    send_counts: Sequence[int]
    recv_counts: Sequence[int]


class _Answers:
    """What this rank's parts asked, and got."""

    def __init__(self, parts: Sequence[int], num_parts: int, communicator: Communicator, folder: Path) -> None:
        self.num_parts = num_parts
        self._parts, self._communicator, self._folder = list(parts), communicator, folder
        self._answered = 0
        self._open: dict[int, _Question] = {}
        self._found: dict[tuple[int, int], Tensor] = {}

    def find(self, number: int, part: int) -> Tensor | None:
        return self._found[number, part] if number < self._answered else None

    def leave(self, part: int, sent: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        self._open[part] = _Question(self._in_file(f"sent-{part}", sent), send_counts, recv_counts)

    def exchange(self) -> None:
        """Answer what is open; every rank makes the call."""
        communicator, world_size = self._communicator, self._communicator.world_size
        for turn in range(-(-self.num_parts // world_size)):
            # the parts that get their rows in this turn, one of each rank
            receivers = [turn * world_size + rank for rank in range(world_size)]
            outgoing = [torch.cat([self._block(part, receiver) for part in self._parts]) for receiver in receivers]
            arrived = communicator.swap(outgoing, label="rows of parts")
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
            self._found[self._answered, receiver] = self._in_file(f"answer-{self._answered}-{receiver}", rows)
        self._answered += 1
        self._open.clear()

    def _block(self, part: int, receiver: int) -> Tensor:
        question = self._open[part]
        if receiver >= self.num_parts:
            return question.sent[:0]
        first = sum(question.send_counts[:receiver])
        return question.sent[first : first + question.send_counts[receiver]]

    def _in_file(self, name: str, rows: Tensor) -> Tensor:
        """The same rows, of which what nobody looks at needs no memory."""
        rows = rows.cpu().contiguous()
        if rows.numel() == 0:
            return rows
        path = self._folder / name
        path.unlink(missing_ok=True)  # another pass may still look at what was there
        kept = torch.from_file(str(path), shared=True, size=rows.numel(), dtype=rows.dtype).view(rows.shape)
        return kept.copy_(rows)
