"""The backend as hops see it."""

from __future__ import annotations

from typing import Protocol

import torch

from pygdist.graph import Shard
from pygdist.hops.savings import Savings
from pygdist.nn.norms import Ranks


class Host(Ranks, Protocol):
    """Needs of hops that :class:`~pygdist.backends.Backend` meets."""

    savings: Savings

    @property
    def shard(self) -> Shard:
        """The rank's shard."""

    @property
    def fuses_attention(self) -> bool:
        """True if kernels may stand for the hops of attention layers."""

    @property
    def aggregates_first(self) -> bool:
        """True if layers that may aggregate before or after their weight do so before, whatever it costs."""

    @property
    def drops_alike(self) -> bool:
        """True if all ranks drop the same attention weights where nothing but a sum reads them."""

    def first_hop_bytes(self, device: torch.device) -> int:
        """Bytes that this rank may keep of hops over fixed rows."""

    def block_bytes(self, device: torch.device) -> int | None:
        """Bytes that the messages of one hop may take; ``None`` for no limit."""
