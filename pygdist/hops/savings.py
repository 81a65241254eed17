"""Shortcuts of a distributed model: switches, and the memory that each may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch

from pygdist.errors import InputError
from pygdist.memory.gpus import free_bytes

_MIB = 2**20
_BLOCK_BYTES = 256 * _MIB  # a small block stays in the cache and is faster; very many blocks are slower


@dataclass(frozen=True, kw_only=True)
class Savings:
    """Shortcuts to take. All are on by default; none changes a result of an exact backend.

    Attributes:
        first_hop: Keep the result of a ``propagate`` over fixed rows (the graph's own features) and use it again. Its
            halo rows are then fetched only once. No effect with ``no_input_gradient=False``.
        first_hop_mib: Memory of one rank for these results, in MiB. ``None``: a quarter of the memory free at the first
            result, divided by the ranks that share it. A result that does not fit is computed in every pass.
        cheaper_side: Aggregate on the narrower side of a layer's weight: :math:`(A X) W = A (X W)`.
        no_input_gradient: Compute no gradient for rows that need none.
        fused_attention: Run GAT, GATv2 and Transformer layers by pygdist's attention kernels. These kernels have no
            second derivatives.
        block_mib: Memory that the messages of one ``propagate`` may take, in MiB, if the layer's own ``message`` runs.
            Larger hops run in blocks of destinations, which are computed again in the backward pass. ``None``: the
            smaller of 256 MiB and a quarter of the free memory divided by the ranks that share it. 0: no blocks.

    Raises:
        InputError: If a limit is negative or not finite.
    """

    first_hop: bool = True
    first_hop_mib: float | None = None
    cheaper_side: bool = True
    no_input_gradient: bool = True
    fused_attention: bool = True
    block_mib: float | None = None

    def __post_init__(self) -> None:
        for name in ("first_hop_mib", "block_mib"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < math.inf:
                raise InputError(f"savings.{name} is {limit}, expected a finite number of MiB, 0 or more")
        if self.first_hop_mib is not None and not self.first_hop:
            raise InputError(
                f"savings.first_hop_mib={self.first_hop_mib} has no effect with first_hop=false; leave it out"
            )

    def first_hop_bytes(self, device: torch.device, ranks: int) -> int:
        """Return the bytes of kept results that each rank may hold on ``device``, which ``ranks`` ranks share."""
        return _limit(self.first_hop_mib, device, ranks)

    def block_bytes(self, device: torch.device, ranks: int) -> int | None:
        """Return the bytes that the messages of one hop may take on ``device``; ``None`` for no limit."""
        if self.block_mib == 0:
            return None
        limit = _limit(self.block_mib, device, ranks)
        return limit if self.block_mib is not None else min(limit, _BLOCK_BYTES)


def _limit(mib: float | None, device: torch.device, ranks: int) -> int:
    if mib is not None:
        return int(mib * _MIB)
    if device.type == "cuda":
        return free_bytes(device) // 4 // ranks
    return int(psutil.virtual_memory().available) // 4 // ranks
