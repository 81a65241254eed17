"""DDP for a partitioned graph: its options, buckets that do not change, and the loss scale that makes it exact."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
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


def settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP arrange its buckets of gradients now, before the first step; all ranks make the call.

    DDP arranges them anew after the first step of a process, in the order in which gradients came. Three or more ranks
    add up the gradients of the first step in another order than later ones, and a run that resumes would differ from
    one that went on. Here gradients of zero come first, from the last parameter to the first, and are thrown away.
    """
    parameters = [one for name, one in model.module.named_parameters() if _is_reduced(model, name, one)]
    sparse = any(getattr(one, "sparse", False) for one in model.module.modules() if isinstance(one, _EMBEDDINGS))
    hooked = any(
        one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters
    )  # of the user, who counts
    if model.find_unused_parameters or model.static_graph or sparse or hooked or not parameters:
        return  # arranged otherwise, or never, or in the first step
    gradients = [one.grad for one in parameters]
    model.reducer.prepare_for_backward([])
    with torch.enable_grad():
        for one in reversed(parameters):
            one.backward(torch.zeros_like(one))
    model.reducer._rebuild_buckets()
    for one, gradient in zip(parameters, gradients, strict=True):
        one.grad = gradient


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def _is_reduced(model: DistributedDataParallel, name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and name not in model.parameters_to_ignore
