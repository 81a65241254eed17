"""Before an epoch, ranks compare what they train: the same parameters, with the same values."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pygdist.comm import Communicator
from pygdist.comm.alike import rank_apart
from pygdist.errors import InputError

_CAUSES = (
    "a callback, hook or scheduler has changed them on some ranks alone, as random masks of ModelPruning do, or a "
    "learning rate that follows a number which each rank logs for itself; let it decide alike on all ranks "
    "(sync_dist=True, one seed)"
)


def trained(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients DDP averages if it wraps the module now."""
    return {
        name: one
        for name, one in model.module.named_parameters()
        if one.requires_grad and name not in model.parameters_to_ignore
    }


def values_of(model: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters that are equal on all ranks; pruned ones with zeros, as their masks may differ."""
    masks, values = dict(model.module.named_buffers()), list[Tensor]()
    for name, one in model.module.named_parameters():
        if name not in model.parameters_to_ignore:
            mask = masks.get(f"{name.removesuffix('_orig')}_mask") if name.endswith("_orig") else None
            values.append(one.detach() if mask is None else one.detach() * mask)
    return values


def compare_trained(now: Mapping[str, nn.Parameter], averaged: set[int], communicator: Communicator) -> bool:
    """Tell if any rank trains other parameters than are ``averaged``, given by ids. Every rank makes the call.

    Raises:
        InputError: On all ranks, if ranks train different parameters.
    """
    has_changed = set(map(id, now.values())) != averaged
    names = zlib.crc32("\n".join(now).encode())
    changed, trains = communicator.gather([float(has_changed), float(names)]).unbind(1)
    others = (trains != trains[0]).nonzero().flatten().tolist()
    if others:
        raise InputError(
            f"rank {others[0]} trains other parameters than rank 0; freeze and unfreeze the same layers on all ranks, "
            "before the same epoch"
        )
    return bool(changed.any())


def compare_values(parameters: Iterable[Tensor], communicator: Communicator, num_epochs: int, steps: int) -> None:
    """Compare the parameters with those of rank 0, after some epochs. Every rank makes the call.

    Raises:
        InputError: On all ranks, if they differ by more than the rounding of so many ``steps``.
    """
    if (rank := rank_apart(parameters, communicator, steps)) is not None:
        raise InputError(
            f"the parameters of rank {rank} differ from those of rank 0 after {num_epochs} epoch"
            f"{'s' * (num_epochs > 1)}: {_CAUSES}"
        )
