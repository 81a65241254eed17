"""Rows that are fetched together, and their positions among this rank's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pygdist.comm import ExchangePlan, message_rows


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Rows that are fetched together, and their positions among this rank's rows.

    Attributes:
        plan: The rows that this rank sends to, and receives from, each other rank.
        position: Position of each arriving row among the rows of this rank; ``(h,)`` int64.
    """

    plan: ExchangePlan
    position: Tensor

    @classmethod
    def nothing(cls, device: torch.device) -> Arrival:
        """An arrival of no rows."""
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return cls(plan=ExchangePlan(send_index=none, send_counts=(), recv_counts=()), position=none)

    def to(self, device: torch.device) -> Arrival:
        """Copy to ``device``."""
        return Arrival(plan=self.plan.to(device), position=self.position.to(device))

    def piece(self, first: int, rows: int) -> Arrival:
        """Cut out, for each pair of ranks, at most ``rows`` rows from number ``first`` on."""
        plan = self.plan
        send, arrive = (
            tuple(min(max(count - first, 0), rows) for count in counts)
            for counts in (plan.send_counts, plan.recv_counts)
        )
        peers = range(len(send))
        index = [plan.send_index_of(peer)[first : first + rows] for peer in peers]
        position = [self.positions_of(peer)[first : first + rows] for peer in peers]
        cut = ExchangePlan(send_index=torch.cat(index), send_counts=send, recv_counts=arrive)
        return Arrival(plan=cut, position=torch.cat(position))

    def positions_of(self, peer: int, part: int = 0, parts: int = 1) -> Tensor:
        """Places of the rows that ``peer`` sends, or of those in message ``part`` of ``parts``."""
        start, count = sum(self.plan.recv_counts[:peer]), self.plan.recv_counts[peer]
        return self.position[start : start + count][message_rows(count, part, parts)]
