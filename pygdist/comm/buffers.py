"""Memory for rows that travel, which all exchanges use again instead of allocating new memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Buffers:
    """One buffer for each use, as large as the largest exchange needs.

    Exchanges under way at once must name different uses: two calls of :meth:`get` with the same use, dtype and device
    return the same memory. To keep rows beyond the exchange, copy them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def get(self, use: str, num_rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return contiguous memory for ``num_rows`` rows as wide as those of ``like``, with arbitrary values.

        ``like`` also gives the device and, by default, the dtype.
        """
        dtype = dtype or like.dtype
        shape = (num_rows, *like.shape[1:])
        num_values = math.prod(shape)
        key = (use, dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < num_values:
            with torch.inference_mode(False):  # training uses what evaluation may have asked for first
                buffer = self._buffers[key] = torch.empty(num_values, dtype=dtype, device=like.device)
        return buffer[:num_values].view(shape)

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return list(self._buffers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clear(self) -> None:
        """Release all buffers."""
        self._buffers.clear()
