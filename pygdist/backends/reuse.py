"""The first hop over fixed rows: its result is kept, and with it the exchange that fetched its halo rows.

Full-graph training aggregates the same features in every epoch. Rows that need no gradient, in the same memory and at
the same version as in the forward pass before, have the same neighbours' sum, so it is not computed again. Rows that
turn out to change (dropout or augmentation on the input) are noticed at the second pass, and let go of.

Every rank decides alike, as the hops exchange rows: what is asked here is true on all ranks or on none, and whether a
result fits the limit is agreed on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import Backend
from pygdist.backends.layers import layer_name
from pygdist.nn.normalization import version_of

__all__ = ["FirstHop"]

_MOST_HOPS = 32  # of one layer in one forward pass; a layer called from outside the model has no passes to tell apart


@dataclass(frozen=True)
class _Kept:
    """A result, and what it was made of; the inputs are kept too, so that their addresses stay theirs."""

    inputs: tuple[Any, ...]
    identity: tuple[object, ...]
    result: Tensor
    version: int

    @property
    def whole(self) -> bool:
        """Whether nobody has written into the result since."""
        return version_of(self.result) == self.version


@dataclass(frozen=True)
class _Changing:
    """Rows that were others the time before; ``latest`` are kept if they come again."""

    latest: weakref.ref[Tensor]
    identity: tuple[object, ...]


class FirstHop:
    """Keeps the results of hops over fixed rows, on one rank.

    Args:
        backend: Its ``savings`` tell whether to, and how much.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._states: weakref.WeakKeyDictionary[MessagePassing, dict[tuple[int, bool], _Kept | _Changing]]
        self._states = weakref.WeakKeyDictionary()
        self._hops: weakref.WeakKeyDictionary[MessagePassing, int] = weakref.WeakKeyDictionary()
        self._limit: int | None = None

    @property
    def kept_bytes(self) -> int:
        """Memory of the results that are kept."""
        states = [state for known in self._states.values() for state in known.values()]
        return sum(state.result.nbytes for state in states if isinstance(state, _Kept))

    def begin_forward(self) -> None:
        """Called before each forward pass of the model: hops are told apart by their order in it."""
        self._hops.clear()

    def forget(self) -> None:
        """Let go of everything; called when the backend gets another graph."""
        self._states.clear()
        self._hops.clear()
        self._limit = None

    def expects(self, layer: MessagePassing, x: Tensor) -> bool:
        """Whether the next hop of ``layer``, given ``x``, is expected to be over fixed rows."""
        if not self._backend.savings.first_hop or not _fixable(x):
            return False
        known = self._states.get(layer, {})
        if not torch.is_grad_enabled():  # most rows need no gradient here: only what training has kept is fixed
            return any(isinstance(state, _Kept) and _same_rows(state, x) for state in known.values())
        key = self._key(layer)
        state = known.get(key)
        if isinstance(state, _Kept) and not _same_rows(state, x):
            known[key] = _Changing(weakref.ref(x), _identity(x))
        return state is None or (isinstance(state, _Kept) and _same_rows(state, x))

    def run(
        self, layer: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any], hop: Callable[[], Tensor]
    ) -> Tensor:
        """The result of a hop that is one sparse product, kept or computed by ``hop``."""
        x: Tensor = _source(kwargs)
        weight: Tensor | None = kwargs.get("edge_weight")
        key = self._key(layer)
        self._hops[layer] = key[0] + 1
        if not self._backend.savings.first_hop or not _fixable(x) or not _fixable(weight) or key[0] >= _MOST_HOPS:
            return hop()
        inputs = (x, weight, edge_index)
        identity = (*_identity(x), *_identity(weight), id(edge_index))
        known = self._states.setdefault(layer, {})
        for state in known.values():
            if isinstance(state, _Kept) and state.identity == identity and state.whole:
                # in inference mode a write would go unnoticed
                return state.result.clone() if torch.is_inference_mode_enabled() else state.result
        before = known.get(key)
        again = isinstance(before, _Changing) and before.latest() is x and before.identity == identity
        if not again and (before is not None or not torch.is_grad_enabled()):
            known[key] = _Changing(weakref.ref(x), identity)
            return hop()
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):  # training uses what evaluation may begin
            result = hop()
        if self._fits(layer, result):
            known[key] = _Kept(inputs, identity, result, version_of(result))
        else:
            known[key] = _Changing(weakref.ref(x), ())
        return result.clone() if torch.is_inference_mode_enabled() else result

    def _key(self, layer: MessagePassing) -> tuple[int, bool]:
        return self._hops.get(layer, 0), layer.training

    def _fits(self, layer: MessagePassing, result: Tensor) -> bool:
        if self._limit is None:
            self._limit = self._backend.first_hop_bytes(result.device)
        total = self.kept_bytes + result.nbytes
        fits = self._backend.max_over_ranks(int(total > self._limit)) == 0
        if not fits:
            warnings.warn(
                f"the first hop of {layer_name(layer)} is computed in every epoch: keeping its result would bring what "
                f"is kept to {total / 2**20:.0f} MiB on this rank or more on another, beyond the limit of "
                f"{self._limit / 2**20:.0f} MiB; raise savings.first_hop_mib",
                stacklevel=2,
            )
        return fits


def _source(kwargs: dict[str, Any]) -> Any:
    """The source rows of a hop that is one sparse product."""
    x = kwargs.get("x")
    return x[0] if isinstance(x, (tuple, list)) else x


def _fixable(value: Tensor | None) -> bool:
    return value is None or not (value.requires_grad or value.is_inference())


def _identity(value: Tensor | None) -> tuple[object, ...]:
    """What two tensors share that are the same numbers in the same memory."""
    if value is None:
        return (None,)
    storage = value.untyped_storage()._cdata
    return storage, value.storage_offset(), value.shape, value.stride(), value.dtype, version_of(value)


def _same_rows(state: _Kept, x: Tensor) -> bool:
    identity = _identity(x)
    return state.identity[: len(identity)] == identity
