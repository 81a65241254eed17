"""Which rows travel where in one hop: the static description that an exchange executes.

A plan is made once, when the graph is partitioned, and used in every hop of every epoch. Both sides agree on the
order of rows, so no index is ever sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ExchangePlan"]


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Rows that this rank sends to, and receives from, every other rank in one hop.

    Args:
        send_index: Local ids of the owned rows to send, grouped by receiving rank, ``(num_sent,)`` int64.
        send_counts: Rows sent to each rank; the own entry is 0.
        recv_counts: Rows received from each rank; the own entry is 0. Received rows are laid out in rank order.
    """

    send_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.send_counts) != len(self.recv_counts):
            raise ValueError(
                f"send_counts names {len(self.send_counts)} ranks and recv_counts {len(self.recv_counts)}; "
                "both need one entry per rank"
            )
        if sum(self.send_counts) != self.send_index.numel():
            raise ValueError(f"send_counts sum to {sum(self.send_counts)}, send_index has {self.send_index.numel()}")

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank in one hop."""
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        """Halo rows that arrive at this rank in one hop."""
        return sum(self.recv_counts)

    def send_index_of(self, peer: int) -> Tensor:
        """The local rows sent to ``peer``; no row appears twice."""
        start = sum(self.send_counts[:peer])
        return self.send_index[start : start + self.send_counts[peer]]

    def to(self, device: torch.device | str) -> ExchangePlan:
        """The same plan with its index on ``device``."""
        return ExchangePlan(
            send_index=self.send_index.to(device), send_counts=self.send_counts, recv_counts=self.recv_counts
        )
