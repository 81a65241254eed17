"""Tells if features and edge values of a part are still those that were loaded: other parts hold copies of them."""

from __future__ import annotations

import torch
from torch import Tensor

from pygdist.graph.check import EDGE_FIELDS
from pygdist.graph.identity import identity_of, version_of
from pygdist.graph.shard import Shard


class LoadedFields:
    """The features and edge values of a part that are as they were loaded.

    A change of a part's own rows or edge values does not reach their copies in other parts.

    Args:
        shard: The part. Writes that torch does not count, such as ``x.data.mul_()``, are noticed only from now on.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard, self._identities, self._held = shard, dict[str, tuple[object, ...]](), list[Tensor]()
        for name in ("x", *EDGE_FIELDS):
            value: Tensor | None = getattr(shard, name)
            if value is not None and is_loaded(shard, name):
                self._identities[name] = self._identity(name, value)
                self._held.append(value.detach())  # nothing else may get its memory

    def has(self, name: str, value: Tensor) -> bool:
        """Tell if ``value`` is the field ``name``, and as it was loaded."""
        return name in self._identities and self._identities[name] == self._identity(name, value)

    def _identity(self, name: str, value: Tensor) -> tuple[object, ...]:
        # a model gets the rows around the part too, and may change them in place
        return *identity_of(value), version_of(getattr(self._shard.surroundings, name))


def is_loaded(shard: Shard, name: str) -> bool:
    """Tell if a field of a part is still that of its surroundings, and not changed in place as far as torch counts.

    A copy is as good: it is compared by values. A field without values cannot have changed.
    """
    mine, around = getattr(shard, name), getattr(shard.surroundings, name, None)
    if mine is None or around is None:
        return False
    if (mine.dtype, mine.device, mine.shape[1:]) != (around.dtype, around.device, around.shape[1:]):
        return False
    if not mine.numel():
        return True
    if (mine.data_ptr(), mine.stride()) == (around.data_ptr(), around.stride()):
        return version_of(mine) == 0
    return torch.equal(mine, around[: len(mine)])
