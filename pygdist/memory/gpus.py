"""Memory of GPUs, which several ranks may share."""

from __future__ import annotations

import zlib

import torch


def free_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that this process may still take: what is free, and what torch keeps unused."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def number_of(device: torch.device) -> float:
    """Return a number by which ranks tell whether they share a GPU; the same on each of its ranks."""
    return float(zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode()))
