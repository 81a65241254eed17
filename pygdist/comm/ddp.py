"""DDP for a partitioned graph: its options, and the loss scale with which its mean of gradients is exact."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

# torch renamed the option
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"

#: Buffers are equal on all ranks (norms take global statistics), so broadcasting them would only cost time.
DDP_OPTIONS: dict[str, Any] = {_SYNC_BUFFERS: False}


def ddp_loss_scale(num_labelled: float, world_size: int) -> float:
    """Return the factor for each rank's summed loss: DDP's mean of gradients is then that of the mean loss over nodes.

    ``num_labelled`` counts the labelled training nodes of the whole graph.
    """
    return world_size / num_labelled
