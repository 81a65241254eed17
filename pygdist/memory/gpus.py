"""Memory of GPUs, which several ranks may share, and their driver."""

from __future__ import annotations

import ctypes
import zlib

import torch


def free_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that this process may still take: what is free, and what torch keeps unused."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def number_of(device: torch.device) -> float:
    """Return a number by which ranks tell whether they share a GPU; the same on each of its ranks."""
    return float(zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode()))


def driver_runs() -> bool:
    """Return true if this process has started CUDA's driver: then processes that it forks cannot use GPUs.

    ``torch.cuda.is_initialized`` does not tell: importing PyG without torch_sparse compiles TorchScript, for which
    torch starts the driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_started = 3  # CUDA_ERROR_NOT_INITIALIZED
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_started)
