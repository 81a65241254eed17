"""Memory for rows that travel, used again in every exchange instead of asked for anew."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Buffers"]


class Buffers:
    """Memory by what it is for, as much as the largest exchange needs.

    Exchanges that are under way at once must each ask for another use, as the next to ask for the same has the same.
    Who hands one on, to be kept beyond the exchange, must copy it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def get(self, use: str, num_rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for ``num_rows`` rows as wide as those of ``like``; what is in it is left from the last time.

        Args:
            use: Two tensors of different use are never the same memory.
            num_rows: How many.
            like: Tells width, device and, unless given, dtype.
            dtype: Of the values.
        """
        dtype = dtype or like.dtype
        shape = (num_rows, *like.shape[1:])
        num_values = math.prod(shape)
        key = (use, dtype, like.device)
        known = self._kept.get(key)
        if known is None or known.numel() < num_values:
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                known = self._kept[key] = torch.empty(num_values, dtype=dtype, device=like.device)
        return known[:num_values].view(shape)

    @property
    def tensors(self) -> list[Tensor]:
        """All memory that is held."""
        return list(self._kept.values())

    @property
    def nbytes(self) -> int:
        """Memory that is held."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()
