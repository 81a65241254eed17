"""Gradients averaged by DDP: the options that a graph in parts needs, and the loss scale that makes its mean true."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["DDP_OPTIONS", "ddp_loss_scale"]

# torch renamed the option
_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"

#: Buffers are equal on all ranks (norms take global statistics), so broadcasting them would only cost time.
DDP_OPTIONS: dict[str, Any] = {_SYNC_BUFFERS: False}


def ddp_loss_scale(num_labelled: int, world_size: int) -> float:
    """Factor on a rank's summed loss that makes DDP's mean of gradients over ranks that of the mean over nodes.

    Args:
        num_labelled: Labelled training nodes of the whole graph.
        world_size: Number of ranks, by which DDP divides.
    """
    return world_size / num_labelled
