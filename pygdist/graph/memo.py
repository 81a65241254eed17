"""Results that are kept as long as the inputs they were made of stay the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pygdist.graph.identity import fixable, identity_of

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """A result, the inputs that are kept alive for it, and both as they were when it was made."""

    identity: tuple[object, ...]
    inputs: tuple[object, ...]
    result: T
    versions: tuple[int, ...]


class Memo(Generic[T]):
    """Keeps one result for each slot, and the inputs it was made of.

    A result is valid while its inputs are the same: tensors by :func:`~pygdist.graph.identity.identity_of`, anything
    else, edges too, by ``id``. A result whose tensors were changed in place is not valid either. Inputs are kept alive,
    so that nothing else gets their memory or ``id``. Nothing is kept of a tensor that is not
    :func:`~pygdist.graph.identity.fixable`.

    :meth:`get` suffices for one rank. Ranks that must decide alike agree on :meth:`knows`, then call :meth:`last` or
    :meth:`put`. ``most`` limits the number of results; the oldest slot goes first.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most, self._entries = most, dict[Hashable, _Entry[T]]()

    @property
    def results(self) -> list[T]:
        """All results, oldest slot first."""
        return [entry.result for entry in self._entries.values()]

    def get(self, slot: Hashable, inputs: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the slot's result if it was made of these inputs, else that of ``make``, which replaces it.

        A result that is kept is made outside inference mode and without gradients, so that training can use what an
        evaluation began. Any other is made in the caller's mode.
        """
        if self.knows(slot, inputs):
            return self._entries[slot].result
        if _identity(inputs) is None:
            return make()
        with torch.inference_mode(False), torch.no_grad():
            return self.put(slot, inputs, make())

    def knows(self, slot: Hashable, inputs: tuple[object, ...]) -> bool:
        """Tell if the slot holds a result of these inputs."""
        entry = self._entries.get(slot)
        return entry is not None and entry.identity == _identity(inputs) and entry.versions == _versions(entry.result)

    def last(self, slot: Hashable) -> T | None:
        """Return the slot's result, whatever it was made of; ``None`` if there is none."""
        return self._entries[slot].result if slot in self._entries else None

    def put(self, slot: Hashable, inputs: tuple[object, ...], result: T) -> T:
        """Keep ``result`` in place of the slot's, and return it."""
        if (identity := _identity(inputs)) is not None:
            if slot not in self._entries and len(self._entries) == self._most:
                del self._entries[next(iter(self._entries))]
            held = tuple(one.detach() if _has_memory(one) else one for one in inputs)
            self._entries[slot] = _Entry(identity, held, result, _versions(result))
        return result

    def clear(self, *, but: Collection[Hashable] = ()) -> None:
        """Forget all slots ``but`` these."""
        self._entries = {slot: entry for slot, entry in self._entries.items() if slot in but}


def _versions(result: object) -> tuple[int, ...]:
    tensors = filter(_has_memory, result if isinstance(result, tuple) else (result,))
    return tuple(0 if one.is_inference() else one._version for one in tensors)


def _has_memory(one: object) -> TypeGuard[Tensor]:
    return isinstance(one, Tensor) and not isinstance(one, EdgeIndex)  # which wraps other tensors


def _identity(inputs: tuple[object, ...]) -> tuple[object, ...] | None:
    if any(_has_memory(one) and not fixable(one) for one in inputs):
        return None
    return tuple(identity_of(one) if _has_memory(one) else id(one) for one in inputs)
