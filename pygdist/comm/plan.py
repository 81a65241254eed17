"""The plan of an exchange: the rows that this rank sends to, and receives from, each other rank in one hop.

A plan is made once, when the graph is partitioned, and used in every hop of every epoch. Sender and receiver know the
order of rows, so no index is ever sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Rows that this rank sends to, and receives from, every other rank in one hop.

    Args:
        send_index: Local ids of the owned rows to send, grouped by receiving rank, ``(num_sent,)`` int64.
        send_counts: Rows sent to each rank; 0 to this rank itself.
        recv_counts: Rows received from each rank; 0 from this rank itself. Received rows are laid out in rank order.

    Raises:
        ValueError: If the three arguments do not fit each other.
    """

    send_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.send_counts) != len(self.recv_counts):
            raise ValueError(
                f"send_counts names {len(self.send_counts)} ranks and recv_counts {len(self.recv_counts)}: "
                "both need one entry for each rank"
            )
        if sum(self.send_counts) != self.send_index.numel():
            raise ValueError(
                f"send_counts sum to {sum(self.send_counts)}, send_index has {self.send_index.numel()} rows: "
                "both must be the number of rows sent"
            )

    @property
    def num_sent(self) -> int:
        """Number of rows that leave this rank in one hop; a row that goes to two ranks counts twice."""
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        """Number of halo rows that arrive at this rank in one hop."""
        return sum(self.recv_counts)

    def send_index_of(self, peer: int) -> Tensor:
        """Return the local ids of the rows sent to ``peer``; no row appears twice."""
        start = sum(self.send_counts[:peer])
        return self.send_index[start : start + self.send_counts[peer]]

    def chosen(self, sent: Tensor, received: Tensor) -> ExchangePlan:
        """Return a plan for some of the rows.

        Args:
            sent: True for each row of ``send_index`` that is sent; bool.
            received: True for each received row of this plan that arrives; bool. Sender and receiver must choose the
                same rows.
        """
        send_counts, recv_counts = (
            tuple(int(mask.sum()) for mask in chosen.split(list(counts)))
            for chosen, counts in ((sent, self.send_counts), (received, self.recv_counts))
        )
        return ExchangePlan(send_index=self.send_index[sent], send_counts=send_counts, recv_counts=recv_counts)

    def to(self, device: torch.device | str) -> ExchangePlan:
        """Return the same plan with its index on ``device``."""
        return replace(self, send_index=self.send_index.to(device))
