"""The memory that slices and the edges of all ranks may take on a device, and the overflow for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pygdist.comm import Communicator
from pygdist.errors import InputError
from pygdist.graph import Shard
from pygdist.memory.gpus import free_bytes, number_of
from pygdist.memory.overflow import Overflow, writable

_GIB = 2**30
_NO_SHAPE = nn.UninitializedParameter
_INDEX_COPIES = 5  # of each edge: source and weight, forward and backward, and the place of the weight
_SLICE_COPIES = 4  # of slices: forward and backward, what is read and what is summed


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model by which the memory of its slices is estimated.

    Attributes:
        widest: Columns of its widest rows, as far as its parameters tell.
        heads: Weights that attention holds for each edge at most.
    """

    widest: int = 0
    heads: int = 1

    @classmethod
    def of(cls, model: nn.Module) -> ModelSizes:
        """Read the sizes off a model's parameters and layers."""
        modules = [one for one in model.modules() if not isinstance(one, nn.Embedding)]  # its rows are looked up
        matrices = [p for one in modules for p in one.parameters(recurse=False) if not isinstance(p, _NO_SHAPE)]
        widths = [size for one in matrices if one.dim() > 1 for size in one.shape[-2:]]
        with_heads = ((one, getattr(one, "heads", None)) for one in modules)
        heads = [heads * _copies_of_weights(one) for one, heads in with_heads if isinstance(heads, int)]
        return cls(max(widths, default=0), max(heads, default=1))


def _copies_of_weights(layer: nn.Module) -> int:
    """With dropout, attention holds weights before and after it, and the mask."""
    dropout = getattr(layer, "dropout", 0.0)
    return 3 if isinstance(dropout, float) and dropout > 0 else 1


def overflow_of(
    shard: Shard, communicator: Communicator, sizes: ModelSizes, *, memory_gib: float | None, device: str | None
) -> Overflow | None:
    """Return the overflow for edges and slices that do not fit on the device; ``None`` on all ranks if all fit.

    Args:
        shard: The rank's shard.
        communicator: The ranks; each makes this call.
        sizes: The model's.
        memory_gib: Limit of the memory in GiB. By default there is none on the host; on a GPU it is half of the free
            memory, shared by the ranks on that GPU.
        device: Device of the hops, as the user named it; the shard's by default.
    """
    here = shard.n_id.device
    on = device_of(device, here, communicator.local_rank)
    if on.type == "cpu" and here.type != "cpu":
        raise InputError(f"device={device}: hops of a model on {here.type} run there; leave device out")
    folder = writable(shard.folder) if on.type == "cpu" else None
    if memory_gib is not None:
        return Overflow(on, int(memory_gib * _GIB), folder)
    if on.type != "cuda":
        return None
    free = free_bytes(on) / 2
    width = -(-max(shard.x.size(-1), sizes.widest) // communicator.world_size)
    needed = (_INDEX_COPIES + sizes.heads - 1) * 4 * shard.num_edges
    needed += _SLICE_COPIES * shard.num_nodes * width * shard.value_bytes
    ranks = communicator.gather([free, float(needed), number_of(on)])
    budgets = ranks[:, 0] / (ranks[:, 2:] == ranks[:, 2]).sum(dim=1)
    short = on != here or bool((ranks[:, 1] > budgets).any())
    return Overflow(on, int(budgets.min()), folder) if short else None


def device_of(name: str | None, here: torch.device, local_rank: int) -> torch.device:
    """Return the device called ``name``, with its number; ``here`` by default.

    If the model is on the host and there are several GPUs, a rank takes that of its local rank.
    """
    try:
        device = here if name is None else torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {name!r}, expected the name of a device of torch, such as 'cuda'") from error
    if device.type != "cuda" or ":" in str(device):
        return device
    return here if here.type == "cuda" else torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
