"""The first hop over fixed rows: its result is kept, and with it the exchange that fetched its halo rows.

Full-graph training aggregates the same features in every epoch. Rows that need no gradient, in the same memory and at
the same version as in the forward pass before, have the same neighbours' sum, so it is not computed again. Rows that
turn out to change (dropout or augmentation on the input) are noticed at the second pass, and let go of.

Every rank decides alike, as the hops exchange rows. Each sees for itself whether its rows and weights are those of the
pass before, except for edges of one relation, and where a rank has at most one row or edge
(:func:`~pygdist.graph.identity.blind_to`). Whether a result fits the limit is agreed on.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pygdist.backends.base import Backend
from pygdist.graph import Adjacency
from pygdist.graph.identity import blind_to, fixable, identity_of, version_of
from pygdist.hops.layer import hooked, layer_name
from pygdist.nn.relations import of_relation

__all__ = ["FirstHop"]


_Inputs: TypeAlias = tuple[Tensor | None, ...]
"""Rows, weights, the edges' own, and the edges."""


@dataclass(frozen=True)
class _Kept:
    """A result, and what it was made of; the memory of the inputs is kept too, so that addresses stay theirs."""

    inputs: tuple[Any, ...]
    identity: tuple[object, ...]
    result: Tensor
    version: int

    def is_of(self, inputs: _Inputs, identity: tuple[object, ...]) -> bool:
        """Whether it is the result of these inputs, and nobody has written into it since."""
        return self.identity == identity and version_of(self.result) == self.version


@dataclass(frozen=True)
class _Changing:
    """Rows that were others the time before; ``latest`` are kept if they come again, unless that is ``too_large``."""

    latest: tuple[weakref.ref[Tensor] | None, ...]
    identity: tuple[object, ...]
    too_large: bool = False

    def came_again(self, inputs: _Inputs, identity: tuple[object, ...]) -> bool:
        """Whether these are the same objects; others may have got the memory of those before, on some ranks."""
        same = [None if one is None else one() for one in self.latest]
        return self.identity == identity and all(one is other for one, other in zip(same, inputs, strict=True))

    def is_of(self, inputs: _Inputs, identity: tuple[object, ...]) -> bool:
        """Whether the result of these inputs was found not to fit."""
        return self.too_large and self.came_again(inputs, identity)


class FirstHop:
    """Keeps the results of hops over fixed rows, on one rank.

    Args:
        backend: Its ``savings`` tell whether to, and how much.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.stands_for = 1.0  # each row of a hop stands for so many
        self.rehearsed = False  # a model is tried on few rows
        self._states: weakref.WeakKeyDictionary[MessagePassing, dict[tuple[int, bool], _Kept | _Changing]]
        self._states = weakref.WeakKeyDictionary()
        self._hops: weakref.WeakKeyDictionary[MessagePassing, int] = weakref.WeakKeyDictionary()
        self._limit: int | None = None
        self._inside = False  # a forward pass of the model
        self._some_rank_is_blind: bool | None = None

    @property
    def kept_bytes(self) -> int:
        """Memory of the results that are kept."""
        return sum(result.nbytes for result in self.results)

    @property
    def results(self) -> list[Tensor]:
        """What is kept."""
        states = [state for known in self._states.values() for state in known.values()]
        return [state.result for state in states if isinstance(state, _Kept)]

    def begin_forward(self) -> None:
        """Called before each forward pass of the model: hops of a layer are told apart by their order in it."""
        self._hops.clear()
        self._inside = True

    def end_forward(self) -> None:
        """Called after each forward pass: a layer that is called by itself makes its first hop each time."""
        self._hops.clear()
        self._inside = False

    def forget(self) -> None:
        """Let go of everything; called when the backend gets another graph or other savings."""
        self._states.clear()
        self._hops.clear()
        self._limit = self._some_rank_is_blind = None

    def drop(self, layer: MessagePassing) -> None:
        """Let go of what is kept for ``layer``."""
        self._states.pop(layer, None)

    def expects(self, layer: MessagePassing, x: Tensor, edge_weight: Tensor | None = None) -> bool:
        """Whether the next hop of ``layer``, given ``x``, is expected to be over fixed rows."""
        if not (self._applies(layer) and fixable(x) and fixable(edge_weight)):
            return False
        known = self._states.get(layer, {})
        if not torch.is_grad_enabled():  # most rows need no gradient here: only what training has kept is fixed
            return self._agreed(any(isinstance(state, _Kept) and _same_rows(state, x) for state in known.values()), x)
        key = self._key(layer)
        state = known.get(key)
        if not isinstance(state, _Kept):
            return state is None
        same = self._agreed(_same_rows(state, x), x)
        if not same:
            known[key] = _Changing((weakref.ref(x),), identity_of(x))
        return same

    def run(
        self, layer: MessagePassing, edge_index: Tensor, kwargs: dict[str, Any], hop: Callable[[], Tensor]
    ) -> Tensor:
        """The result of a hop that is one sparse product, kept or computed by ``hop``."""
        x: Tensor = _source(kwargs)
        weight: Tensor | None = kwargs.get("edge_weight")
        key = self._key(layer)
        self._hops[layer] = key[0] + 1
        value = edge_index.value if isinstance(edge_index, Adjacency) else None
        if not (self._applies(layer) and all(fixable(tensor) for tensor in (x, weight, value))):
            return hop()
        given = (x, weight, value, edge_index)
        identity = (*identity_of(x), *identity_of(weight), *identity_of(value), id(edge_index), layer.aggr)
        ask = of_relation(edge_index)
        known = self._states.setdefault(layer, {})
        state = known.get(key)
        found = next(
            (other for other in (state, *known.values()) if other is not None and other.is_of(given, identity)), None
        )
        if self._agreed(found is not None, x, ask=ask):
            return _given(found.result) if isinstance(found, _Kept) else hop()
        again = isinstance(state, _Changing) and state.came_again(given, identity)
        latest = tuple(None if one is None else weakref.ref(one) for one in given)
        if not (self._agreed(again, x, ask=ask) or (state is None and torch.is_grad_enabled())):
            known[key] = _Changing(latest, identity)
            return hop()
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):  # training uses what evaluation may begin
            result = hop()
        if self._fits(layer, result):
            # rows that are given other memory must not leave theirs to be taken for them again
            inputs = (*(None if tensor is None else tensor.detach() for tensor in (x, weight, value)), edge_index)
            known[key] = _Kept(inputs, identity, result, version_of(result))
        else:
            known[key] = _Changing(latest, identity, too_large=True)
        return _given(result)

    def _applies(self, layer: MessagePassing) -> bool:
        savings = self._backend.savings
        return savings.first_hop and savings.no_input_gradient and _pure(type(layer)) and not hooked(layer)

    def _key(self, layer: MessagePassing) -> tuple[int, bool]:
        return self._hops.get(layer, 0) if self._inside else 0, layer.training

    def _agreed(self, same: bool, x: Tensor, *, ask: bool = False) -> bool:
        """``same`` on all ranks; only asked where one may not see a change, or if told to."""
        if self._some_rank_is_blind is None:
            shard = self._backend.shard  # of this hop, or of a later one
            blind = blind_to(x) or shard.num_owned <= 1 or shard.adjacency.size(1) <= 1
            self._some_rank_is_blind = self._backend.max_over_ranks(int(blind)) > 0
        return self._backend.max_over_ranks(int(not same)) == 0 if self._some_rank_is_blind or ask else same

    def _fits(self, layer: MessagePassing, result: Tensor) -> bool:
        if self._limit is None:
            self._limit = self._backend.first_hop_bytes(result.device)
        total = self.stands_for * (self.kept_bytes + result.nbytes)
        fits = self._backend.max_over_ranks(int(total > self._limit)) == 0
        if not fits and not self.rehearsed:
            warnings.warn(
                f"the first hop of {layer_name(layer)} is computed in every epoch: keeping its result would bring what "
                f"is kept to {total / 2**20:.0f} MiB on this rank or more on another, beyond the limit of "
                f"{self._limit / 2**20:.0f} MiB; raise savings.first_hop_mib",
                stacklevel=2,
            )
        return fits


def _given(result: Tensor) -> Tensor:
    """What a layer gets of a result that is kept: a tensor of its own over the same memory.

    In inference mode a write into that memory would go unnoticed.
    """
    return result.clone() if torch.is_inference_mode_enabled() else result.detach()


def _pure(cls: type[MessagePassing]) -> bool:
    """Whether the result depends on rows, weights and edges alone; a user's code may read parameters, or draw."""
    own = cls.message_and_aggregate.__module__.startswith("torch_geometric.")
    return own and cls.update is MessagePassing.update


def _source(kwargs: dict[str, Any]) -> Any:
    """The source rows of a hop that is one sparse product."""
    x = kwargs.get("x")
    return x[0] if isinstance(x, (tuple, list)) else x


def _same_rows(state: _Kept, x: Tensor) -> bool:
    identity = identity_of(x)
    return state.identity[: len(identity)] == identity
