"""DDP for a partitioned graph: its options, buckets that do not change, and the loss scale that makes it exact."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pygdist.comm.communicator import Communicator
from pygdist.comm.meter import TrafficMeter

# torch renamed the option
_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"

#: Size of DDP's buckets, in MiB, by which gradients of one dtype are in one bucket.
ONE_BUCKET_MB = 1 << 30

_ONE_BUCKET, _MOST_SENT = 1 << 20, 1 << 23  # bytes of gradients, and that a rank sends of them
#: Buffers are equal on all ranks (norms take global statistics), so broadcasting them would only cost time.
DDP_OPTIONS: dict[str, Any] = {_SYNC_BUFFERS: False}


def ddp_loss_scale(num_labelled: float, world_size: int) -> float:
    """Return the factor for each rank's summed loss with which DDP's mean gradient is the mean loss's gradient.

    ``num_labelled`` is the number of labelled training nodes of the whole graph.
    """
    return world_size / num_labelled


def sum_in_one_round(model: DistributedDataParallel, communicator: Communicator) -> bool:
    """Let all ranks send their gradients to all others at once, if gradients are small. Every rank makes the call.

    gloo sums in a ring, of :math:`2 (N - 1)` rounds for N ranks. In each round, messages wait in the links' queues
    behind the large messages of exchanges under way. Here all ranks add up gradients in rank order.

    Each rank waits for the sum within the backward pass, so the sum must be the last exchange of this pass on every
    rank: all gradients must be in one bucket, and no layer, such as a norm, may make an exchange in its backward pass
    after the last gradient is known.

    Args:
        model: The model.
        communicator: The ranks; the sums get a process group of their own.

    Returns:
        False if DDP keeps its own sum.
    """
    parameters = [one for name, one in model.module.named_parameters() if _is_reduced(model, name, one)]
    num_bytes = sum(one.numel() * one.itemsize for one in parameters)
    fits: bool = (
        num_bytes <= min(_ONE_BUCKET, model.bucket_bytes_cap)
        and num_bytes * (communicator.world_size - 1) <= _MOST_SENT
    )
    fits = fits and len({one.dtype for one in parameters}) == 1
    if fits:
        apart = communicator.apart()
        apart.meter = TrafficMeter()  # DDP's sums are counted nowhere else
        # torch inspects annotations and rejects strings, hence the lambda
        model.register_comm_hook(apart, lambda ranks, bucket: _mean(ranks, bucket.buffer()))
    return fits


def sum_behind_exchanges(model: DistributedDataParallel, communicator: Communicator) -> None:
    """Let DDP sum gradients in the process group of exchanges. Every rank makes the call.

    Sums and exchanges in two groups of nccl on one GPU may wait for each other for ever. In one group they run in the
    order of their calls, which must be equal on all ranks. With one bucket (:data:`ONE_BUCKET_MB`) the order is equal:
    the sum begins when the last gradient is known, after the exchanges of the backward pass that lead to gradients.

    Args:
        model: The model.
        communicator: The ranks.
    """
    # torch inspects annotations and rejects strings, hence the lambda
    model.register_comm_hook(communicator.group, lambda group, bucket: allreduce_hook(group, bucket))


def _mean(communicator: Communicator, mine: Tensor) -> torch.futures.Future[Tensor]:
    arrived = [torch.empty_like(mine) for _ in range(communicator.world_size)]
    communicator.send_and_receive([mine] * communicator.world_size, arrived, "gradients")
    arrived[communicator.rank] = mine
    total = arrived[0].clone()
    for one in arrived[1:]:
        total += one
    mean: torch.futures.Future[Tensor] = torch.futures.Future()
    mean.set_result(total / communicator.world_size)
    return mean


def settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP arrange its buckets of gradients now, before the first step. Every rank makes the call.

    DDP rearranges its buckets after the first step of a process, in the order in which gradients arrived. So three or
    more ranks add up the gradients of the first step in another order than later gradients, and a resumed run differs
    from an uninterrupted one. This function first gives DDP gradients of zero, from the last parameter to the
    first, and discards them; no parameter changes.
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
